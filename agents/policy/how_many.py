"""How many jobs an agent has in flight, and how many updates make the next step.

    jobs = most^s(a . x)        updates = 1 + (jobs - 1) s(b . x)

with s the logistic function, most the jobs in flight that the schedule allows, and x what a server
knows when a buffer opens (`FACTS`). The weights a and b were learnt in whole trainings, each with a
price of an hour of its own, so that the price is one of the facts; pace.toml says how.
"""

import tomllib
from functools import cache
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstale.errors import ConfigError
from fedstale.strategies.pace import PaceByLoss, Progress
from fedstale.strategies.selection import own_duration_s
from fedstale.strategies.types import Candidates, Positive
from fedstale.traces import Array, Index, Mask

FACTS = (
    *("one", "most", "price", "fall", "version", "examples", "loss_spread", "keeps_stragglers"),
    *("candidates", "duration_spread", "p_finish"),
)
"""Of each buffer: 1, the most jobs in flight, the price of an hour over these, by how much the loss
has fallen, versions, examples of a candidate, the spread of their losses, whether late jobs count,
candidates, the spread of their durations, and their chances. Counts, prices and falls are
logarithms, and all are near 0 to 1."""
KEPT = 0.9
"""Decay of the running mean of the training loss whose fall is a fact."""
_LEAST_LOSS, _PACE = 1e-9, Path(__file__).with_name("pace.toml")
_FEW = 3
"""Losses that must be known before they say how different devices are."""


class AgentPace(PaceByLoss):
    """Has as many jobs in flight, and waits for as many updates, as an hour of waiting is worth.

    It goes with any selector. Early in a training, and where an hour is worth little, few jobs are
    in flight, and each update makes a step.

    Args:
        hour_price: of an hour of waiting, in device-hours; None is the schedule's concurrency: who
            allows so many jobs in flight would have an hour less for an hour of each.
        path: file of weights that were trained on devices of one's own; None for fedstale's.

    Raises:
        ConfigError: the file is not there, or lacks weights.

    Example:
        >>> at = Progress(concurrency=20, buffer_size=5)
        >>> few, many = (AgentPace(price).numbers(at)[0] for price in (1.0, 100.0))
        >>> few < many
        True
    """

    def __init__(self, hour_price: Positive | None = None, path: str | None = None) -> None:
        """Set the price in device-hours, > 0, and the weights."""
        self.hour_price, self.path = hour_price, path
        self._weights = weights_in(Path(path or _PACE))

    def numbers(self, at: Progress) -> tuple[int, int | None]:
        """Return jobs in flight and updates of a step; a schedule that waits for all does so."""
        # A fall is a ratio, and to a loss of 0 there is none.
        if at.loss > 0.0:
            self.follow(at.loss, KEPT)
        x = facts(
            at.candidates,
            np.ones((1, len(at.candidates)), dtype=np.bool_),
            most=at.concurrency,
            price=(self.hour_price or at.concurrency) / at.concurrency,
            fall=log(max(self.first_loss, _LEAST_LOSS) / max(self.loss, _LEAST_LOSS)),
            version=at.version,
            keeps_stragglers=at.candidates.context.keeps_stragglers,
        )
        jobs, updates = (int(n[0]) for n in decided(self._weights, x, at.concurrency))
        size = None if at.buffer_size is None else max(updates, at.least)
        return max(jobs, size or 1) if at.after_step else jobs, size


def facts(
    candidates: Candidates,
    mask: Mask,
    *,
    most: npt.ArrayLike,
    price: npt.ArrayLike,
    fall: npt.ArrayLike,
    version: npt.ArrayLike,
    keeps_stragglers: npt.ArrayLike,
) -> Array:
    """Compute the inputs of b decisions, in the order of `FACTS`; shape (b, facts).

    Args:
        candidates: n nodes of each decision, decision after decision; b x n of them.
        mask: which of them are free; shape (b, n).
        most: jobs in flight at most; one, or shape (b,), as all that follow.
        price: of an hour, in hours of as many devices as `most`.
        fall: logarithm of the first training loss over that of now; NaN while unknown.
        version: of the model.
        keeps_stragglers: whether jobs that are late for a step count in a later one.
    """
    b = mask.shape[0]

    def free(values: npt.NDArray[Any]) -> Array:
        return np.where(mask, values.reshape(mask.shape), np.nan)

    examples, losses = free(np.log(np.maximum(candidates.examples, 1.0))), free(candidates.loss)
    mean, spread = _moments(losses, 1.0, 0.0)
    are_known = np.isfinite(losses).sum(axis=1) >= _FEW
    _, durations = _moments(free(np.log(own_duration_s(candidates))), 0.0, 0.5)
    columns = (
        np.ones(b),
        np.log2(most) - 1.5,
        np.log(price),
        np.nan_to_num(np.clip(fall, -1.0, 4.0)) - 1.0,
        (np.log1p(version) - 3.0) / 1.5,
        _moments(examples, np.log(30.0), 0.0)[0] - 3.4,
        np.where(are_known, np.minimum(spread / np.maximum(mean, 1e-3), 2.0), 0.4) - 0.5,
        np.asarray(keeps_stragglers, dtype=np.float64) - 0.5,
        (np.log2(np.maximum(mask.sum(axis=1), 1)) - 4.0) / 2.0,
        durations - 0.5,
        _moments(free(candidates.p_finish), 0.8, 0.0)[0] - 0.8,
    )
    return np.stack([np.broadcast_to(np.asarray(x, dtype=np.float64), (b,)) for x in columns], 1)


def decided(weights: Array, x: Array, most: npt.ArrayLike) -> tuple[Index, Index]:
    """Return jobs in flight and updates of the next step; shape (b,) each.

    Args:
        weights: a and b; shape (2, facts), or of each (b, 2, facts).
        x: by `facts`; shape (b, facts).
        most: jobs in flight at most, >= 1; one, or shape (b,).
    """
    for_jobs, for_updates = np.exp(-np.logaddexp(0.0, -(weights * x[:, None]).sum(axis=2).T))
    jobs = np.rint(np.asarray(most, dtype=np.float64) ** for_jobs)
    return jobs.astype(np.int64), np.rint(1.0 + (jobs - 1.0) * for_updates).astype(np.int64)


def _moments(values: Array, mean: float, spread: float) -> tuple[Array, Array]:
    """Compute mean and standard deviation of the known in each row, or these where none is."""
    is_known = np.isfinite(values)
    n = is_known.sum(axis=1)
    some = np.maximum(n, 1)
    found = np.where(is_known, values, 0.0).sum(axis=1) / some
    square = np.where(is_known, (values - found[:, None]) ** 2, 0.0).sum(axis=1) / some
    return np.where(n, found, mean), np.where(n, np.sqrt(square), spread)


@cache
def weights_in(path: Path) -> Array:
    """Return the weights in a file like pace.toml; shape (2, facts).

    Raises:
        ConfigError: it is not there, or lacks some.
    """
    try:
        about = tomllib.loads(path.read_text(encoding="utf-8"))
        return np.array([[float(about[of][name]) for name in FACTS] for of in ("jobs", "updates")])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path}: expected weights of a pace: {error}") from error
