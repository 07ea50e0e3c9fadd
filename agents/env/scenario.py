"""Where episodes take place: traces, which of their devices and hours, jobs, and what devices say.

Training, validation and testing are three stages that share no device and, the last one, no hour
with the others. A stage draws episodes and makes the worlds that they are played in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedstale.agents.env.episodes import Episodes, EpisodeSettings, JobKinds, draw_episodes
from fedstale.agents.env.forecast_table import Forecasts, ForecastTable, NoForecasts, TrueForecasts
from fedstale.agents.env.learning_proxy import Proxy
from fedstale.agents.env.simulator import World
from fedstale.errors import ConfigError
from fedstale.traces import TraceSet
from fedstale.traces.arrays import Index
from fedstale.traces.forecast import (
    Forecaster,
    LastValue,
    Split,
    TraceObserver,
    draw,
    embedded,
    forecaster_class,
    record_s,
    split,
)

Mode = Literal["forecaster", "persistence", "oracle", "none"]
MODES: tuple[Mode, ...] = ("forecaster", "persistence", "oracle", "none")
"""What devices say: a forecaster's word, that all stays as it is, the truth, or nothing."""

Parts = Sequence[tuple[npt.ArrayLike, Forecaster]]
"""Positions of devices, and the forecaster that they use."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Stage:
    """Devices, hours, jobs and forecasts; see `Stage.of`."""

    traces: TraceSet
    """Complete devices."""
    kinds: JobKinds
    """Jobs of the episodes."""
    forecasts: Forecasts
    """What devices say."""
    devices: Index
    """Positions of the devices to draw from."""
    start: float
    """First instant of any episode in s."""
    end: float
    """Last instant of any episode in s."""
    settings: EpisodeSettings = field(default_factory=EpisodeSettings)
    """What episodes are drawn from."""
    proxy: Proxy | None = None
    """How a model learns; the constants that come with the package if None."""

    def __deepcopy__(self, memo: dict[int, object]) -> "Stage":
        """Return itself: a stage does not change, and may be large."""
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
        proxy: Proxy | None = None,
        step_s: float = 300.0,
        cache: str | Path | None = None,
    ) -> "Stage":
        """Return a stage; devices forecast here, which takes some seconds for each thousand.

        Args:
            traces: complete devices.
            forecasts: what devices say; "persistence" learns its spread from the devices given.
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
            cache: file to keep the forecasts in.

        Raises:
            TraceError: the traces lack a channel, or there is nothing to draw from.
            ConfigError: the mode does not exist.
        """
        if forecasts not in MODES:
            raise ConfigError(f"forecasts = {forecasts!r}: expected one of {', '.join(MODES)}")
        traces.require("availability", "compute", "downlink", "uplink")
        pool = np.arange(traces.n_devices) if devices is None else np.asarray(devices)
        last = float(record_s(traces)[pool].max()) if end is None else float(end)
        last = last if np.isfinite(last) else start + 86_400.0
        kinds = kinds or JobKinds.of_fleet(traces)
        said: Forecasts
        if forecasts == "none":
            said = NoForecasts()
        elif forecasts == "oracle":
            said = TrueForecasts(traces, kinds)
        else:
            if forecasts == "persistence":
                parts: Parts = cross_fitted(traces, pool, kind=LastValue.kind, until=last)
            elif forecaster is None or isinstance(forecaster, Forecaster):
                parts = [(pool, forecaster or embedded())]
            else:
                parts = forecaster
            said = ForecastTable.made(
                traces, kinds, parts, start=start, end=last, step_s=step_s, cache=cache
            )
        return cls(
            traces=traces,
            kinds=kinds,
            forecasts=said,
            devices=pool,
            start=start,
            end=last,
            settings=settings or EpisodeSettings(),
            proxy=proxy,
        )

    def with_forecasts(self, forecasts: Forecasts) -> "Stage":
        """Return the same stage on which devices say something else."""
        return replace(self, forecasts=forecasts)

    def draw(self, n: int, rng: np.random.Generator) -> Episodes:
        """Return n episodes."""
        return draw_episodes(
            self.traces,
            self.kinds,
            n,
            devices=self.devices,
            start=self.start,
            end=self.end,
            n_max=self.settings.devices[1],
            rng=rng,
            settings=self.settings,
        )

    def world(self, b: int) -> World:
        """Return a world with room for b of this stage's episodes at a time."""
        n = self.settings.devices[1]
        return World(self.traces, self.kinds, self.forecasts, b=b, n=n, proxy=self.proxy)


