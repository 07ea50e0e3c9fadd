"""What an episode is: a window of real traces, some of its devices, a job, a schedule, and data.

Everything that may differ between deployments is drawn anew for each episode, so that an agent
cannot learn one fleet by heart: how many devices, how many are asked at a time, how long a job
takes, whether the server waits for all or merges late replies, how data are dealt, and whether
forecasts are asked for or only come with replies.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstale.agents.env.learning_proxy import deal
from fedstale.errors import ConfigError, TraceError
from fedstale.strategies.schedule import Schedule, k_async, k_sync
from fedstale.strategies.settings import is_count
from fedstale.strategies.weighting.base import AgeCurve, constant, inverse_root, polynomial
from fedstale.traces import TraceSet
from fedstale.traces.arrays import Array, Index, Mask

GROUPS = 10
"""Groups of data that a model is to learn."""
AGES = 64
"""Staleness from which on a late update weighs as at this one."""
NOISES = 4
"""Draws of noise that a device's reports go through in turn."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class JobKinds:
    """The jobs that episodes choose from; arrays of shape (kinds,)."""

    work: Array
    """Work in the traces' units."""
    n_bytes: Array
    """Size of the message and of the reply."""
    ttl_s: Array
    """Time after which a reply is refused, in s, finite."""
    usual_s: Array
    """What it takes a device with the fleet's median rates, in s."""

    def __len__(self) -> int:
        return self.work.size

    @classmethod
    def of_fleet(
        cls,
        traces: TraceSet,
        *,
        minutes: tuple[float, ...] = (2.0, 5.0, 10.0, 20.0),
        megabytes: tuple[float, ...] = (1.0, 5.0, 20.0, 5.0),
        patience: tuple[float, ...] = (8.0, 5.0, 4.0, 3.0),
        seed: int = 0,
    ) -> "JobKinds":
        """Return jobs by what they would cost the median device of a fleet.

        Args:
            traces: the fleet.
            minutes: of training on the median device; one each kind.
            megabytes: each way.
            patience: time to live, in multiples of the usual time.
            seed: of the instants at which rates are sampled.

        Raises:
            TraceError: a channel is unknown, or a median rate is 0.

        Example:
            >>> fleet = TraceSet.constant(
            ...     3, compute=2, downlink_bit_per_s=8e6, uplink_bit_per_s=8e6
            ... )
            >>> JobKinds.of_fleet(fleet, minutes=(1,), megabytes=(10,), patience=(5,)).usual_s
            array([80.])
        """
        traces.require("availability", "compute", "downlink", "uplink")
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(41,)))
        devices = rng.integers(traces.n_devices, size=2_000)
        when = rng.random(2_000) * 86_400.0
        rates = []
        for name in ("compute", "downlink", "uplink"):
            rate = float(np.median(getattr(traces, name).value_at(devices, when)))
            if not 0.0 < rate < np.inf:
                raise TraceError(f"median rate of {name} = {rate}: expected devices that work")
            rates.append(rate)
        compute, downlink, uplink = rates
        work = 60.0 * np.array(minutes, dtype=np.float64) * compute
        n_bytes = np.rint(1e6 * np.array(megabytes, dtype=np.float64))
        usual = work / compute + n_bytes * 8.0 / downlink + n_bytes * 8.0 / uplink
        return cls(work=work, n_bytes=n_bytes, ttl_s=usual * np.array(patience), usual_s=usual)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """From what episodes are drawn; pairs are the least and the most."""

    window_s: float = 6 * 3600.0
    """Longest time of an episode in s, > 0."""
    rounds: int = 24
    """Most rounds of an episode, >= 1."""
    devices: tuple[int, int] = (32, 256)
    """Devices that appear in the window; drawn on a logarithmic scale."""
    asked_share: tuple[float, float] = (0.1, 0.6)
    """Jobs out at a time over devices online at a time; drawn on a logarithmic scale."""
    merge_share: tuple[float, float] = (0.6, 1.0)
    """Updates of a merge over jobs out, in (0, 1]."""
    late_share: float = 0.5
    """Share of the episodes whose server keeps late jobs and merges them."""
    deadline_share: float = 0.3
    """Share of the episodes whose server merges what there is after a deadline."""
    query_share: float = 0.5
    """Share of the episodes whose server asks for forecasts; in the others they are as old as the
    last reply."""
    liar_share: float = 0.5
    """Share of the episodes in which some devices always claim to finish."""
    liars: float = 0.3
    """Share of devices that do, there."""
    skew: tuple[float, float] = (0.1, 3.0)
    """Concentration of the mixtures of data; drawn on a logarithmic scale."""
    spread: tuple[float, float] = (0.2, 1.2)
    """Standard deviation of the logarithm of the number of examples."""
    cooldown_s: float = 0.0
    """Time after a job was sent for which its device is not a candidate, in s."""

    def __post_init__(self) -> None:
        low, high = self.devices
        checks = {
            "window_s": self.window_s > 0,
            "rounds": is_count(self.rounds),
            "devices": is_count(low) and is_count(high) and 1 <= low <= high,
            "asked_share": 0 < self.asked_share[0] <= self.asked_share[1] <= 1,
            "merge_share": 0 < self.merge_share[0] <= self.merge_share[1] <= 1,
            "skew": 0 < self.skew[0] <= self.skew[1],
            "spread": 0 <= self.spread[0] <= self.spread[1],
            "cooldown_s": 0 <= self.cooldown_s < np.inf,
        }
        shares = ("late_share", "deadline_share", "query_share", "liar_share", "liars")
        checks |= {name: 0 <= getattr(self, name) <= 1 for name in shares}
        for name, good in checks.items():
            if not good:
                raise ConfigError(
                    f"episodes.{name} = {getattr(self, name)!r}: expected shares in [0, 1], pairs "
                    "(least, most), and times > 0 in s; see EpisodeSettings"
                )


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Episodes:
    """Some episodes, as arrays; b episodes of at most n devices."""

    devices: Index
    """Position of each device in the traces; shape (b, n)."""
    present: Mask
    """Whether there is a device; shape (b, n)."""
    start: Array
    """Instants in s; shape (b,)."""
    end: Array
    """Instants in s; shape (b,)."""
    rounds: Index
    """Most rounds; shape (b,)."""
    kind: Index
    """Which job; shape (b,)."""
    concurrency: Index
    """Jobs out at a time; shape (b,)."""
    buffer_size: Index
    """Updates of a merge; shape (b,)."""
    keeps: Mask
    """Whether jobs still out at a merge are merged later, or forgotten; shape (b,)."""
    deadline_s: Array
    """Time after which what there is is merged, in s or inf; shape (b,)."""
    age_weights: Array
    """Weight of an update by its staleness; shape (b, AGES)."""
    cooldown_s: Array
    """Time for which a picked device rests, in s; shape (b,)."""
    asks: Mask
    """Whether forecasts are asked for at every choice; shape (b,)."""
    lies: Mask
    """Whether a device always claims to finish; shape (b, n)."""
    mixtures: Array
    """Share of each group in a device's data; shape (b, n, groups)."""
    examples: Array
    """Number of examples of a device; shape (b, n)."""
    noise: Array
    """Standard normal noise of a device's reports, used in turn; shape (b, n, NOISES)."""

    def __len__(self) -> int:
        return self.start.size

    def take(self, which: npt.NDArray[Any]) -> "Episodes":
        """Return some episodes, by position or by a mask."""
        return Episodes(**{f.name: getattr(self, f.name)[which] for f in fields(self)})

    @property
    def n_max(self) -> int:
        """Devices that there is room for."""
        return self.devices.shape[1]


