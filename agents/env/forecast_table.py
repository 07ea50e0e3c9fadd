"""What devices forecast of themselves during episodes, computed beforehand.

A forecast takes tens of microseconds, and an episode needs thousands. So every device forecasts
once for each kind of job and each step of time at which it is online, from its history up to that
instant, and an episode looks the last one up. A table is made of parts, each with a forecaster of
its own, so that no device is forecast by a forecaster that learnt from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from fedstale.agents.env.episodes import JobKinds
from fedstale.errors import TraceError
from fedstale.traces import Array, Index, Status, TraceSet
from fedstale.traces.forecast import AVAILABLE_S, HORIZONS_S, Forecaster, TraceObserver

Parts = Sequence[tuple[npt.ArrayLike, Forecaster]]
"""Positions of devices, and the forecaster that they use."""
Reported = tuple[Array, Array, Array]
"""Chance to finish, chance to stay online, and duration in s; shape (n,) each."""


_CHUNK = 20_000
SCALES: Array = 2.0 ** np.arange(-3.0, 4.0)
"""Works of a job, over that of the mean device, of which a table has forecasts; between them it is
read off a line in the logarithm of work, of the chances and of the logarithm of the duration."""
_LOG_SCALES, _PLACES = np.log(SCALES), np.arange(SCALES.size)


@dataclass(frozen=True, slots=True)
class TrueForecasts:
    """Devices know their future; an upper bound, and no forecast."""

    traces: TraceSet
    """The devices, complete."""
    kinds: JobKinds
    """The jobs."""

    def at(self, devices: Index, kind: Index, scale: Array, now: Array) -> Reported:
        """Compute the outcome; arguments as of `ForecastTable.at`.

        The duration of a job that is lost is its time to live.
        """
        jobs = self.kinds.jobs(kind, scale)
        outcome = self.traces.trips(devices, now, jobs)
        finished = outcome.status == Status.REPORTED
        _, end = self.traces.channel("availability").window_at_or_after(devices, now)
        with np.errstate(invalid="ignore"):
            duration = np.where(finished, outcome.reported - now, jobs.ttl_s)
        return finished.astype(np.float64), (end - now > AVAILABLE_S).astype(np.float64), duration


@dataclass(frozen=True, eq=False, slots=True)
class ForecastTable:
    """Forecasts of every device on a grid of instants; see `ForecastTable.of`."""

    values: npt.NDArray[np.float32]
    """Chance to finish, chance to stay online and duration in s; NaN where the device was not
    online; shape (3, devices of the table, steps, kinds, `SCALES`)."""
    rows: Index
    """Row of each device of the traces in the table, -1 if it has none; shape (devices,)."""
    start: float
    """Instant of the first step in s."""
    step_s: float
    """From one step to the next in s."""

    @classmethod
    def of(
        cls,
        traces: TraceSet,
        kinds: JobKinds,
        parts: Parts,
        *,
        start: float,
        end: float,
        step_s: float = 300.0,
    ) -> "ForecastTable":
        """Compute a forecast of every device for each step in which it is online.

        Args:
            traces: the devices.
            kinds: the jobs.
            parts: positions of devices, and the forecaster that they use; a device at most once.
            start: first instant in s, >= 0.
            end: last instant in s.
            step_s: from one forecast to the next in s, > 0.

        Raises:
            TraceError: a device occurs twice, or the span is empty.
        """
        devices = [np.asarray(d, dtype=np.int64) for d, _ in parts]
        every = np.concatenate(devices) if devices else np.zeros(0, dtype=np.int64)
        if np.unique(every).size < every.size:
            raise TraceError("forecasts: a device occurs in two parts; expected disjoint parts")
        if not (0 <= start < end and step_s > 0):
            raise TraceError(f"forecasts from {start} to {end} s by {step_s}: expected a span")
        rows = np.full(traces.n_devices, -1, dtype=np.int64)
        rows[every] = np.arange(every.size)
        n_steps = int(np.ceil((end - start) / step_s))
        steps: Array = start + step_s * np.arange(n_steps, dtype=np.float64)
        values = _made(TraceObserver(traces), kinds, parts, steps, step_s)
        return cls(values, rows, start, step_s)

    def at(self, devices: Index, kind: Index, scale: Array, now: Array) -> Reported:
        """Look up the last forecasts of devices, at or before some instants.

        Args:
            devices: positions in the traces; shape (n,).
            kind: of the job that is forecast; shape (n,).
            scale: its work over that of the mean device, > 0; shape (n,).
            now: instants in s; shape (n,).

        Returns:
            Three arrays of shape (n,); NaN where a device has no forecast.
        """
        n_steps = self.values.shape[2]
        step = np.floor((now - self.start) / self.step_s).astype(np.int64)
        rows = self.rows[devices]
        known = (rows >= 0) & (step >= 0)
        step = np.minimum(np.maximum(step, 0), n_steps - 1)
        place = np.interp(np.log(scale), _LOG_SCALES, _PLACES)
        low = np.minimum(place.astype(np.int64), SCALES.size - 2)
        both = self.values[:, rows, step, kind, [low, low + 1]].astype(np.float64)
        (p, more_p), (stays, _), durations = np.where(known, both, np.nan)
        share = place - low
        less, more = np.log(durations)
        duration = np.exp((1.0 - share) * less + share * more)
        # Whether a device stays does not depend on its job.
        return (1.0 - share) * p + share * more_p, stays, duration


def _made(
    observer: TraceObserver, kinds: JobKinds, parts: Parts, steps: Array, step_s: float
) -> npt.NDArray[np.float32]:
    """Return the values of all parts; shape (3, devices, steps, kinds, `SCALES`)."""
    shape = steps.size, len(kinds), SCALES.size
    made: list[npt.NDArray[np.float32]] = [np.empty((3, 0, *shape), dtype=np.float32)]
    horizon = int(np.searchsorted(HORIZONS_S, AVAILABLE_S))
    for part, forecaster in parts:
        devices = np.asarray(part, dtype=np.int64)
        values = np.full((3, devices.size, *shape), np.nan, dtype=np.float32)
        row, step = (x.ravel() for x in np.indices((devices.size, steps.size)))
        # A device that comes online within a step forecasts when it comes.
        availability = observer.traces.channel("availability")
        first, _ = availability.window_at_or_after(devices[row], steps[step])
        online = np.flatnonzero(first < steps[step] + step_s)
        for i in range(0, online.size, _CHUNK):
            some = online[i : i + _CHUNK]
            forecast = forecaster.forecast(observer.at(devices[row[some]], first[some]))
            for kind, (place, scale) in product(range(len(kinds)), enumerate(SCALES)):
                job = kinds.jobs(np.full(some.size, kind), np.full(some.size, scale))
                of_job = forecast.of_job(job)
                reported = of_job.p_finish, forecast.survival[:, horizon], of_job.total_s[:, 1]
                values[:, row[some], step[some], kind, place] = reported
        made.append(values)
    return np.concatenate(made, axis=1)
