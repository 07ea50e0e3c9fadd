"""Scenarios: traces, which of their devices and hours, jobs, and the forecasts of the devices.

Training, validation and testing are three scenarios that share neither a device nor an instant. A
scenario draws episodes and makes the simulators that they are played in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedstale.agents.env.episodes import AGES, GROUPS, NOISES, Episodes, EpisodeSettings, JobKinds
from fedstale.agents.env.forecast_table import ForecastTable, Parts, TrueForecasts
from fedstale.agents.env.learning_proxy import LearningProxy, assign, fitted
from fedstale.agents.env.simulator import Simulator
from fedstale.errors import ConfigError, TraceError
from fedstale.strategies.weighting import AgeCurve, constant, inverse_root, polynomial
from fedstale.traces import Array, Index, Mask, TraceSet, outline, stream
from fedstale.traces.forecast import (
    Forecaster,
    LastValue,
    TraceObserver,
    draw,
    embedded,
    forecaster_class,
    record_s,
    split,
)

Mode = Literal["forecaster", "persistence", "oracle", "none"]
MODES: tuple[Mode, ...] = ("forecaster", "persistence", "oracle", "none")
"""What devices report: a forecaster's forecast, that nothing changes, the truth, or nothing."""

# Share of the time for learning that validates.
_VALIDATED = 0.2
_CURVES: tuple[AgeCurve, ...] = (constant(), polynomial(0.5), inverse_root())


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Scenario:
    """Devices, hours, jobs and forecasts; see `Scenario.of`."""

    traces: TraceSet
    """Complete devices."""
    kinds: JobKinds
    """Jobs of the episodes."""
    forecasts: ForecastTable | TrueForecasts | None
    """What devices report; None if nothing, and the server has only what it observes."""
    devices: Index
    """Positions of the devices to draw from."""
    start: float
    """First instant of any episode in s."""
    end: float
    """Last instant of any episode in s."""
    settings: EpisodeSettings = field(default_factory=EpisodeSettings)
    """What episodes are drawn from."""
    proxy: LearningProxy = field(default_factory=fitted)
    """How a model learns; the constants fitted to training runs by default."""

    __repr__ = outline

    def __deepcopy__(self, memo: dict[int, object]) -> "Scenario":
        """Return itself: a scenario does not change, and may be large."""
        return self

    @classmethod
    def of(
        cls,
        traces: TraceSet,
        *,
        forecasts: Mode = "forecaster",
        forecaster: Forecaster | Parts | None = None,
        devices: npt.ArrayLike | None = None,
        start: float = 0.0,
        end: float | None = None,
        kinds: JobKinds | None = None,
        settings: EpisodeSettings | None = None,
        proxy: LearningProxy | None = None,
        step_s: float = 300.0,
    ) -> "Scenario":
        """Return a scenario; devices forecast here, which takes some seconds for each thousand.

        Args:
            traces: complete devices.
            forecasts: what devices report; "persistence" learns its spread from the devices given.
            forecaster: of all devices, or of some each; the one that comes with the package if
                None. It must not have learnt from the devices that it forecasts; see
                `cross_fitted`.
            devices: positions of the devices to draw from; all if None.
            start: first instant of any episode in s.
            end: last instant of any episode in s; the end of the longest record if None.
            kinds: jobs of the episodes; made for the fleet if None.
            settings: what episodes are drawn from.
            proxy: how a model learns.
            step_s: time from one forecast of a device to its next in s.

        Raises:
            TraceError: the traces lack a channel, or there is nothing to draw from.
            ConfigError: the mode does not exist.
        """
        traces.complete()
        pool = np.arange(traces.n_devices) if devices is None else np.asarray(devices)
        last = float(record_s(traces)[pool].max()) if end is None else float(end)
        silent = cls(
            traces=traces,
            kinds=kinds or JobKinds.of_fleet(traces),
            forecasts=None,
            devices=pool,
            start=start,
            end=last if np.isfinite(last) else start + 86_400.0,
            settings=settings or EpisodeSettings(),
            proxy=proxy or fitted(),
        )
        return silent.with_forecasts(forecasts, forecaster=forecaster, step_s=step_s)

    def with_forecasts(
        self,
        forecasts: Mode,
        *,
        forecaster: Forecaster | Parts | None = None,
        step_s: float = 300.0,
    ) -> "Scenario":
        """Return the same scenario with other forecasts; see `Scenario.of`."""
        traces, kinds = self.traces, self.kinds
        if forecasts not in MODES:
            raise ConfigError(f"forecasts = {forecasts!r}: expected one of {', '.join(MODES)}")
        if forecasts == "none":
            return replace(self, forecasts=None)
        if forecasts == "oracle":
            return replace(self, forecasts=TrueForecasts(traces, kinds))
        parts: Parts
        if forecasts == "persistence":
            parts = cross_fitted(traces, self.devices, kind=LastValue.kind, until=self.end)
        elif forecaster is None or isinstance(forecaster, Forecaster):
            parts = [(self.devices, forecaster or embedded())]
        else:
            parts = forecaster
        table = ForecastTable.of(
            traces, kinds, parts, start=self.start, end=self.end, step_s=step_s
        )
        return replace(self, forecasts=table)

    def with_devices(self, n: int) -> "Scenario":
        """Return the same scenario whose windows have n devices, or as many as appear in them."""
        return replace(self, settings=replace(self.settings, devices=(n, n)))

    def draw(self, n: int, rng: np.random.Generator) -> Episodes:
        """Return n episodes.

        The devices of an episode are drawn from those that appear in its window: the others would
        never be candidates. A record that is shorter than a window makes shorter episodes.

        Raises:
            TraceError: the span is empty, or no device is online in it.
        """
        settings, kinds, start, end = self.settings, self.kinds, self.start, self.end
        if not 0 <= start < end:
            raise TraceError(f"episodes from {start} to {end} s: expected 0 <= start < end")
        kind = rng.integers(len(kinds), size=n)
        horizon = kinds.median_s[kind] * log_uniform(rng, settings.horizon, n)
        is_limited = rng.random(n) < settings.budget_share
        longest = min(settings.window_s, end - start)
        window = np.where(is_limited, longest, np.minimum(horizon, longest))
        begins = start + rng.random(n) * (end - start - window)
        drawn, present = self._appearing(begins, window, rng)
        online = (online_share(self.traces, drawn, begins, window, looks=8) * present).sum(axis=1)
        wanted = np.rint(online * log_uniform(rng, settings.concurrency_share, n)).astype(np.int64)
        # One device at a time is no choice of a set.
        concurrency = np.minimum(np.maximum(wanted, 2), present.sum(axis=1))
        buffer_size = np.rint(concurrency * rng.uniform(*settings.buffer_share, n)).astype(np.int64)
        keeps_stragglers = rng.random(n) < settings.keep_share
        deadline = np.where(
            rng.random(n) < settings.deadline_share,
            kinds.median_s[kind] * rng.uniform(1, 3, n),
            np.inf,
        )
        curve = rng.integers(len(_CURVES), size=n)
        weights = np.array([[c(age) for age in range(AGES)] for c in _CURVES])[curve]
        skew, spread = log_uniform(rng, settings.skew, n), rng.uniform(*settings.spread, n)
        mixtures, examples = assign(rng, drawn.shape, GROUPS, skew, spread)
        mean = np.where(present, examples, 0.0).sum(axis=1) / present.sum(axis=1)
        over_reports = (rng.random(n) < settings.over_reporting_share)[:, None]
        over_reports = over_reports & (rng.random(drawn.shape) < settings.over_reporting_clients)
        inflates = (rng.random(n) < settings.inflating_share)[:, None]
        inflates = inflates & (rng.random(drawn.shape) < settings.inflating_clients)
        return Episodes(
            devices=drawn,
            present=present,
            start=begins,
            end=begins + window,
            budget_s=np.where(is_limited, horizon * concurrency, np.inf),
            rounds=np.full(n, settings.rounds),
            kind=kind,
            concurrency=concurrency,
            buffer_size=np.clip(buffer_size, 1, concurrency),
            keeps_stragglers=keeps_stragglers,
            deadline_s=deadline,
            age_weights=weights,
            requests_forecasts=rng.random(n) < settings.request_share,
            over_reports=over_reports,
            inflates=inflates,
            mixtures=mixtures,
            examples=examples,
            work_scale=examples / mean[:, None],
            noise=rng.standard_normal((*drawn.shape, NOISES)),
        )

    def _appearing(
        self, begins: Array, window: Array, rng: np.random.Generator
    ) -> tuple[Index, Mask]:
        """Return devices that appear in each window, and which columns hold one; (b, n) each.

        Raises:
            TraceError: no device appears in any window.
        """
        availability, pool = self.traces.channel("availability"), np.unique(self.devices)
        least, most = self.settings.devices
        devices = np.zeros((begins.size, most), dtype=np.int64)
        present = np.zeros(devices.shape, dtype=bool)
        for i, begin in enumerate(begins):
            first, _ = availability.window_at_or_after(pool, begin)
            appearing = pool[first < begin + window[i]]
            count = int(np.rint(log_uniform(rng, (least, most), 1)[0]))
            drawn = rng.permutation(appearing)[:count]
            devices[i, : drawn.size], present[i, : drawn.size] = drawn, True
        empty = ~present.any(axis=1)
        if empty.all():
            raise TraceError(
                f"no device is online in any of {begins.size} windows of up to {window.max():g} s: "
                "expected traces with devices that appear"
            )
        if empty.any():
            # A window without devices is no episode: another takes its place.
            full = rng.choice(np.flatnonzero(~empty), size=int(empty.sum()))
            devices[empty], present[empty] = devices[full], present[full]
            begins[empty], window[empty] = begins[full], window[full]
        return devices, present

    def simulator(self, b: int) -> Simulator:
        """Return a simulator with room for b of this scenario's episodes at a time."""
        return Simulator(self, b)


