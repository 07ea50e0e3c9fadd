"""Training of the networks of a learnt forecaster with torch.

The loss of sessions is the negative log-likelihood of the hazard, piece by piece of the horizon
grid, plus the cross-entropy of being online at each horizon; that of a channel is the pinball loss
of its quantiles. Labels that are unknown count for nothing: a piece in which a log ends says
nothing, whatever happened in it before, or the last hours of each log would hold changes alone.
Some devices lose their clock, as others have none. The epoch that is best on devices which the
network does not learn from is kept.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from fedstale.traces import Array, stream
from fedstale.traces.forecast.base import log_rate, shares
from fedstale.traces.forecast.dataset import Examples
from fedstale.traces.forecast.inputs import (
    Floats,
    channel_targets,
    of_other_devices,
    session_inputs,
    without_clock,
)
from fedstale.traces.forecast.lstm import SESSIONS, Weights
from fedstale.traces.forecast.observation import LEVELS, RATE_HORIZONS_S, RATES
from fedstale.traces.forecast.sessions import HORIZONS_S

if TYPE_CHECKING:
    from fedstale.traces.forecast.lstm import LSTM

EPOCHS = 8
BATCH = 1000
HIGHEST_RATE = 2e-3
"""Of the one cycle of the learning rate (Smith, Topin. Super-Convergence. 2019)."""
WEIGHT_DECAY = 1e-3
DROPPED = 0.2
"""Share of the outputs of a layer that is dropped in training."""
WITHOUT_CLOCK = 0.15
"""Share of the training examples whose clock is hidden."""
ONLINE_WEIGHT = 0.5
"""Weight of the loss of being online, against that of remaining so."""

logger = logging.getLogger(__name__)

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of outputs, shape (n, outputs), and the labels of the same examples."""


@dataclass(frozen=True, slots=True)
class Data:
    """Examples as tensors; the example is the first axis of each."""

    sequence: Tensor
    static: Tensor
    labels: Tensor

    @classmethod
    def of(cls, sequence: Floats, static: Floats, labels: Array) -> "Data":
        """Return the tensors of arrays, of which the sequence has the steps as its first axis."""
        arrays: tuple[npt.NDArray[np.floating], ...] = sequence.transpose(1, 0, 2), static, labels
        return cls(*(torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)) for x in arrays))

    def take(self, which: Tensor) -> "Data":
        """Return some of the examples."""
        return Data(self.sequence[which], self.static[which], self.labels[which])


def train_sessions(
    forecaster: "LSTM", training: Examples, validation: Examples, seed: int
) -> Weights:
    """Return the weights of the network of sessions, and set the scale of its inputs.

    Args:
        forecaster: which knows its fleet.
        training: what to learn from.
        validation: of other devices, to choose the epoch on.
        seed: of the first weights and of all that is drawn.
    """
    hidden = stream(seed, 7).random(len(training)) < WITHOUT_CLOCK
    seen = without_clock(training.observed, hidden)
    shown = of_other_devices(training, seen)
    numbers, runs = session_inputs(seen, forecaster.fleet, shown)
    forecaster.mean = np.nan_to_num(_over_known(np.mean, numbers))
    scale = np.nan_to_num(_over_known(np.std, numbers))
    forecaster.scale = np.where(scale > 1e-6, scale, 1.0)
    data = Data.of(runs, forecaster.standardised(numbers), _session_labels(training))
    around = forecaster.around.of_devices(validation.observed)
    numbers, runs = session_inputs(validation.observed, forecaster.fleet, around)
    held_out = Data.of(runs, forecaster.standardised(numbers), _session_labels(validation))
    weights = _first(forecaster.shapes(SESSIONS), seed)
    # Training starts at the shares of the fleet, whose logarithms no step need learn.
    weights["output"][-1] = torch.from_numpy(_log_odds_of_fleet(training))
    return _trained(SESSIONS, weights, data, held_out, session_loss, seed)


