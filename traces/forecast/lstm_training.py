"""Training of the LSTM forecaster with torch.

The loss is the negative log-likelihood of survival, piece by piece of the horizon grid, plus the
pinball loss of the log rates; labels that are unknown count for nothing. In each batch some devices
lose their channels or their clock, so that one network serves recordings which know only a part.
Training stops when the loss on devices that it does not learn from has not fallen for some epochs,
and the best weights are kept. After every epoch the whole state is written, so training goes on
where it was interrupted, to the same result: the order of an epoch depends on the seed and the
epoch alone.

AdamW is written out here, because its moments must be stored without pickle, which torch's own
optimizers use for their state.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy
import torch
from torch import Tensor
from torch.nn import functional

from fedstale.errors import ResumeError
from fedstale.traces.forecast.base import FleetStatistics
from fedstale.traces.forecast.baselines import HourlyChain
from fedstale.traces.forecast.dataset import Examples
from fedstale.traces.forecast.lstm import HIDDEN, PIECES, SHAPES, Floats, features, ratios
from fedstale.traces.forecast.observation import LEVELS, RATE_HORIZONS_S, RATES
from fedstale.traces.io.atomic import replacing

BATCH = 512
EPOCHS = 24
PATIENCE = 6
LEARNING_RATE = 2e-3
DECAY = 0.05
"""Decoupled weight decay."""
DROPPED = 0.1
"""Share of the outputs of a layer that is dropped in training."""
_HIDE = 0.15
_COUNTS = ("seed", "n", "epoch", "steps", "best_loss", "best_epoch")

Weights = dict[str, Tensor]


def train(
    training: Examples,
    validation: Examples,
    fleet: FleetStatistics,
    chain: HourlyChain,
    *,
    seed: int,
    progress: Callable[[int, float, float], None] | None = None,
    checkpoint: str | None = None,
    epochs: int = EPOCHS,
) -> dict[str, Floats]:
    """Return trained weights, of the shapes of `SHAPES`.

    Args:
        training: what to learn from.
        validation: of other devices, to stop early on.
        fleet: statistics of the training devices.
        chain: of the training devices, where forecasts of survival start.
        seed: of the first weights and of the order of examples.
        progress: called with the epoch and both losses after each epoch.
        checkpoint: folder to keep the state of training in; None for none.
        epochs: at most this many.

    Raises:
        ResumeError: the checkpoint is of another training.
    """
    data, held_out = _tensors(training, fleet, chain), _tensors(validation, fleet, chain)
    run = TrainingRun.start(seed, len(training))
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
class TrainingRun:
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
    def start(cls, seed: int, n: int) -> "TrainingRun":
        """Return the state before the first epoch, for n examples."""
        rng = torch.Generator().manual_seed(seed)
        weights = {}
        for name, (rows, columns) in SHAPES.items():
            w = torch.randn(rows, columns, generator=rng) / np.sqrt(rows)
            w[-1] = 0.0
            weights[name] = w
        # A forget gate that starts open remembers; a wide first guess is not far off anywhere.
        weights["gates"][-1, HIDDEN : 2 * HIDDEN] = 1.0
        weights["output"] *= 0.1
        # Training of survival starts at the chain.
        weights["output"][:, :PIECES] = 0.0
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
            change = (m / (1 - 0.9**self.steps)) / (torch.sqrt(v / (1 - 0.999**self.steps)) + 1e-8)
            w.mul_(1 - rate * DECAY).sub_(change, alpha=rate)

    def save(self, folder: Path) -> None:
        """Write the state to a new file, which then replaces the old one."""
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {
            f"{letter}.{name}": each.detach().numpy()
            for letter, group in self._groups().items()
            for name, each in group.items()
        }
        counts = {name: getattr(self, name) for name in _COUNTS}
        with replacing(folder / "training.safetensors") as file:
            file.write(safetensors.numpy.save(arrays, metadata={"counts": json.dumps(counts)}))

    def resume(self, folder: Path) -> None:
        """Restore the state in a folder, if there is one.

        Raises:
            ResumeError: it is damaged, or of another training.
        """
        path = folder / "training.safetensors"
        if not path.exists():
            return
        try:
            arrays = safetensors.numpy.load_file(path)
            with safetensors.safe_open(path, framework="numpy") as file:
                counts = json.loads((file.metadata() or {})["counts"])
        except (safetensors.SafetensorError, KeyError, ValueError, RecursionError) as problem:
            raise ResumeError(
                f"{path}: no state of a training ({problem}); delete it to begin again"
            ) from None
        if (counts["seed"], counts["n"]) != (self.seed, self.n):
            raise ResumeError(
                f"{path}: training with seed {counts['seed']} on {counts['n']} examples, "
                f"expected seed {self.seed} and {self.n}; choose another folder"
            )
        if any(f"w.{name}" not in arrays for name in self.weights):
            raise ResumeError(f"{path}: of another version of fedstale; delete it to begin again")
        for letter, group in self._groups().items():
            group.update({name: torch.from_numpy(arrays[f"{letter}.{name}"]) for name in group})
        for each in self.weights.values():
            each.requires_grad_()
        for name in _COUNTS:
            setattr(self, name, counts[name])

    def _groups(self) -> dict[str, Weights]:
        return {"w": self.weights, "m": self.first, "v": self.second, "b": self.best}


class _Data(NamedTuple):
    """Examples as tensors; the example is the first axis of each."""

    sequence: Tensor
    static: Tensor
    chain: Tensor
    """Log-odds of survival of the chain."""
    clockless: Tensor
    """The same for devices without a clock."""
    survival: Tensor
    ratios: Tensor


def _tensors(examples: Examples, fleet: FleetStatistics, chain: HourlyChain) -> _Data:
    observed = examples.observed
    given = features(observed, fleet)
    y = ratios(examples.rates, given.level)

    def tensor(x: npt.NDArray[np.floating]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))

    return _Data(
        sequence=tensor(given.sequence.transpose(1, 0, 2)),
        static=tensor(given.static),
        chain=tensor(chain.log_odds(observed.online, observed.time_of_day_s)),
        clockless=tensor(chain.log_odds(observed.online, np.full(len(observed), np.nan))),
        survival=tensor(examples.survival),
        ratios=tensor(y),
    )


def _epoch(run: TrainingRun, data: _Data, rate: float) -> float:
    order = torch.Generator().manual_seed(run.seed * 100_003 + run.epoch)
    where = torch.randperm(run.n, generator=order)
    total = 0.0
    for batch in torch.split(where, BATCH):
        part = _Data(*(each[batch] for each in data))
        _hide_parts(part, order)
        loss = _loss(run.weights, part, order)
        gradients = torch.autograd.grad(loss, list(run.weights.values()))
        run.step(gradients, rate)
        total += float(loss.detach()) * len(batch)
    return total / run.n


def _hide_parts(part: _Data, rng: torch.Generator) -> None:
    """Hide whole channels, and the clock, from some devices, as a recording may not know them."""
    n = part.static.shape[0]
    for channel in range(len(RATES) + 1):
        hidden = torch.rand(n, generator=rng) < _HIDE
        part.sequence[hidden, :, channel] = 0.0
        # Columns of `Features.static`: share online known, channels known, levels, newest.
        columns = [8] if channel == 0 else [8 + channel, 11 + channel, 14 + channel]
        for column in columns:
            part.static[hidden, column] = 0.0
        if channel:
            # A ratio to a level that is hidden is no target.
            part.ratios[hidden, channel - 1] = torch.nan
    hidden = torch.rand(n, generator=rng) < _HIDE
    part.static[hidden, 3:8] = 0.0
    part.chain[hidden] = part.clockless[hidden]


def network(
    weights: Weights, sequence: Tensor, static: Tensor, rng: torch.Generator | None = None
) -> Tensor:
    """Return the raw outputs, as `forward` does, but (n, outputs).

    Given a generator, it drops some outputs of the two layers, as in training.
    """
    n = static.shape[0]
    state, cell = torch.zeros(n, HIDDEN), torch.zeros(n, HIDDEN)
    ones = torch.ones(n, 1)
    inputs = sequence @ weights["gates"][: sequence.shape[2]] + weights["gates"][-1]
    kernel = weights["gates"][sequence.shape[2] : -1]
    for step in inputs:
        gates = step + state @ kernel
        opened = 0.5 + 0.5 * functional.softsign(gates[:, : 3 * HIDDEN])
        cell = cell * opened[:, HIDDEN : 2 * HIDDEN]
        cell = cell + opened[:, :HIDDEN] * functional.softsign(gates[:, 3 * HIDDEN :])
        state = functional.softsign(cell) * opened[:, 2 * HIDDEN :]
    state = _thinned(state, rng)
    inner = torch.relu(torch.cat([state, static, ones], dim=1) @ weights["hidden"])
    return torch.cat([_thinned(inner, rng), static, ones], dim=1) @ weights["output"]


def _thinned(x: Tensor, rng: torch.Generator | None) -> Tensor:
    """Return x with some of its numbers dropped (Srivastava et al., JMLR 15, 2014)."""
    if rng is None:
        return x
    return x * (torch.rand(x.shape, generator=rng) >= DROPPED) / (1.0 - DROPPED)


def _loss(weights: Weights, data: _Data, rng: torch.Generator | None = None) -> Tensor:
    raw = network(weights, data.sequence.transpose(0, 1).contiguous(), data.static, rng)
    leaving = _leaving_loss(raw[:, :PIECES] + data.chain, data.survival)
    return leaving + _pinball_loss(raw[:, PIECES:], data.ratios)


def _leaving_loss(logits: Tensor, survival: Tensor) -> Tensor:
    before = torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], dim=1)
    at_risk = (before == 1.0) & ~torch.isnan(survival)
    each = functional.binary_cross_entropy_with_logits(
        logits, torch.nan_to_num(survival), reduction="none"
    )
    return (each * at_risk).sum() / len(survival)


def _pinball_loss(raw: Tensor, truth: Tensor) -> Tensor:
    low, middle, high = raw.reshape(-1, len(RATES), RATE_HORIZONS_S.size, LEVELS.size).unbind(-1)
    known = ~torch.isnan(truth)
    truth = torch.nan_to_num(truth)
    loss = torch.zeros_like(truth)
    quantiles = (middle - functional.softplus(low), middle, middle + functional.softplus(high))
    for level, quantile in zip(LEVELS, quantiles, strict=True):
        miss = truth - quantile
        loss = loss + torch.maximum(level * miss, (level - 1.0) * miss)
    # By the number of examples, not of known labels, so that a rare channel is not made loud.
    return (loss * known).sum() / len(truth) / RATE_HORIZONS_S.size
