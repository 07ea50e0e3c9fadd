"""Training of the LSTM forecaster with torch.

The loss is the negative log-likelihood of staying, piece by piece of the horizon grid, plus the
pinball loss of the log rates; labels that are unknown count for nothing. In each batch some devices
lose their channels or their clock, so that one network serves recordings which know only a part.
Training stops when the loss on devices that it does not learn from has not fallen for some epochs,
and the best weights are kept. After every epoch the whole state is written, so training goes on
where it was interrupted, to the same result: the order of an epoch depends on the seed and the
epoch alone.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import torch
from torch import Tensor
from torch.nn import functional

from fedstale.errors import ResumeError
from fedstale.traces.forecast.examples import Examples
from fedstale.traces.forecast.features import Floats, features, ratios
from fedstale.traces.forecast.forecaster import Prior
from fedstale.traces.forecast.grid import LEVELS, RATE_HORIZONS_S, RATES
from fedstale.traces.forecast.lstm import HIDDEN, SHAPES, STAYS

BATCH = 512
EPOCHS = 40
PATIENCE = 6
LEARNING_RATE = 3e-3
_DECAY = 0.05
_HIDE = 0.15

Weights = dict[str, Tensor]


def train(
    training: Examples,
    validation: Examples,
    prior: Prior,
    *,
    seed: int,
    progress: Callable[[int, float, float], None] | None = None,
    checkpoint: str | None = None,
    epochs: int = EPOCHS,
) -> dict[str, Floats]:
    """Return trained weights, of the shapes of `fedstale.traces.forecast.lstm.SHAPES`.

    Args:
        training: what to learn from.
        validation: of other devices, to stop early on.
        prior: of the fleet.
        seed: of the first weights and of the order of examples.
        progress: told the epoch and both losses after each epoch.
        checkpoint: folder to keep the state of training in; None for none.
        epochs: at most this many.

    Raises:
        ResumeError: the checkpoint is of another training.
    """
    data, held_out = _tensors(training, prior), _tensors(validation, prior)
    run = _Run.start(seed, len(training))
    if checkpoint is not None:
        run.resume(Path(checkpoint))
    threads = torch.get_num_threads()
    # So small a network is no faster on several threads, and sums in the same order on one.
    torch.set_num_threads(1)
    try:
        while run.epoch < epochs and run.epoch - run.best_epoch <= PATIENCE:
            rate = 0.5 * LEARNING_RATE * (1 + np.cos(np.pi * run.epoch / epochs))
            loss = _epoch(run, data, rate)
            with torch.no_grad():
                tested = float(_loss(run.weights, held_out))
            run.epoch += 1
            if tested < run.best_loss:
                run.best_loss, run.best_epoch = tested, run.epoch
                run.best = {k: w.detach().clone() for k, w in run.weights.items()}
            if checkpoint is not None:
                run.save(Path(checkpoint))
            if progress is not None:
                progress(run.epoch, loss, tested)
    finally:
        torch.set_num_threads(threads)
    return {k: w.detach().numpy().astype(np.float32) for k, w in run.best.items()}


@dataclass(kw_only=True)
class _Data:
    sequence: Tensor
    static: Tensor
    stays: Tensor
    ratios: Tensor

    def take(self, which: Tensor) -> "_Data":
        return _Data(
            sequence=self.sequence[:, which],
            static=self.static[which].clone(),
            stays=self.stays[which],
            ratios=self.ratios[which].clone(),
        )


def _tensors(examples: Examples, prior: Prior) -> _Data:
    given = features(examples.seen, prior)
    y = ratios(examples.targets.rates, given.level)

    def tensor(x: npt.NDArray[np.floating]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))

    return _Data(
        sequence=tensor(given.sequence),
        static=tensor(given.static),
        stays=tensor(examples.targets.stays),
        ratios=tensor(y),
    )


def _epoch(run: "_Run", data: _Data, rate: float) -> float:
    order = torch.Generator().manual_seed(run.seed * 100_003 + run.epoch)
    where = torch.randperm(run.n, generator=order)
    total = 0.0
    for batch in torch.split(where, BATCH):
        part = _with_parts_hidden(data.take(batch), order)
        loss = _loss(run.weights, part)
        gradients = torch.autograd.grad(loss, list(run.weights.values()))
        run.step(gradients, rate)
        total += float(loss.detach()) * len(batch)
    return total / run.n


def _with_parts_hidden(part: _Data, rng: torch.Generator) -> _Data:
    """Hide whole channels, and the clock, from some devices, as a recording may not know them."""
    n = part.static.shape[0]
    part.sequence = part.sequence.clone()
    for channel in range(len(RATES) + 1):
        hidden = torch.rand(n, generator=rng) < _HIDE
        part.sequence[:, hidden, channel] = 0.0
        # Columns follow `features._static`: presence known, channels known, levels, newest.
        columns = [12] if channel == 0 else [12 + channel, 15 + channel, 18 + channel]
        for column in columns:
            part.static[hidden, column] = 0.0
        if channel:
            # A ratio to a level that is hidden cannot be asked for.
            part.ratios[hidden, channel - 1] = torch.nan
    hidden = torch.rand(n, generator=rng) < _HIDE
    part.static[hidden, 3:8] = 0.0
    return part


def network(weights: Weights, sequence: Tensor, static: Tensor) -> Tensor:
    """Return the raw outputs, as `fedstale.traces.forecast.lstm.forward` does."""
    n = static.shape[0]
    state, cell = torch.zeros(n, HIDDEN), torch.zeros(n, HIDDEN)
    ones = torch.ones(n, 1)
    inputs = sequence @ weights["recurrent"][: sequence.shape[2]] + weights["recurrent"][-1]
    kernel = weights["recurrent"][sequence.shape[2] : -1]
    for step in inputs:
        gates = step + state @ kernel
        opened = torch.sigmoid(gates[:, : 3 * HIDDEN])
        cell = cell * opened[:, HIDDEN : 2 * HIDDEN]
        cell = cell + opened[:, :HIDDEN] * torch.tanh(gates[:, 3 * HIDDEN :])
        state = torch.tanh(cell) * opened[:, 2 * HIDDEN :]
    inner = torch.cat([state, static, ones], dim=1) @ weights["hidden"]
    return torch.cat([torch.relu(inner), static, ones], dim=1) @ weights["output"]


def _loss(weights: Weights, data: _Data) -> Tensor:
    raw = network(weights, data.sequence, data.static)
    return _leaving_loss(raw[:, :STAYS], data.stays) + _pinball_loss(raw[:, STAYS:], data.ratios)


def _leaving_loss(logits: Tensor, stays: Tensor) -> Tensor:
    before = torch.cat([torch.ones_like(stays[:, :1]), stays[:, :-1]], dim=1)
    at_risk = (before == 1.0) & ~torch.isnan(stays)
    if not bool(at_risk.any()):
        return logits.sum() * 0.0
    each = functional.binary_cross_entropy_with_logits(
        logits, torch.nan_to_num(stays), reduction="none"
    )
    return (each * at_risk).sum() / len(stays)


def _pinball_loss(raw: Tensor, truth: Tensor) -> Tensor:
    low, middle, high = raw.reshape(-1, len(RATES), RATE_HORIZONS_S.size, LEVELS.size).unbind(-1)
    known = ~torch.isnan(truth)
    if not bool(known.any()):
        return raw.sum() * 0.0
    truth = torch.nan_to_num(truth)
    loss = torch.zeros_like(truth)
    quantiles = (middle - functional.softplus(low), middle, middle + functional.softplus(high))
    for level, quantile in zip(LEVELS, quantiles, strict=True):
        miss = truth - quantile
        loss = loss + torch.maximum(level * miss, (level - 1.0) * miss)
    # By the number of examples, not of known labels, so that a rare channel is not made loud.
    return (loss * known).sum() / len(truth) / RATE_HORIZONS_S.size


@dataclass(kw_only=True)
class _Run:
    """The whole state of a training: weights, Adam's moments, and the best so far."""

    seed: int
    n: int
    weights: Weights
    first: Weights
    second: Weights
    best: Weights
    epoch: int = 0
    steps: int = 0
    best_loss: float = np.inf
    best_epoch: int = 0

    @classmethod
    def start(cls, seed: int, n: int) -> "_Run":
        rng = torch.Generator().manual_seed(seed)
        weights = {}
        for name, (rows, columns) in SHAPES.items():
            w = torch.randn(rows, columns, generator=rng) / np.sqrt(rows)
            w[-1] = 0.0
            weights[name] = w
        # A forget gate that starts open remembers; a wide first guess is not far off anywhere.
        weights["recurrent"][-1, HIDDEN : 2 * HIDDEN] = 1.0
        weights["output"] *= 0.1
        zeros = {k: torch.zeros_like(w) for k, w in weights.items()}
        return cls(
            seed=seed,
            n=n,
            weights={k: w.requires_grad_() for k, w in weights.items()},
            first=zeros,
            second={k: z.clone() for k, z in zeros.items()},
            best={k: w.detach().clone() for k, w in weights.items()},
        )

    @torch.no_grad()
    def step(self, gradients: tuple[Tensor, ...], rate: float) -> None:
        """Make one step of AdamW (Loshchilov, Hutter. ICLR 2019), with gradients of norm <= 1."""
        self.steps += 1
        norm = torch.sqrt(sum((g * g).sum() for g in gradients))  # type: ignore[arg-type]
        scale = min(1.0, 1.0 / (float(norm) + 1e-12))
        for (name, w), g in zip(self.weights.items(), gradients, strict=True):
            m, v = self.first[name], self.second[name]
            m.mul_(0.9).add_(g * scale, alpha=0.1)
            v.mul_(0.999).addcmul_(g * scale, g * scale, value=0.001)
            away = (m / (1 - 0.9**self.steps)) / (torch.sqrt(v / (1 - 0.999**self.steps)) + 1e-8)
            w.mul_(1 - rate * _DECAY).sub_(away, alpha=rate)

    def save(self, folder: Path) -> None:
        """Write the state beside its place, then put it there."""
        folder.mkdir(parents=True, exist_ok=True)
        groups = {"w": self.weights, "m": self.first, "v": self.second, "b": self.best}
        arrays = {
            f"{g}.{k}": t.detach().numpy() for g, group in groups.items() for k, t in group.items()
        }
        counts = {
            "seed": self.seed,
            "n": self.n,
            "epoch": self.epoch,
            "steps": self.steps,
            "best_loss": self.best_loss,
            "best_epoch": self.best_epoch,
        }
        beside = folder / "training.safetensors.new"
        safetensors.numpy.save_file(arrays, beside, metadata={"counts": json.dumps(counts)})
        beside.replace(folder / "training.safetensors")

    def resume(self, folder: Path) -> None:
        """Take over the state in a folder, if there is one."""
        path = folder / "training.safetensors"
        if not path.exists():
            return
        with safetensors.safe_open(path, framework="numpy") as file:
            counts = json.loads((file.metadata() or {})["counts"])
            if (counts["seed"], counts["n"]) != (self.seed, self.n):
                raise ResumeError(
                    f"{path}: training with seed {counts['seed']} on {counts['n']} examples, "
                    f"expected seed {self.seed} and {self.n}; choose another folder"
                )
            for letter, group in (("m", self.first), ("v", self.second), ("b", self.best)):
                for name in group:
                    group[name] = torch.from_numpy(file.get_tensor(f"{letter}.{name}"))
            for name in self.weights:
                tensor = torch.from_numpy(file.get_tensor(f"w.{name}"))
                self.weights[name] = tensor.requires_grad_()
        self.epoch, self.steps = counts["epoch"], counts["steps"]
        self.best_loss, self.best_epoch = counts["best_loss"], counts["best_epoch"]
