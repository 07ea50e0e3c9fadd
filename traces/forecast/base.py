"""The contract of a forecaster: learn from examples, forecast many devices at once, be saved.

A forecaster predicts processes (`forecast`); the times and the probability of a job follow from
them in one place, `DeviceForecast.of_job`. So one forecaster serves jobs of every size, and a test
on one is a test on all.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from fedstale.errors import ConfigError, TraceError
from fedstale.traces import Array, Index, outline
from fedstale.traces.forecast.dataset import Examples
from fedstale.traces.forecast.observation import LEVELS, RATE_HORIZONS_S, Observation
from fedstale.traces.forecast.sessions import HORIZONS_S
from fedstale.traces.forecast.survival import DeviceForecast
from fedstale.traces.io import ModelFiles

State = dict[str, npt.NDArray[Any]]

HOURS = 24
LEAST_RATE = 1e-6
"""Rates below this are taken as this in logarithms."""

FILES = ModelFiles(
    what="forecaster",
    made_by="fedstale forecaster train",
    version=("schema", 2),
    most_bytes=64_000_000,
    error=TraceError,
)
"""forecaster.toml and forecaster.safetensors; see `fedstale.traces.io.models`."""

FLEETS = ("any", "phones", "desktops", "cars")
"""Fleets with a forecaster that comes with fedstale."""

KINDS: "dict[str, type[Forecaster]]" = {}
"""Class of each kind, by its name on the command line and in files."""


def log_rate(rates: Array) -> Array:
    """Return the logarithm of rates, none below the least."""
    return np.log(np.maximum(rates, LEAST_RATE))


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class FleetStatistics:
    """What the training devices did: the forecast of a device that has no history yet."""

    survival: Array
    """Share that remain offline, and that remain online, by horizon; shape (2, horizons)."""
    new_session_survival: Array
    """Share of sessions that last beyond each horizon; shape (horizons,)."""
    online_by_hour: Array
    """Share online in each hour of the day; shape (24,)."""
    rates: Array
    """Quantiles of mean rates over all devices; shape (3, rate horizons, quantiles)."""

    __repr__ = outline

    @classmethod
    def of(cls, examples: Examples) -> "FleetStatistics":
        """Return the statistics of the devices of some examples."""
        online = examples.observed.online
        bins = online.astype(np.int64)
        survival = shares(examples.survival, bins, 2, np.full(HORIZONS_S.size, 0.5))
        hour = hour_of(examples.observed.time_of_day_s)
        known = hour >= 0
        n = np.bincount(hour[known], minlength=HOURS)
        total = np.bincount(hour[known], weights=online[known], minlength=HOURS)
        rates = np.maximum(quantiles(examples.rates), LEAST_RATE)
        for k in range(RATE_HORIZONS_S.size):
            # What is known of no device is that of the shorter horizon, or 1.
            before = rates[:, k - 1] if k else 1.0
            rates[:, k] = np.where(np.isnan(rates[:, k]), before, rates[:, k])
        return cls(
            survival=np.minimum.accumulate(survival, axis=1),
            new_session_survival=examples.new_session_survival,
            online_by_hour=(total + 10.0 * online.mean()) / (n + 10.0),
            rates=rates,
        )

    def state_dict(self) -> State:
        """Return the arrays under names of their own."""
        return {f"fleet.{field.name}": getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_state(cls, state: State) -> "FleetStatistics":
        """Return the statistics that a state holds."""
        return cls(**{field.name: state[f"fleet.{field.name}"] for field in fields(cls)})


def hour_of(time_of_day_s: Array) -> Index:
    """Return the hour of the day; -1 where the time of day is unknown."""
    hour = np.floor(np.nan_to_num(time_of_day_s, nan=-3600.0) / 3600.0).astype(np.int64)
    return np.where(hour >= 0, hour % HOURS, -1)


def quantiles(x: Array) -> Array:
    """Compute quantiles over the known values of examples; NaN without any.

    Args:
        x: shape (n, 3, rate horizons).

    Returns:
        Shape (3, rate horizons, quantiles).
    """
    result = np.full((*x.shape[1:], LEVELS.size), np.nan)
    for place in np.ndindex(x.shape[1:]):
        known = x[:, *place][~np.isnan(x[:, *place])]
        if known.size:
            result[place] = np.quantile(known, LEVELS)
    return result


def shares(happened: Array, bins: Index, n_bins: int, start: Array, weight: float = 10.0) -> Array:
    """Return how often something happened in each bin, at each horizon.

    Args:
        happened: 1, 0 or NaN; shape (n, horizons).
        bins: of each example; shape (n,).
        n_bins: number of bins.
        start: share of an empty bin; (horizons,) or (n_bins, horizons).
        weight: of `start`, in examples.

    Returns:
        Shares in (0, 1); shape (n_bins, horizons).
    """
    known = ~np.isnan(happened)
    total = np.zeros((n_bins, happened.shape[1]))
    count = np.zeros((n_bins, happened.shape[1]))
    np.add.at(total, bins, np.where(known, happened, 0.0))
    np.add.at(count, bins, known.astype(np.float64))
    share: Array = (total + weight * start) / (count + weight)
    return share


def shares_by_state(
    examples: Examples, bins: Index, n_bins: int, weight: float = 10.0
) -> tuple[Array, Array]:
    """Count the shares that remained in a state and bin, and that were online.

    Args:
        examples: to count.
        bins: of each example, from 0 to n_bins - 1; shape (n,).
        n_bins: number of bins.
        weight: of the share of the state, in examples; an empty bin has that share.

    Returns:
        Shares of survival and of being online, the bins of devices offline first; shape
        (2 n_bins, horizons) each.
    """
    state = examples.observed.online.astype(np.int64)

    def counted(happened: Array) -> Array:
        of_state = shares(happened, state, 2, np.full(HORIZONS_S.size, 0.5))
        start = np.repeat(of_state, n_bins, axis=0)
        return shares(happened, state * n_bins + bins, 2 * n_bins, start, weight)

    return counted(examples.survival), counted(examples.available)


class Forecaster(ABC):
    """Predicts what devices will do, each from its own history only.

    Subclasses have a `kind`, learn in `fit`, and name what they learnt in `saved`.
    """

    kind: ClassVar[str]
    """Name on the command line and in files; a class that sets it is listed in `KINDS`."""
    saved: ClassVar[tuple[str, ...]] = ()
    """Arrays that files hold besides `fleet`."""
    fleet: FleetStatistics
    """Statistics of the devices that it learnt from; set by `fit`."""

    def __init_subclass__(cls) -> None:
        if "kind" in cls.__dict__:
            KINDS[cls.kind] = cls

    @abstractmethod
    def fit(self, training: Examples, validation: Examples, *, seed: int) -> Self:
        """Learn from examples, and return self.

        Args:
            training: what to learn from.
            validation: of other devices, to stop early or to choose a setting on.
            seed: of everything drawn.
        """

    @abstractmethod
    def predict_sessions(self, observed: Observation) -> tuple[Array, Array]:
        """Return each device's survival and its chance to be online.

        Args:
            observed: n devices.

        Returns:
            As in `DeviceForecast`; shape (n, horizons) each.
        """

    @abstractmethod
    def predict_rates(self, observed: Observation) -> Array:
        """Return quantiles of each device's rates.

        Args:
            observed: n devices.

        Returns:
            As in `DeviceForecast`; shape (n, 3, rate horizons, quantiles).
        """

    def forecast(self, observed: Observation) -> DeviceForecast:
        """Forecast the sessions and the rates of each device."""
        survival, available = self.predict_sessions(observed)
        return DeviceForecast(
            online=observed.online,
            survival=survival,
            available=available,
            new_session_survival=self.fleet.new_session_survival,
            rates=self.predict_rates(observed),
        )

    def state_dict(self) -> State:
        """Return the learnt parameters as arrays."""
        return self.fleet.state_dict() | {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: State) -> None:
        """Restore what was learnt."""
        self.fleet = FleetStatistics.from_state(state)
        for name in self.saved:
            setattr(self, name, state[name])

    def save(self, folder: str | Path, provenance: dict[str, Any] | None = None) -> None:
        """Write forecaster.toml and forecaster.safetensors, the description last.

        Args:
            folder: made if it is missing.
            provenance: what it was trained on and how; plain values.
        """
        FILES.write(folder, self.state_dict(), {"kind": self.kind, "provenance": provenance or {}})

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a forecaster of this class, or of any class on `Forecaster` itself.

        Raises:
            TraceError: there is none, or it is of another class or version, altered or cut short.
        """
        about = FILES.describe(folder)
        kind = about.get("kind")
        if not isinstance(kind, str) or kind not in KINDS:
            raise TraceError(f"{folder}: kind = {kind!r}, expected one of {', '.join(KINDS)}")
        forecaster = KINDS[kind]()
        if not isinstance(forecaster, cls):
            raise TraceError(f"{folder}: holds a {kind!r} forecaster, expected {cls.kind!r}")
        state = FILES.arrays(folder, about)
        try:
            forecaster.load_state_dict(state)
        except (KeyError, IndexError, ValueError) as problem:
            if isinstance(problem, TraceError):
                raise
            raise TraceError(
                f"{folder}: {FILES.safetensors} lacks {problem}: train it again"
            ) from None
        return forecaster