def cross_fitted(
    traces: TraceSet,
    devices: npt.ArrayLike,
    *,
    kind: str = "lstm",
    until: float,
    n: int = 20_000,
    folds: int = 2,
    seed: int = 0,
) -> list[tuple[Index, Forecaster]]:
    """Return forecasters of which none has learnt from the devices that it is to forecast.

    Args:
        traces: the devices.
        devices: positions to learn from and to forecast; shape (m,), m >= 2 folds.
        kind: of the forecaster.
        until: instant in s before which they learn.
        n: examples that each learns from.
        folds: into how many parts the devices are divided, >= 2.
        seed: of the division, of the examples and of the training.

    Raises:
        ConfigError: there are too few devices to divide.
    """
    pool = np.unique(np.asarray(devices, dtype=np.int64))
    if folds < 2 or pool.size < 2 * folds:
        raise ConfigError(
            f"{pool.size} devices in {folds} folds: expected at least 2 folds of 2 devices each"
        )
    order = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(47,))).permutation(pool)
    observer, made = TraceObserver(traces), []
    for k in range(folds):
        held_out = np.sort(order[k::folds])
        learnt = np.setdiff1d(order, held_out)
        cut = max(1, learnt.size // 5)
        stop, learn = learnt[:cut], learnt[cut:]
        training, validation = (
            draw(observer, who, start=0.0, until=until, n=size, seed=seed, short_history=0.2)
            for who, size in ((learn, n), (stop, max(n // 5, 100)))
        )
        made.append((held_out, forecaster_class(kind)().fit(training, validation, seed=seed)))
    return made


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Stages:
    """The three stages of an agent's life."""

    training: Stage
    """To learn on."""
    validation: Stage
    """To watch the learning on: other devices, the same hours."""
    testing: Stage
    """To test on: other devices and later hours."""
    split: Split
    """Which devices and hours are in which."""


def stages(
    traces: TraceSet,
    *,
    forecaster: Forecaster | None = None,
    forecasts: Mode = "forecaster",
    seed: int = 0,
    settings: EpisodeSettings | None = None,
    cache: str | Path | None = None,
) -> Stages:
    """Return the three stages that one set of traces is divided into.

    Args:
        traces: complete devices, at least 10.
        forecaster: of all devices; it must not have learnt from them. If None, one is trained for
            each half of the training devices on the other half, and devices that are only
            validated or tested on use the first of these.
        forecasts: what devices say.
        seed: of the division.
        settings: what episodes are drawn from.
        cache: folder to keep forecasts in.

    Raises:
        TraceError: there are too few devices.
    """
    parts = split(traces, seed=seed)
    kinds = JobKinds.of_fleet(traces.take(parts.training))
    fitted: Parts | None = None
    if forecasts == "forecaster" and forecaster is None:
        fitted = cross_fitted(traces, parts.training, until=parts.turn, seed=seed)
    made = {}
    for name, start, end in (
        ("training", 0.0, parts.turn),
        ("validation", 0.0, parts.turn),
        ("testing", parts.turn, parts.end),
    ):
        devices = getattr(parts, name)
        used = forecaster
        if fitted is not None and name != "training":
            used = fitted[0][1]
        made[name] = Stage.of(
            traces,
            forecasts=forecasts,
            forecaster=fitted if fitted is not None and name == "training" else used,
            devices=devices,
            start=start,
            end=end,
            kinds=kinds,
            settings=settings,
            cache=None if cache is None else Path(cache) / f"forecasts-{name}.npz",
        )
    return Stages(**made, split=parts)
