"""A client's side: `kronecker_factors` of a network's linear layers, and `Preconditioner`."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstale.contrib.kfac.merge import ABOUT, INVERSES, RECORD, layers_of, symmetric
from fedstale.strategies.types import RejectionError


def kronecker_factors(
    network: nn.Module,
    batches: Iterable[Tensor],
    *,
    seed: int = 0,
    decay: float = 0.95,
    loss: Callable[[Tensor], Tensor] | None = None,
) -> ArrayRecord:
    """Measure A and G of each linear layer, as `KroneckerMean` reads them in a reply.

        reply["kfac"] = kronecker_factors(network, images.split(64))

    With `a` the layer's input, followed by a 1 where it has a bias, and `g` the gradient of an
    example's loss by the layer's output, A is the mean of `a a'` and G that of `g g'`: the Fisher
    information of the layer is near their Kronecker product. Labels are those that the model would
    draw. Means go over batches, the old one keeping min(1 - 1/k, decay) at the k-th batch.

    Args:
        network: which has been trained; its weights and gradients stay as they are.
        batches: of what the network takes; the first axis of each is examples.
        seed: of the labels that are drawn.
        decay: largest share that a mean keeps at a batch, in [0, 1).
        loss: returns the mean loss of a batch of outputs at labels that the model would draw, over
            as many rows as its linear layers see; None for the cross-entropy of logits in the last
            axis.

    Returns:
        The upper triangles of A and G, row by row, as float32 of shape (n (n + 1) / 2,), under the
        layer's name in `state_dict` with `.A` and `.G`; none of a layer that learns nothing.

    Reference:
        Martens, Grosse. Optimizing Neural Networks with Kronecker-factored Approximate Curvature.
        ICML 2015.
    """
    random = torch.Generator().manual_seed(seed)
    loss = loss or partial(_at_drawn_labels, random)
    means: dict[str, list[Tensor]] = {}
    batches_of: dict[str, int] = {}
    passed: list[tuple[str, Tensor, Tensor]] = []
    """Layers of a batch in their order, with input and output."""

    def watch(name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        passed.append((name, inputs[0].detach(), output))
        # What comes behind may write in place.
        return output.clone()

    layers = {name: x for name, x in network.named_modules() if isinstance(x, nn.Linear)}
    hooks = [x.register_forward_hook(partial(watch, name)) for name, x in layers.items()]
    try:
        for batch in batches:
            passed.clear()
            mean_loss = loss(network(batch))
            learnt = [each for each in passed if each[2].requires_grad]
            outputs = [output for _, _, output in learnt]
            grads = torch.autograd.grad(mean_loss, outputs, materialize_grads=True)
            for (name, a, _), grad in zip(learnt, grads, strict=True):
                new = _products(a, grad, layers[name].bias is not None)
                n = batches_of[name] = batches_of.get(name, 0) + 1
                keep = min(1 - 1 / n, decay)
                old = means.get(name, new)
                means[name] = [keep * x + (1 - keep) * y for x, y in zip(old, new, strict=True)]
    finally:
        for hook in hooks:
            hook.remove()
    return ArrayRecord(
        {
            f"{name}.{letter}": Array(x[tuple(torch.triu_indices(*x.shape))].float().cpu().numpy())
            for name, pair in means.items()
            for letter, x in zip("AG", pair, strict=True)
        }
    )


def exchange_inverses(
    message: Message, context: Context, factors: Callable[[], ArrayRecord]
) -> tuple[ArrayRecord, dict[str, ArrayRecord]]:
    """Return the inverses that a site has, and what its reply holds for `SharedInverses`.

    Both are empty if the server has no such stage. Inverses are kept in the context's state.

    Args:
        message: of training.
        context: of the site.
        factors: measures them on the model in the message; called if the server asks for them.
    """
    about = message.content.get(ABOUT)
    if not isinstance(about, ConfigRecord):
        return ArrayRecord(), {}
    new = message.content.array_records[INVERSES]
    held = context.state[INVERSES] = ArrayRecord({**context.state.get(INVERSES, {}), **new})
    return held, {RECORD: factors()} if about["measure"] else {}


class Preconditioner:
    """Replaces gradients of linear layers by G^-1 grad A^-1, between `backward` and a step.

    Layers without inverses keep theirs. The new ones are also multiplied by
    min(1, sqrt(clip / (rate^2 sum <G^-1 grad A^-1, grad>))), which bounds what a step changes.

    Args:
        network: which is trained.
        inverses: of a server that is trusted; triangles by a layer's name with `.A` and `.G`.
        clip: kappa of the paper, > 0.

    Raises:
        RejectionError: inverses do not fit the network.

    Reference:
        Pauloski et al. Convolutional Neural Network Training with Distributed K-FAC. SC 2020.
    """

    def __init__(self, network: nn.Module, inverses: ArrayRecord, *, clip: float = 0.001) -> None:
        self._clip, layers = clip, dict(network.named_modules())
        self._layers: list[tuple[nn.Linear, Tensor, Tensor]] = []
        for name in layers_of(inverses):
            layer = layers.get(name)
            if not isinstance(layer, nn.Linear):
                raise RejectionError(RECORD, f"inverses of {name[:40]!r}, no linear layer")
            sizes = {"A": layer.in_features + (layer.bias is not None), "G": layer.out_features}
            keys = ((f"{name}.{letter}", n) for letter, n in sizes.items())
            found = (torch.from_numpy(symmetric(key, inverses.get(key), n)) for key, n in keys)
            a, g = (x.to(layer.weight) for x in found)
            self._layers.append((layer, a, g))

    @torch.no_grad()
    def __call__(self, learning_rate: float) -> None:
        """Replace gradients in place, for a step with a learning rate > 0."""
        found, total = list[tuple[Tensor, Tensor]](), 0.0
        for layer, a, g in self._layers:
            grads = [x.grad for x in layer.parameters() if x.grad is not None]
            if len(grads) == len(list(layer.parameters())):
                joined = torch.cat([x.view(len(g), -1) for x in grads], 1)  # the bias comes last
                moved = g @ joined @ a
                total += float((moved * joined).sum())
                n_in = layer.in_features
                found += zip(grads, (moved[:, :n_in], moved[:, n_in:]), strict=False)
        scale = min(1.0, (self._clip / max(learning_rate**2 * total, 1e-30)) ** 0.5)
        for grad, new in found:
            grad.copy_(scale * new.reshape(grad.shape))


def _products(a: Tensor, grad: Tensor, has_bias: bool) -> list[Tensor]:
    """Return the mean of a a' and of g g' over a batch.

    Args:
        a: inputs of a layer, (..., in).
        grad: of the batch's mean loss by its outputs, (..., out).
        has_bias: of the layer.
    """
    # Sums of many rows in float32 are indefinite by more than what the server bears.
    a, grad = a.flatten(0, -2).double(), grad.flatten(0, -2).double()
    if has_bias:
        a = torch.cat([a, a.new_ones(len(a), 1)], 1)
    # The loss is a mean: n times its gradient is that of an example.
    return [a.T @ a / len(a), grad.T @ grad * len(a)]


def _at_drawn_labels(random: torch.Generator, logits: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (..., classes) at labels drawn by them, in nats."""
    logits = logits.flatten(0, -2)
    drawn = torch.multinomial(logits.detach().cpu().softmax(1), 1, generator=random)
    return cross_entropy(logits, drawn[:, 0].to(logits.device))
