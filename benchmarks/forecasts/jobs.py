"""How often intervals of the times of jobs cover, as forecast and as devices correct them."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from fedstale.traces import Array, Index, Job, TraceSet
from fedstale.traces.forecast import Adaptation, Calibration, Forecaster, Observation, fleet_scores
from fedstale.traces.forecast.evaluation import job_scores, true_times
from fedstale.traces.forecast.survival import JobForecast


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
    unknown = np.full(len(sent), np.nan)
    parts = []
    for name, forecaster in fitted.items():
        forecast = forecaster.forecast_job(sent, job)
        parts.append(job_scores(name, forecast, sent, times, unknown))
        fleet = calibration_scores(forecaster, *held_out[:2], job, held_out[2])
        for variant, adaptation in (("fleet", Adaptation(step=0.0)), ("own", Adaptation())):
            better = calibrated(forecast, sent, times, fleet, adaptation)
            parts.append(job_scores(f"{name} + {variant}", better, sent, times, unknown))
    return pd.concat(parts, ignore_index=True)


def calibrated(
    forecast: JobForecast,
    origins: Observation,
    times: Array,
    held_out: Array,
    adaptation: Adaptation,
) -> JobForecast:
    """Return forecasts as devices would have corrected them, each from its own outcomes so far.

    An outcome is known to its device when the job is over, and not before.

    Args:
        forecast: of the forecaster, at the origins.
        origins: in order of time.
        times: their `true_times`; shape (n, 3).
        held_out: scores of the fleet, from `fleet_scores`.
        adaptation: how devices adapt.
    """
    calibration = Calibration(int(origins.devices.max(initial=0)) + 1, held_out, adaptation)
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
        forecaster.forecast_job(observed, job), true_times(traces, observed, job, until)
    )