# How the server treats late replies, and how it weighs them.
_SCHEDULES: Mapping[bool, Callable[[int, int], Schedule]] = {False: k_sync, True: k_async}
_CURVES: tuple[AgeCurve, ...] = (constant(), polynomial(0.5), inverse_root())


def draw_episodes(
    traces: TraceSet,
    kinds: JobKinds,
    n: int,
    *,
    devices: npt.ArrayLike,
    start: float,
    end: float,
    n_max: int,
    rng: np.random.Generator,
    settings: EpisodeSettings | None = None,
) -> Episodes:
    """Return episodes drawn from devices and a span of time.

    The devices of an episode are drawn from those that appear in its window: the others would never
    be candidates. A record that is shorter than a window makes shorter episodes.

    Args:
        traces: complete devices.
        kinds: the jobs to choose from.
        n: number of episodes, >= 1.
        devices: positions of the devices to draw from; shape (m,).
        start: first instant of any episode in s, >= 0.
        end: last instant of any episode in s.
        n_max: devices that there is room for.
        rng: of the draw.
        settings: what to draw from; the defaults if None.

    Raises:
        TraceError: there is no time, or nobody appears in it.
        ConfigError: n_max is below the least number of devices.
    """
    settings = settings or EpisodeSettings()
    pool = np.unique(np.asarray(devices, dtype=np.int64))
    if not 0 <= start < end:
        raise TraceError(f"episodes from {start} to {end} s: expected 0 <= start < end")
    if n_max < settings.devices[0]:
        raise ConfigError(f"n_max = {n_max}: expected at least {settings.devices[0]} devices")
    if pool.size == 0:
        raise TraceError("no devices to draw episodes from: expected at least one")
    window = min(settings.window_s, end - start)
    begins = start + rng.random(n) * (end - start - window)
    who, present = _appearing(traces, pool, begins, window, n_max, settings.devices, rng)
    online_at_a_time = _online_at_a_time(traces, who, present, begins, window)
    kind = rng.integers(len(kinds), size=n)
    asked = online_at_a_time * _log_uniform(rng, settings.asked_share, n)
    concurrency = np.rint(asked).astype(np.int64)
    # One device at a time is no choice of a set.
    concurrency = np.minimum(np.maximum(concurrency, 2), present.sum(axis=1))
    merge = np.rint(concurrency * rng.uniform(*settings.merge_share, n)).astype(np.int64)
    keeps = rng.random(n) < settings.late_share
    merge = np.clip(merge, 1, concurrency)
    made = [
        _SCHEDULES[bool(late)](int(f), int(m))
        for late, f, m in zip(keeps, concurrency, merge, strict=True)
    ]
    deadline = np.where(
        rng.random(n) < settings.deadline_share, kinds.usual_s[kind] * rng.uniform(1, 3, n), np.inf
    )
    curve = rng.integers(len(_CURVES), size=n)
    weights = np.array([[c(age) for age in range(AGES)] for c in _CURVES])[curve]
    skew, spread = _log_uniform(rng, settings.skew, n), rng.uniform(*settings.spread, n)
    mixtures, examples = deal(rng, who.shape, GROUPS, skew, spread)
    lies = (rng.random(n) < settings.liar_share)[:, None] & (rng.random(who.shape) < settings.liars)
    return Episodes(
        devices=who,
        present=present,
        start=begins,
        end=begins + window,
        rounds=np.full(n, settings.rounds),
        kind=kind,
        concurrency=np.array([s.concurrency for s in made], dtype=np.int64),
        buffer_size=np.array([s.buffer_size for s in made], dtype=np.int64),
        keeps=np.array([s.stragglers == "keep" for s in made]),
        deadline_s=deadline,
        age_weights=weights,
        cooldown_s=np.full(n, settings.cooldown_s),
        asks=rng.random(n) < settings.query_share,
        lies=lies,
        mixtures=mixtures,
        examples=examples,
        noise=rng.standard_normal((*who.shape, NOISES)),
    )