def forecaster_class(kind: str) -> type[Forecaster]:
    """Return the class of a kind.

    Raises:
        ConfigError: there is no such kind.
    """
    if kind not in KINDS:
        raise ConfigError(f"forecaster = {kind!r}: expected one of {', '.join(KINDS)}")
    return KINDS[kind]


def embedded(fleet: str = "any") -> Forecaster:
    """Return a forecaster that comes with fedstale: an LSTM, trained on published recordings.

    Its description names them, and the command; see docs/results/forecasting.md for scores.

    Args:
        fleet: what the devices are, one of `FLEETS`; "any" learnt from all of them.

    Raises:
        ConfigError: there is no such fleet.
    """
    return Forecaster.load(forecaster_folder(f"embedded:{fleet}"))


def forecaster_folder(name: str | Path) -> Path:
    """Return the folder of a forecaster: a path, or "embedded" or "embedded:FLEET".

    Args:
        name: as a command takes it.

    Raises:
        ConfigError: there is no such fleet.

    Example:
        >>> forecaster_folder("forecasters/mine").name, forecaster_folder("embedded:cars").name
        ('mine', 'cars')
    """
    first, _, fleet = str(name).partition(":")
    if first != "embedded":
        return Path(name)
    if (fleet or "any") not in FLEETS:
        raise ConfigError(f"fleet = {fleet!r}: expected one of {', '.join(FLEETS)}")
    return Path(__file__).parent / "embedded" / (fleet or "any")
