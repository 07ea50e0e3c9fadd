"""Training of the LSTM forecaster with torch.

The loss is the negative log-likelihood of staying, piece by piece of the horizon grid, plus the
pinball loss of the log rates; labels that are unknown count for nothing. In each batch some devices
lose their channels or their clock, so that one network serves recordings which know only a part.
Training stops when the loss on devices that it does not learn from has not fallen for some epochs,
and the best weights are kept. After every epoch the whole state is written, so training goes on
where it was interrupted, to the same result: the order of an epoch depends on the seed and the
epoch alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from fedstale.traces.forecast.chain import Chain
from fedstale.traces.forecast.examples import Examples
from fedstale.traces.forecast.features import Floats, features, ratios
from fedstale.traces.forecast.forecaster import Prior
from fedstale.traces.forecast.grid import LEVELS, RATE_HORIZONS_S, RATES
from fedstale.traces.forecast.lstm import HIDDEN, STAYS
from fedstale.traces.forecast.lstm_run import TrainingRun, Weights

BATCH = 512
EPOCHS = 24
PATIENCE = 6
LEARNING_RATE = 2e-3
DROPPED = 0.1
"""Share of what a layer says that is dropped in training."""
_HIDE = 0.15


def train(
    training: Examples,
    validation: Examples,
    prior: Prior,
    chain: Chain,
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
        chain: of the fleet, where forecasts of staying start.
        seed: of the first weights and of the order of examples.
        progress: told the epoch and both losses after each epoch.
        checkpoint: folder to keep the state of training in; None for none.
        epochs: at most this many.

    Raises:
        ResumeError: the checkpoint is of another training.
    """
    data, held_out = _tensors(training, prior, chain), _tensors(validation, prior, chain)
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
class _Data:
    sequence: Tensor
    static: Tensor
    chain: Tensor
    """Log-odds of staying as the chain says."""
    blind: Tensor
    """As it says without a clock."""
    stays: Tensor
    ratios: Tensor

    def take(self, which: Tensor) -> "_Data":
        return _Data(
            sequence=self.sequence[:, which],
            static=self.static[which].clone(),
            chain=self.chain[which].clone(),
            blind=self.blind[which],
            stays=self.stays[which],
            ratios=self.ratios[which].clone(),
        )


def _tensors(examples: Examples, prior: Prior, chain: Chain) -> _Data:
    seen = examples.seen
    given = features(examples.seen, prior)
    y = ratios(examples.targets.rates, given.level)

    def tensor(x: npt.NDArray[np.floating]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))

    return _Data(
        sequence=tensor(given.sequence),
        static=tensor(given.static),
        chain=tensor(chain.log_odds(seen.online, seen.time_of_day_s)),
        blind=tensor(chain.log_odds(seen.online, np.full(len(seen), np.nan))),
        stays=tensor(examples.targets.stays),
        ratios=tensor(y),
    )


def _epoch(run: TrainingRun, data: _Data, rate: float) -> float:
    order = torch.Generator().manual_seed(run.seed * 100_003 + run.epoch)
    where = torch.randperm(run.n, generator=order)
    total = 0.0
    for batch in torch.split(where, BATCH):
        part = _with_parts_hidden(data.take(batch), order)
        loss = _loss(run.weights, part, order)
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
        columns = [8] if channel == 0 else [8 + channel, 11 + channel, 14 + channel]
        for column in columns:
            part.static[hidden, column] = 0.0
        if channel:
            # A ratio to a level that is hidden cannot be asked for.
            part.ratios[hidden, channel - 1] = torch.nan
    hidden = torch.rand(n, generator=rng) < _HIDE
    part.static[hidden, 3:8] = 0.0
    part.chain[hidden] = part.blind[hidden]
    return part


def network(
    weights: Weights, sequence: Tensor, static: Tensor, rng: torch.Generator | None = None
) -> Tensor:
    """Return the raw outputs, as `fedstale.traces.forecast.lstm.forward` does, but (n, outputs).

    Given a generator, it drops some of what the two layers say, as in training.
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
    raw = network(weights, data.sequence, data.static, rng)
    leaving = _leaving_loss(raw[:, :STAYS] + data.chain, data.stays)
    return leaving + _pinball_loss(raw[:, STAYS:], data.ratios)


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