def train_channel(
    forecaster: "LSTM", training: Examples, validation: Examples, name: str, seed: int
) -> Weights:
    """Return the weights of the network of a channel, and set its usual spread; as above."""
    channel = RATES.index(name)
    seen = training.observed
    logs = log_rate(seen.rates[:, channel])
    many = np.count_nonzero(~np.isnan(logs), axis=1) > 1
    forecaster.spread[channel] = np.median(np.nanstd(logs[many], axis=1)) if many.any() else 1.0
    hidden = stream(seed, 7).random(len(training)) < WITHOUT_CLOCK
    parts = []
    for examples, observed in (
        (training, without_clock(seen, hidden)),
        (validation, validation.observed),
    ):
        given = forecaster.channel_inputs(observed, channel)
        targets = channel_targets(examples.rates[:, channel], given)
        parts.append(Data.of(given.sequence, given.static, targets))
    data, held_out = parts
    weights = _first(forecaster.shapes(name), seed)
    return _trained(name, weights, data, held_out, channel_loss, seed)


def _trained(  # noqa: PLR0917 - one network's training
    name: str, weights: dict[str, Tensor], data: Data, held_out: Data, loss: Loss, seed: int
) -> Weights:
    """Return the weights of the best epoch."""
    rng = torch.Generator().manual_seed(seed + 1)
    for w in weights.values():
        w.requires_grad_()
    n = len(data.labels)
    steps = EPOCHS * -(-n // BATCH)
    optimizer = torch.optim.AdamW(weights.values(), lr=HIGHEST_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, HIGHEST_RATE, total_steps=steps)
    best, least = weights, np.inf
    for epoch in range(1, EPOCHS + 1):
        total = 0.0
        for batch in torch.randperm(n, generator=rng).split(BATCH):  # type: ignore[no-untyped-call]
            part = data.take(batch)
            found = loss(network(weights, part.sequence, part.static, rng), part.labels)
            optimizer.zero_grad()
            found.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
            optimizer.step()
            schedule.step()
            total += float(found.detach()) * len(batch)
        with torch.no_grad():
            tested = float(
                loss(network(weights, held_out.sequence, held_out.static), held_out.labels)
            )
        if tested < least:
            least, best = tested, {k: w.detach().clone() for k, w in weights.items()}
        logger.info("%s, epoch %d: loss %.4f, held out %.4f", name, epoch, total / n, tested)
    return {k: w.detach().numpy().astype(np.float32) for k, w in best.items()}


def _first(shapes: dict[str, tuple[int, int]], seed: int) -> dict[str, Tensor]:
    rng, weights = torch.Generator().manual_seed(seed), {}
    for name, (rows, columns) in sorted(shapes.items()):
        w = torch.randn(rows, columns, generator=rng) / np.sqrt(rows)
        w[-1] = 0.0
        # A wide first guess is not far off anywhere.
        weights[name] = w * 0.1 if name == "output" else w
    if "gates" in weights:
        cells = weights["gates"].shape[1] // 4
        # A forget gate that starts open remembers.
        weights["gates"][-1, cells : 2 * cells] = 1.0
    return weights


def network(
    weights: dict[str, Tensor],
    sequence: Tensor,
    static: Tensor,
    rng: torch.Generator | None = None,
) -> Tensor:
    """Return the outputs, as `forward` does, but (n, outputs), of a sequence of (n, steps, ...).

    Given a generator, it drops some outputs of the two layers, as in training.
    """
    n = static.shape[0]
    inputs = [static, torch.ones(n, 1)]
    inner = []
    if "hidden" in weights:
        state = []
        if "gates" in weights:
            state = [_thinned(_last_state(weights["gates"], sequence), rng)]
        hidden = torch.relu(torch.cat([*state, *inputs], dim=1) @ weights["hidden"])
        inner = [_thinned(hidden, rng)]
    return torch.cat([*inner, *inputs], dim=1) @ weights["output"]


def _last_state(kernel: Tensor, sequence: Tensor) -> Tensor:
    (n, _, numbers), cells = sequence.shape, kernel.shape[1] // 4
    state, cell = torch.zeros(n, cells), torch.zeros(n, cells)
    given = sequence.transpose(0, 1) @ kernel[:numbers] + kernel[-1]
    for step in given:
        gates = step + state @ kernel[numbers:-1]
        opened = 0.5 + 0.5 * functional.softsign(gates[:, : 3 * cells])
        cell = cell * opened[:, cells : 2 * cells]
        cell = cell + opened[:, :cells] * functional.softsign(gates[:, 3 * cells :])
        state = functional.softsign(cell) * opened[:, 2 * cells :]
    return state


def _thinned(x: Tensor, rng: torch.Generator | None) -> Tensor:
    """Return x with some of its numbers dropped (Srivastava et al., JMLR 15, 2014)."""
    if rng is None:
        return x
    return x * (torch.rand(x.shape, generator=rng) >= DROPPED) / (1.0 - DROPPED)


def _log_odds_of_fleet(examples: Examples) -> Array:
    """Return the log-odds that no input would change, in the order of the outputs."""
    _, survival, available = np.split(_session_labels(examples), [1, 1 + HORIZONS_S.size], axis=1)
    ones = np.ones((len(examples), 1))
    pieces = np.where(np.concatenate([ones, survival[:, :-1]], axis=1) == 1.0, survival, np.nan)
    state = examples.observed.online.astype(np.int64)
    even = np.full(HORIZONS_S.size, 0.5)
    p = np.stack([shares(x, state, 2, even) for x in (pieces, available)], axis=1)
    odds: Array = np.log(p / (1.0 - p)).ravel()
    return odds


def _session_labels(examples: Examples) -> Array:
    online = examples.observed.online[:, None]
    return np.concatenate([online, examples.survival, examples.available], axis=1)


def session_loss(raw: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over examples of the loss of survival and of being online.

    Args:
        raw: log-odds by state, of surviving each piece and of being online; (n, 4 x horizons).
        labels: the state, survival and being online, NaN where unknown; (n, 1 + 2 x horizons).
    """
    n = len(labels)
    survival, available = labels[:, 1:].reshape(n, 2, HORIZONS_S.size).unbind(1)
    of_state = raw.reshape(n, 2, 2, HORIZONS_S.size)[torch.arange(n), labels[:, 0].long()]
    before = torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], dim=1)
    remained = torch.where(before == 1.0, survival, torch.nan)
    return _log_loss(of_state[:, 0], remained) + ONLINE_WEIGHT * _log_loss(
        of_state[:, 1], available
    )


def _log_loss(log_odds: Tensor, happened: Tensor) -> Tensor:
    """Return the sum over horizons of the loss of what is known, by the number of examples."""
    each = functional.binary_cross_entropy_with_logits(
        log_odds, torch.nan_to_num(happened), reduction="none"
    )
    return (each * ~torch.isnan(happened)).sum() / len(happened)


def channel_loss(raw: Tensor, truth: Tensor) -> Tensor:
    """Return the pinball loss of quantiles, the mean over examples and horizons.

    Args:
        raw: outputs of a channel's network; shape (n, horizons x quantiles).
        truth: of `channel_targets`, NaN where unknown; shape (n, horizons).
    """
    low, middle, high = raw.reshape(-1, RATE_HORIZONS_S.size, LEVELS.size).unbind(-1)
    known = ~torch.isnan(truth)
    truth = torch.nan_to_num(truth)
    loss = torch.zeros_like(truth)
    quantiles = (middle - functional.softplus(low), middle, middle + functional.softplus(high))
    for level, quantile in zip(LEVELS, quantiles, strict=True):
        miss = truth - quantile
        loss = loss + torch.maximum(level * miss, (level - 1.0) * miss)
    return (loss * known).sum() / truth.numel()


def _over_known(statistic: Callable[..., Array], x: Array) -> Array:
    """Compute a statistic of the known values of each column; NaN without any."""
    return np.array([statistic(c[~np.isnan(c)]) if (~np.isnan(c)).any() else np.nan for c in x.T])
