"""How often intervals of the times of jobs cover, as forecast and as devices correct them."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from fedstale.traces import Array, Availability, Index, Job, TraceSet
from fedstale.traces.forecast import Calibration, Forecaster, Observation
from fedstale.traces.forecast.backtest import blocks, pinball
from fedstale.traces.forecast.survival import PHASES, JobForecast
from forecasts.horizons import covered, scored

GRID = np.linspace(0.0, 1.0, 201)
"""Levels of the quantiles of scores, as `Calibration` has them."""
_COLUMNS = ["forecaster", "quantity", "metric", "value", "low", "high", "n"]


def corrected_scores(
    fitted: Mapping[str, Forecaster],
    traces: TraceSet,
    origins: Observation,
    until: float,
    job: Job,
    *,
    held_out: tuple[TraceSet, Observation, float],
) -> pd.DataFrame:
    """Score forecasts of a job: as they are, corrected for the fleet, and for each device.

    Args:
        fitted: forecasters by name.
        traces: the devices to test on.
        origins: devices and instants; jobs are sent to those online.
        until: end of the test in s.
        job: what is sent.
        held_out: traces, observations and end of devices that were not learnt from, to calibrate
            on.
    """
    sent = origins.take(origins.online)
    times = true_times(traces, sent, job, until)
    parts = []
    for name, forecaster in fitted.items():
        forecast = forecaster.forecast(sent).of_job(job)
        parts.append(job_scores(name, forecast, sent, times))
        fleet = calibration_scores(forecaster, *held_out[:2], job, held_out[2])
        for variant, step in (("fleet", 0.0), ("own", 0.05)):
            better = calibrated(forecast, sent, times, fleet, step)
            parts.append(job_scores(f"{name} + {variant}", better, sent, times))
    return pd.concat(parts, ignore_index=True)


def calibrated(
    forecast: JobForecast,
    origins: Observation,
    times: Array,
    held_out: Array,
    step: float = 0.05,
) -> JobForecast:
    """Return forecasts as devices would have corrected them, each from its own outcomes so far.

    An outcome is known to its device when the job is over, and not before.

    Args:
        forecast: of the forecaster, at the origins.
        origins: in order of time.
        times: their `true_times`; shape (n, 3).
        held_out: scores of the fleet, from `fleet_scores`.
        step: of `Calibration`.
    """
    calibration = Calibration(int(origins.devices.max(initial=0)) + 1, held_out, step)
    known_at = np.where(np.isfinite(times[:, 2]), origins.now + times[:, 2], np.inf)
    waiting = np.zeros(0, dtype=np.int64)
    given = forecast.times_s.copy()

    def part(which: Index) -> JobForecast:
        return JobForecast(times_s=given[which], p_finish=forecast.p_finish[which])

    for now in np.unique(origins.now):
        due = waiting[known_at[waiting] <= now]
        for job in due[np.argsort(known_at[due], kind="stable")]:
            one = np.array([job])
            calibration.learn(origins.devices[one], part(one), times[one])
        waiting = waiting[known_at[waiting] > now]
        new = np.flatnonzero(origins.now == now)
        given[new] = calibration.corrected(origins.devices[new], part(new)).times_s
        waiting = np.concatenate([waiting, new])
    return replace(forecast, times_s=given)


def calibration_scores(
    forecaster: Forecaster, traces: TraceSet, observed: Observation, job: Job, until: float
) -> Array:
    """Return the fleet's scores for `Calibration`, on devices that were not learnt from.

    Only devices count that are online and remember all of their history, as those that are sent
    jobs. All count where there are none of these.
    """
    began = traces.log_at(observed.devices, observed.now)[0].clip(min=0.0)
    alike = observed.online & (observed.history_s >= observed.now - began)
    observed = observed.take(alike) if alike.any() else observed
    return fleet_scores(
        forecaster.forecast(observed).of_job(job), true_times(traces, observed, job, until)
    )


def true_times(traces: TraceSet, origins: Observation, job: Job, until: float) -> Array:
    """Return the times of jobs that nothing interrupts, in s; shape (n, 3), as `PHASES`.

    A job that is not over when the part ends is NaN.

    Args:
        traces: the devices, with all four channels.
        origins: devices that the job is sent to, and when; n.
        job: what is sent.
        until: end of the part in s.
    """
    # Interruptions are scored apart; without them the times of every origin are known.
    always = replace(traces, availability=Availability.always(traces.n_devices))
    outcome = always.trips(origins.devices, origins.now, replace(job, ttl_s=np.inf))
    trained, reported = outcome.trained, outcome.reported
    with np.errstate(invalid="ignore"):
        times = [trained - outcome.downloaded, reported - trained, reported - origins.now]
    return np.where((reported <= until)[:, None], np.stack(times, axis=1), np.nan)


def job_scores(
    name: str, forecast: JobForecast, origins: Observation, times: Array
) -> pd.DataFrame:
    """Score the forecasts of one job.

    Args:
        name: of the forecaster.
        forecast: at the origins.
        origins: devices and instants.
        times: what the times were, in s, NaN where unknown; shape (n, 3).

    Returns:
        Columns forecaster, quantity, metric, value, low, high, n. Times are in s, their pinball
        loss is of logarithms.
    """
    rows: list[tuple[object, ...]] = []
    block = blocks(origins)
    for p, phase in enumerate(PHASES):
        y, q = times[:, p], forecast.times_s[:, p]
        log_y, log_q = (np.log(np.maximum(x, 1e-6)) for x in (y, q))
        metrics = {"pinball": pinball(log_q, log_y), "coverage": covered(q, y)}
        known = int(np.isfinite(y).sum())
        # One forecast of never, 1e9 s, is the mean of all errors; it does not move the median.
        middle = float(np.nanmedian(np.abs(y - q[:, 1]))) if known else np.nan
        rows.append((name, phase, "median_error_s", middle, np.nan, np.nan, known))
        rows += scored((name, phase), metrics, block, known)
    return pd.DataFrame(rows, columns=_COLUMNS)


def fleet_scores(forecast: JobForecast, outcome: Array) -> Array:
    """Return the quantiles of the scores of a fleet that was not trained on.

    A score is by how much, in logarithms, the truth lay outside an end; less than 0 is inside.

    Args:
        forecast: of n jobs.
        outcome: what the times were, in s, NaN where unknown; shape (n, 3).

    Returns:
        Shape (3, 2, 201), for `Calibration`. Zeros, which correct nothing, where no outcome is
        known.
    """
    y = np.log(np.maximum(outcome, 1e-6))
    quantiles = np.log(np.maximum(forecast.times_s, 1e-6))
    outside = np.stack([quantiles[..., 0] - y, y - quantiles[..., 2]], axis=-1)
    scores = np.zeros((len(PHASES), 2, GRID.size))
    for p, end in np.ndindex(scores.shape[:2]):
        known = outside[np.isfinite(outcome[:, p]), p, end]
        if known.size:
            scores[p, end] = np.quantile(known, GRID)
    return scores
