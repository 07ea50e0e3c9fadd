"""The contract of everything that forecasts: learn from examples, answer for many devices at once.

A forecaster predicts processes (`outlook`); the times and the chances of a job follow from them in
one place, `Outlook.forecast`. So one forecaster serves jobs of every size, and a test on one is a
test on all.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from fedstale.errors import TraceError
from fedstale.traces.arrays import Array
from fedstale.traces.forecast.examples import Examples
from fedstale.traces.forecast.grid import HORIZONS_S, LEVELS, RATE_HORIZONS_S, RATES
from fedstale.traces.forecast.observation import Observation
from fedstale.traces.forecast.outlook import Forecast, Outlook
from fedstale.traces.trip import Job

State = dict[str, npt.NDArray[Any]]

LEAST_RATE = 1e-6
"""Rates below this are taken as this in logarithms."""


class Forecaster(ABC):
    """Predicts what devices will do, each from its own past only.

    Subclasses have a `kind`, learn in `fit`, and keep what they learnt in `state_dict`.
    """

    kind: ClassVar[str]
    """Name on the command line and in files."""
    reads_the_future: ClassVar[bool] = False
    """Whether it is no forecaster but an upper bound on all of them."""

    @abstractmethod
    def fit(self, training: Examples, validation: Examples, *, seed: int) -> Self:
        """Learn from examples, and return self.

        Args:
            training: what to learn from.
            validation: of other devices, to stop early or to choose a setting on.
            seed: of everything drawn.
        """

    @abstractmethod
    def outlook(self, seen: Observation) -> Outlook:
        """Return what each device will do."""

    @abstractmethod
    def state_dict(self) -> State:
        """Return what was learnt, as arrays."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Take over what was learnt."""

    def predict(self, seen: Observation, job: Job) -> Forecast:
        """Return what each device says of a job that is sent to it now.

        Args:
            seen: the past of n devices.
            job: what is asked; each field a scalar or of shape (n,).
        """
        return self.outlook(seen).forecast(job)

    def save(self, folder: str | Path, provenance: dict[str, Any] | None = None) -> None:
        """Write the forecaster; see `fedstale.traces.forecast.files`."""
        from fedstale.traces.forecast.files import save  # noqa: PLC0415 - it imports this module

        save(self, folder, provenance or {})

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a forecaster of this class, or of any class on `Forecaster` itself.

        Raises:
            TraceError: the folder holds none, one of another class or version, or a damaged one.
        """
        from fedstale.traces.forecast.files import load  # noqa: PLC0415 - it imports this module

        found = load(folder)
        if not isinstance(found, cls):
            raise TraceError(f"{folder}: holds a {found.kind!r} forecaster, expected {cls.kind!r}")
        return found


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Prior:
    """What the fleet does: the answer of a device that has seen nothing of itself yet."""

    stays: Array
    """Share that remain, of those away and of those there, by horizon; shape (2, horizons)."""
    fresh: Array
    """Share of windows that last beyond each horizon; shape (horizons,)."""
    rates: Array
    """Quantiles of mean rates over all devices; shape (3, rate horizons, quantiles)."""

    @classmethod
    def of(cls, examples: Examples) -> "Prior":
        """Return what the fleet of the examples does."""
        bins = examples.seen.online.astype(np.int64)
        stays = shares(examples.targets.stays, bins, 2, np.full(HORIZONS_S.size, 0.5))
        rates = np.ones((len(RATES), RATE_HORIZONS_S.size, LEVELS.size))
        for channel in range(len(RATES)):
            for k in range(RATE_HORIZONS_S.size):
                known = examples.targets.rates[:, channel, k]
                known = known[~np.isnan(known)]
                if known.size:
                    rates[channel, k] = np.maximum(np.quantile(known, LEVELS), LEAST_RATE)
                elif k:
                    rates[channel, k] = rates[channel, k - 1]
        return cls(stays=stays, fresh=examples.fresh, rates=rates)

    def state_dict(self) -> State:
        """Return the arrays under names of their own."""
        return {"prior.stays": self.stays, "prior.fresh": self.fresh, "prior.rates": self.rates}

    @classmethod
    def from_state(cls, state: State) -> "Prior":
        """Return the prior that a state holds."""
        return cls(**{k: state[f"prior.{k}"] for k in ("stays", "fresh", "rates")})


def shares(stays: Array, bins: npt.NDArray[np.int64], n_bins: int, start: Array) -> Array:
    """Return the share that remains in each bin, beyond each horizon, falling with the horizon.

    Args:
        stays: 1, 0 or NaN; shape (n, horizons).
        bins: of each example; shape (n,).
        n_bins: number of bins.
        start: what an empty bin says; weighs as much as ten examples; (horizons,) or
            (n_bins, horizons).

    Returns:
        Shares in (0, 1); shape (n_bins, horizons).
    """
    known = ~np.isnan(stays)
    total = np.zeros((n_bins, stays.shape[1]))
    count = np.zeros((n_bins, stays.shape[1]))
    np.add.at(total, bins, np.where(known, stays, 0.0))
    np.add.at(count, bins, known.astype(np.float64))
    return np.minimum.accumulate((total + 10.0 * start) / (count + 10.0), axis=1)
