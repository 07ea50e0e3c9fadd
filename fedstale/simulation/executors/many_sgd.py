"""Trains many clients as one program: their models lie on top of one another, and step together.

Each client takes its own batches in its own order, with its own momentum, exactly the steps that it
would take alone; only sums are rounded otherwise. Clients are sorted by their number of steps, so
those who have finished are a tail that is left out, and batches are padded with weight 0.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedstale.errors import ConfigError
from fedstale.strategies.stages import StepsDone

logger = logging.getLogger(__name__)

Index = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Array = npt.NDArray[np.float64]
Models = dict[str, Tensor]
"""Each array of a model with a first axis of clients."""

Params = dict[str, Tensor]
MeanLoss = Callable[[Params, tuple[Tensor, ...], Tensor], Tensor]
Step = Callable[[Params, tuple[Tensor, ...], Tensor], tuple[Params, Tensor]]

TRACED_AT = 100
"""Use of a shape at which it is traced. To trace takes as long as some hundred steps, so no run
takes much more than twice the time of one that knew from the first step which shapes to trace."""

_SETTINGS = ("learning_rate", "momentum", "weight_decay", "max_norm", "proximal_mu")
_NEEDED = {"data", "order", "batch_size", "learning_rate"}
_STEPS = "steps"
_ALLOWED = {*_NEEDED, *_SETTINGS, _STEPS}


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """What one client trains on, as the app's `job` returned it, checked."""

    given: Mapping[str, Any]
    data: tuple[Tensor, ...]
    order: Index
    """Examples in the order of training, one row an epoch; shape (epochs, examples)."""
    batch_size: int
    settings: Mapping[str, float]
    n_steps: int
    """Number of steps that the client takes, in all of the epochs or in their first ones."""
    done: StepsDone | None = None
    """What the app has noted of its share of the work."""

    @classmethod
    def of(cls, given: Mapping[str, Any], done: StepsDone | None = None) -> "TrainingTask":
        """Check the result of `job` and the steps that the app has recorded meanwhile.

        Raises:
            ConfigError: a key is missing or means nothing, or a value is of the wrong kind.
        """
        if not _NEEDED <= given.keys() <= _ALLOWED:
            raise ConfigError(
                f"job of [tool.fedstale.batched] returned the keys {sorted(given)}: expected "
                f"{sorted(_NEEDED)}, and no others than steps, momentum, weight_decay, max_norm "
                "and proximal_mu"
            )
        data, order = tuple(given["data"]), np.asarray(given["order"], dtype=np.int64)
        if not data or len({len(tensor) for tensor in data}) != 1:
            raise ConfigError(
                f"job of [tool.fedstale.batched] returned data of {[len(x) for x in data]} "
                "examples: expected tensors with one common length"
            )
        if order.ndim != 2 or int(given["batch_size"]) < 1:
            raise ConfigError(
                f"job of [tool.fedstale.batched] returned an order of shape {order.shape} and "
                f"batch_size = {given['batch_size']}: expected one row an epoch, and at least 1"
            )
        settings = {name: float(given.get(name) or 0.0) for name in _SETTINGS}
        batch_size = int(given["batch_size"])
        whole = len(order) * -(-order.shape[1] // batch_size)
        steps = whole if given.get(_STEPS) is None else int(given[_STEPS])
        if not 0 <= steps <= whole:
            raise ConfigError(
                f"job of [tool.fedstale.batched] returned steps = {steps}: expected at most the "
                f"{whole} of its epochs"
            )
        return cls(given, data, order, batch_size, settings, steps, done)

    @property
    def n_examples(self) -> int:
        """Number of examples of the client."""
        return len(self.data[0])


class ManySGD:
    """SGD on many clients at once, given the network and the loss of each example."""

    def __init__(
        self,
        network: Callable[[], nn.Module],
        losses: Callable[..., Tensor],
        device: torch.device | str = "cpu",
    ) -> None:
        """Prepare the program.

        Args:
            network: makes the model; its weights do not matter.
            losses: called with (network, *batch), returns the loss of each example, shape (batch,).
            device: where to train.

        Raises:
            ConfigError: the network cannot be trained so.
        """
        with torch.random.fork_rng(devices=[]):
            self._network = network().to(device)
        self._network.requires_grad_(False)
        self._losses, self._device = losses, torch.device(device)
        if any(True for _ in self._network.buffers()):
            raise ConfigError(
                "the network has buffers, such as those of BatchNorm, which change while it "
                "trains: executor = 'batched' trains parameters alone; use 'processes'"
            )
        self._names = [name for name, _ in self._network.named_parameters()]
        self._step = TracedStep(self._mean_loss)

    def __call__(self, models: Models, tasks: Sequence[TrainingTask]) -> tuple[Models, list[float]]:
        """Train.

        Args:
            models: each array with a first axis of clients; not changed, and may be `expand`ed.
            tasks: one a client.

        Returns:
            The trained arrays, and each client's mean loss over its last steps, as many as in an
            epoch.

        Raises:
            ConfigError: the arrays are not those of the network.
        """
        self._check(models)
        order = sorted(range(len(tasks)), key=lambda i: -tasks[i].n_steps)
        tasks = [tasks[i] for i in order]
        place = torch.tensor(order, device=self._device)
        params = [models[name].to(self._device)[place] for name in self._names]
        data = [
            torch.cat(p).to(self._device) for p in zip(*(task.data for task in tasks), strict=True)
        ]
        steps, batches = _Steps(params, tasks, self._device), Batches(tasks)
        totals = torch.zeros(len(tasks), dtype=torch.float64, device=self._device)
        with _in_full_precision(self._device):
            for t in range(batches.n_steps):
                read = (torch.from_numpy(x) for x in batches.at(t))
                index, weights, shares = (x.to(self._device) for x in read)
                k = len(index)
                # Clients that are done are a tail, for which no gradient is made.
                active = {name: p[:k] for name, p in zip(self._names, params, strict=True)}
                grads, loss = self._step(active, tuple(x[index] for x in data), weights)
                steps.take(k, [grads[name] for name in self._names])
                totals[:k] += shares * loss
        back = slice(None) if order == list(range(len(order))) else place.argsort()
        trained = {name: p[back].cpu() for name, p in zip(self._names, params, strict=True)}
        return trained, totals[back].tolist()

    def _mean_loss(
        self, params: Mapping[str, Tensor], batch: tuple[Tensor, ...], weights: Tensor
    ) -> Tensor:
        def network(*inputs: Any, **named: Any) -> Any:
            return functional_call(self._network, dict(params), inputs, named)

        return (self._losses(network, *batch) * weights).sum()

    def _check(self, models: Models) -> None:
        shapes = {n: tuple(p.shape) for n, p in self._network.named_parameters()}
        given = {name: tuple(stack.shape[1:]) for name, stack in models.items()}
        if shapes != given:
            raise ConfigError(
                f"the message holds arrays {given}: expected those of the declared network, "
                f"{shapes}"
            )


@contextmanager
def _in_full_precision(device: torch.device) -> Iterator[None]:
    """Make cuDNN add in float32, and in the same order each time; its default rounds to 10 bits."""
    if device.type != "cuda":
        yield
        return
    cudnn = torch.backends.cudnn
    with cudnn.flags(enabled=cudnn.enabled, deterministic=True, allow_tf32=False):
        yield


class _Steps:
    """What SGD does with the gradients of the first k clients, each with its own settings."""

    def __init__(
        self, params: list[Tensor], tasks: Sequence[TrainingTask], device: torch.device
    ) -> None:
        self._params = params
        self._settings = {
            name: torch.tensor([task.settings[name] for task in tasks], device=device)
            for name in _SETTINGS
        }
        self._is_used = {name: bool((s > 0).any()) for name, s in self._settings.items()}
        rates = {task.settings["learning_rate"] for task in tasks}
        self._rate = rates.pop() if len(rates) == 1 else None
        self._velocity: list[Tensor] | None = None
        self._received = [p.clone() for p in params] if self._is_used["proximal_mu"] else []

    @torch.no_grad()
    def take(self, k: int, grads: list[Tensor]) -> None:
        """Step: add FedProx's gradient, then as torch.optim.SGD: clip, decay, momentum, rate."""
        if self._is_used["proximal_mu"]:
            grads = [
                g + self._of("proximal_mu", k, g) * (p[:k] - received[:k])
                for g, p, received in zip(grads, self._params, self._received, strict=True)
            ]
        if self._is_used["max_norm"]:
            grads = self._clipped(k, grads)
        if self._is_used["weight_decay"]:
            grads = [
                g + self._of("weight_decay", k, g) * p[:k]
                for g, p in zip(grads, self._params, strict=True)
            ]
        if self._is_used["momentum"]:
            grads = self._with_momentum(k, grads)
        for p, g in zip(self._params, grads, strict=True):
            if self._rate is None:
                p[:k].sub_(self._of("learning_rate", k, g) * g)
            else:
                p[:k].add_(g, alpha=-self._rate)

    def _of(self, name: str, k: int, like: Tensor) -> Tensor:
        return self._settings[name][:k].to(like.dtype).view(k, *[1] * (like.dim() - 1))

    def _clipped(self, k: int, grads: list[Tensor]) -> list[Tensor]:
        """Shorten gradients as torch.nn.utils.clip_grad_norm_ does; 0 leaves them as they are."""
        norms = torch.stack([g.reshape(k, -1).norm(dim=1) for g in grads], dim=1).norm(dim=1)
        limit = self._settings["max_norm"][:k]
        factor = torch.where(limit > 0, (limit / (norms + 1e-6)).clamp(max=1.0), 1.0)
        return [g * factor.to(g.dtype).view(k, *[1] * (g.dim() - 1)) for g in grads]

    def _with_momentum(self, k: int, grads: list[Tensor]) -> list[Tensor]:
        if self._velocity is None:
            self._velocity = [torch.zeros_like(p) for p in self._params]
        for v, g in zip(self._velocity, grads, strict=True):
            v[:k].mul_(self._of("momentum", k, g)).add_(g)
        return [v[:k] for v in self._velocity]


class Batches:
    """The batches of clients that are sorted by falling number of steps."""

    def __init__(self, tasks: Sequence[TrainingTask]) -> None:
        self._examples = np.array([task.order.shape[1] for task in tasks])
        self._size = np.array([task.batch_size for task in tasks])
        self._steps = np.array([task.n_steps for task in tasks])
        self.n_steps = tasks[0].n_steps
        self._per_epoch = -(-self._examples // self._size)
        # Of as many steps as an epoch has, or of all if they are fewer; every batch is among them.
        self._counted = np.minimum(self._steps * self._size, self._examples)
        # The clients' data lie one after the other, and so do their orders.
        owned = np.array([task.n_examples for task in tasks])
        taken = np.array([task.order.size for task in tasks])
        first_owned, self._first = np.cumsum(owned) - owned, np.cumsum(taken) - taken
        self._order = np.concatenate([task.order.ravel() for task in tasks])
        self._order += np.repeat(first_owned, taken)

    def at(self, t: int) -> tuple[Index, Floats, Array]:
        """Return a step of the k clients that take it.

        What short batches lack is filled with their own first example at weight 0, whose loss is
        finite wherever the batch's is.

        Returns:
            Places of the examples in the data, shape (k, longest); their weights in the mean loss,
            same shape; and the share of the step in the mean loss of the last ones, shape (k,).
        """
        k = int(np.searchsorted(-self._steps, -t))
        per_epoch, size, examples = self._per_epoch[:k], self._size[:k], self._examples[:k]
        epoch, step = np.divmod(t, per_epoch)
        length = np.minimum(size, examples - step * size)
        begin = self._first[:k] + epoch * examples + step * size
        column = np.arange(int(length.max()))
        is_real = column < length[:, None]
        index = self._order[begin[:, None] + np.where(is_real, column, 0)]
        weights = (is_real / length[:, None]).astype(np.float32)
        is_last = t >= self._steps[:k] - per_epoch
        return index, weights, is_last * length / self._counted[:k]


class TracedStep:
    """Gradients and losses of a step for every client, from operations traced once for each shape.

    `torch.func.vmap` goes through every operation of a small model at a cost of some twenty
    microseconds of Python, most of what a small client takes. The operations depend on nothing but
    the shapes, so those of a shape that comes again and again are traced (`make_fx`), and from then
    on run as they stand, to the same bits.
    """

    def __init__(self, mean_loss: MeanLoss) -> None:
        """Prepare.

        Args:
            mean_loss: of one client's params, batch and weights; a function of these alone.
        """
        self._each: Step = vmap(grad_and_value(mean_loss), in_dims=(0, 0, 0))
        self._uses: Counter[Any] = Counter()
        self.traced: dict[Any, Step] = {}

    def __call__(
        self, params: Params, batch: tuple[Tensor, ...], weights: Tensor
    ) -> tuple[Params, Tensor]:
        """Return the gradients, shaped as the params, and the losses, shape (clients,).

        Args:
            params: each with a first axis of clients; they require no gradient.
            batch: each of shape (clients, examples, ...).
            weights: of the examples in the mean, shape (clients, examples).
        """
        shapes = tuple((x.shape, x.dtype) for x in (*params.values(), *batch, weights))
        step = self.traced.get(shapes)
        if step is not None:
            return step(params, batch, weights)
        self._uses[shapes] += 1
        if self._uses[shapes] == TRACED_AT:
            self.traced[shapes] = self._trace(params, batch, weights)
        return self._each(params, batch, weights)

    def _trace(self, params: Params, batch: tuple[Tensor, ...], weights: Tensor) -> Step:
        # Importing this takes a second, which short runs need not pay.
        from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415

        def step(params: Params, batch: tuple[Tensor, ...], weights: Tensor) -> Any:
            return self._each(params, batch, weights)

        try:
            traced = make_fx(step)(params, batch, weights)
        except Exception as problem:
            logger.debug("a step of this shape stays as it is: %s", problem)
            return self._each
        return torch.no_grad()(traced.forward)