def as_scenarios(scenarios: Scenario | Sequence[Scenario]) -> tuple[Scenario, ...]:
    """Return one scenario, or one for each of several fleets, as a tuple."""
    return (scenarios,) if isinstance(scenarios, Scenario) else tuple(scenarios)


def online_share(
    traces: TraceSet, devices: Index, start: Array, window_s: float | Array, *, looks: int
) -> Array:
    """Compute the share of its row's window in which each device is online, at some instants.

    Args:
        traces: the devices.
        devices: positions; shape (b, n).
        start: of each row's window in s; shape (b,).
        window_s: length of the windows in s; one, or shape (b,).
        looks: number of instants, evenly spread.
    """
    availability, count = traces.channel("availability"), np.zeros(devices.shape)
    for look in (np.arange(looks) + 0.5) / looks:
        when = np.repeat(start + look * window_s, devices.shape[1])
        count += availability.is_available(devices.ravel(), when).reshape(devices.shape)
    return count / looks


def log_uniform(rng: np.random.Generator, pair: tuple[float, float], n: int) -> Array:
    """Draw n numbers between two, whose logarithms are uniform; shape (n,)."""
    return np.exp(rng.uniform(np.log(pair[0]), np.log(pair[1]), n))


def cross_fitted(
    traces: TraceSet,
    devices: npt.ArrayLike,
    *,
    kind: str = "lstm",
    until: float,
    n: int = 20_000,
    seed: int = 0,
) -> list[tuple[Index, Forecaster]]:
    """Fit forecasters, each on other devices than those that it is to forecast.

    Args:
        traces: the devices.
        devices: positions to learn from and to forecast, half by half; shape (m,), m >= 4.
        kind: of the forecaster.
        until: instant in s before which they learn.
        n: examples that each learns from.
        seed: of the division, of the examples and of the training.

    Raises:
        ConfigError: there are too few devices to divide.
    """
    pool = np.unique(np.asarray(devices, dtype=np.int64))
    if pool.size < 4:
        raise ConfigError(f"{pool.size} devices: expected at least 2 folds of 2 devices each")
    order = stream(seed, 47).permutation(pool)
    observer, fitted = TraceObserver(traces), []
    for k in range(2):
        held_out = np.sort(order[k::2])
        others = np.setdiff1d(order, held_out)
        cut = max(1, others.size // 5)
        training, validation = (
            draw(observer, some, start=0.0, until=until, n=size, seed=seed, short_history=0.2)
            for some, size in ((others[cut:], n), (others[:cut], max(n // 5, 100)))
        )
        fitted.append((held_out, forecaster_class(kind)().fit(training, validation, seed=seed)))
    return fitted


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Scenarios:
    """The scenarios that one agent is trained, validated and tested on."""

    training: Scenario
    """To learn on."""
    validation: Scenario
    """To compare agents on during training: other devices and later hours."""
    testing: Scenario
    """To test on: other devices again, and later hours still."""

    @classmethod
    def of(
        cls,
        traces: TraceSet,
        *,
        forecaster: Forecaster | None = None,
        forecasts: Mode = "forecaster",
        seed: int = 0,
        settings: EpisodeSettings | None = None,
        proxy: LearningProxy | None = None,
    ) -> "Scenarios":
        """Divide one set of traces into the three scenarios.

        Devices and time are divided as a forecaster's are (`split`); the last fifth of the time for
        learning validates.

        Args:
            traces: complete devices, at least 10.
            forecaster: of all devices; it must not have learnt from them. If None, one is trained
                for each half of the training devices on the other half, and devices that are only
                validated or tested on use the first of these.
            forecasts: what devices report.
            seed: of the division.
            settings: what episodes are drawn from.
            proxy: how a model learns; the one that comes with the package if None.

        Raises:
            TraceError: there are too few devices.
        """
        if traces.n_devices < 5:
            raise TraceError(
                f"{traces.n_devices} devices: expected at least 5, to test on others than are "
                "learnt from"
            )
        parts = split(traces, seed=seed)
        late = (1.0 - _VALIDATED) * parts.turn
        spans = {
            "training": (0.0, late),
            "validation": (late, parts.turn),
            "testing": (parts.turn, parts.end),
        }
        kinds = JobKinds.of_fleet(traces.take(parts.training))
        learning: Forecaster | Parts | None = forecaster
        if forecasts == "forecaster" and forecaster is None:
            learning = cross_fitted(traces, parts.training, until=late, seed=seed)
            forecaster = learning[0][1]

        def scenario(name: str) -> Scenario:
            start, end = spans[name]
            return Scenario.of(
                traces,
                forecasts=forecasts,
                forecaster=learning if name == "training" else forecaster,
                devices=getattr(parts, name),
                start=start,
                end=end,
                kinds=kinds,
                settings=settings,
                proxy=proxy,
            )

        return cls(
            training=scenario("training"),
            validation=scenario("validation"),
            testing=scenario("testing"),
        )