def online_share(
    traces: TraceSet, devices: Index, start: Array, end: Array, looks: int = 24
) -> Array:
    """Return in what share of some looks each device is online in the window of its row.

    Args:
        traces: the devices.
        devices: positions; shape (b, n).
        start: of each row's window in s; shape (b,).
        end: of each row's window in s; shape (b,).
        looks: number of looks, evenly spread.
    """
    traces.require("availability")
    assert traces.availability is not None
    seen = np.zeros(devices.shape)
    for look in (np.arange(looks) + 0.5) / looks:
        when = np.repeat(start + look * (end - start), devices.shape[1])
        seen += traces.availability.is_available(devices.ravel(), when).reshape(devices.shape)
    return seen / looks


def _online_at_a_time(
    traces: TraceSet, who: Index, present: Mask, begins: Array, window: float
) -> Array:
    """Return how many devices of each episode are online at a time, in the mean; shape (b,)."""
    assert traces.availability is not None
    looks = 8
    row, column = np.nonzero(present)
    found = np.zeros(begins.size)
    for look in (np.arange(looks) + 0.5) / looks:
        there = traces.availability.is_available(who[row, column], begins[row] + look * window)
        found += np.bincount(row[there], minlength=begins.size)
    return found / looks


def _appearing(  # noqa: PLR0917 - one draw's arrays
    traces: TraceSet,
    pool: Index,
    begins: Array,
    window: float,
    n_max: int,
    wanted: tuple[int, int],
    rng: np.random.Generator,
) -> tuple[Index, Mask]:
    """Return devices that appear in each window, and where there is one; (b, n_max) each.

    Raises:
        TraceError: too few windows have anybody in them.
    """
    traces.require("availability")
    assert traces.availability is not None
    who = np.zeros((begins.size, n_max), dtype=np.int64)
    present = np.zeros(who.shape, dtype=bool)
    for i in range(begins.size):
        first, _ = traces.availability.window_at_or_after(pool, begins[i])
        there = pool[first < begins[i] + window]
        most = min(wanted[1], n_max)
        count = int(np.rint(_log_uniform(rng, (wanted[0], most), 1)[0]))
        drawn = rng.permutation(there)[:count]
        who[i, : drawn.size], present[i, : drawn.size] = drawn, True
    empty = ~present.any(axis=1)
    if empty.all():
        raise TraceError(
            f"no device is online in any of {begins.size} windows of {window:g} s: expected traces "
            "with devices that appear"
        )
    if empty.any():
        # A window without anybody is no episode: another takes its place.
        full = rng.choice(np.flatnonzero(~empty), size=int(empty.sum()))
        who[empty], present[empty], begins[empty] = who[full], present[full], begins[full]
    return who, present


def _log_uniform(rng: np.random.Generator, pair: tuple[float, float], n: int) -> Array:
    return np.exp(rng.uniform(np.log(pair[0]), np.log(pair[1]), n))
