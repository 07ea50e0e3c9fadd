"""Backtest of whole jobs: forecast times and probabilities, against the outcome of `trips`.

Also the worth of the probabilities: a server that picks the most reliable devices, and counts the
reports in time and the device-seconds wasted on the others.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain

import numpy as np
import pandas as pd

from fedstale.traces import Array, Availability, Index, Job, Status, TraceSet
from fedstale.traces.forecast.base import Forecaster
from fedstale.traces.forecast.conformal import Adaptation, Calibration, fleet_scores
from fedstale.traces.forecast.evaluation import backtest as scores
from fedstale.traces.forecast.observation import Observation, TraceObserver
from fedstale.traces.forecast.survival import PHASES, JobForecast

_COLUMNS = ["forecaster", "quantity", "metric", "value", "low", "high", "n"]


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
    return np.where((outcome.reported <= until)[:, None], outcome.times(origins.now), np.nan)


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


def job_scores(
    name: str, forecast: JobForecast, origins: Observation, times: Array, finished: Array
) -> pd.DataFrame:
    """Return the scores of forecasts of one job.

    Args:
        name: of the forecaster.
        forecast: at the origins.
        origins: devices and instants.
        times: what the times were, in s, NaN where unknown; shape (n, 3).
        finished: 1 where the job was reported in time, 0 where not, NaN where it was not tried;
            shape (n,).

    Returns:
        Columns forecaster, quantity, metric, value, low, high, n. Times are in s; pinball and width
        are of their logarithms.
    """
    rows: list[tuple[object, ...]] = []
    block = scores.blocks(origins)
    for p, phase in enumerate(PHASES):
        y, q = times[:, p], forecast.times_s[:, p]
        log_y, log_q = (np.log(np.maximum(x, 1e-6)) for x in (y, q))
        metrics: dict[str, Array] = {
            "mae_s": np.abs(y - q[:, 1]),
            "pinball": scores.pinball(log_q, log_y),
            "coverage": scores.covered(q, y),
            "width": np.where(np.isnan(y), np.nan, log_q[:, 2] - log_q[:, 0]),
        }
        known = int(np.isfinite(y).sum())
        # One forecast of never, 1e9 s, is the mean of all errors; it does not move the median.
        middle = float(np.nanmedian(metrics["mae_s"])) if known else np.nan
        rows.append((name, phase, "median_error_s", middle, np.nan, np.nan, known))
        rows += scores.scored((name, phase), metrics, block, known)
    tried = int(np.isfinite(finished).sum())
    rules = {"brier": scores.brier, "log_loss": scores.log_loss}
    metrics = {metric: rule(forecast.p_finish, finished) for metric, rule in rules.items()}
    rows += scores.scored((name, "finish"), metrics, block, tried)
    area = scores.average_precision(forecast.p_finish, finished)
    rows.append((name, "finish", "auprc", area, np.nan, np.nan, tried))
    return pd.DataFrame(rows, columns=_COLUMNS)


def finishes(traces: TraceSet, origins: Observation, job: Job, until: float) -> Array:
    """Return 1 where a job sent to a device online is reported in time, 0 where not, else NaN.

    NaN are devices that are offline, and jobs whose deadline lies beyond the part or the log.
    """
    outcome = traces.trips(origins.devices, origins.now, job)
    known = np.minimum(traces.log_at(origins.devices, origins.now)[1], until)
    tried = origins.online & (origins.now + np.asarray(job.ttl_s) <= known)
    return np.where(tried, outcome.status == Status.REPORTED, np.nan)


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


def most_reliable(forecast: JobForecast) -> Index:
    """Return the devices by falling probability to finish; of equal ones the fastest first."""
    return np.lexsort((forecast.total_s[:, 1], -forecast.p_finish))


def decision(
    forecasters: Mapping[str, Forecaster],
    observer: TraceObserver,
    devices: Index,
    instants: Array,
    job: Job,
    *,
    k: int,
    seed: int,
    order: Callable[[JobForecast], Index] = most_reliable,
) -> pd.DataFrame:
    """Return what picking the most reliable k devices at each instant costs and brings.

    Every instant is a round of its own: k of the devices online are sent the job, of equally
    reliable ones the fastest. Instants with fewer than 2 k devices online are left out, since there
    is nothing to choose.

    Args:
        forecasters: fitted ones; random choice is added.
        observer: of the devices' traces.
        devices: positions of the devices to choose from.
        instants: in s; shape (rounds,).
        job: what is sent; its deadline must be finite.
        k: number of devices picked.
        seed: of random choices.
        order: returns devices in the order in which they are picked.

    Returns:
        For each forecaster: valid_ratio (reported in time / sent), wasted_s (device-seconds spent
        on jobs that were not reported in time, per job sent), both with 95 % intervals over
        rounds, gap_closed (share of the way in wasted_s from last-value to oracle), rounds.
    """
    assert observer.traces.availability is not None
    rng = np.random.default_rng(seed)
    # Of each round, the share that is reported in time and the device-seconds wasted.
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in ("random", *forecasters)}
    for now in instants:
        # What a device does beyond its log is unknown.
        logged = observer.traces.log_at(devices, now)[1] >= now + np.max(job.ttl_s)
        online = devices[observer.traces.availability.is_available(devices, now) & logged]
        if online.size < 2 * k:
            continue
        outcome = observer.traces.trips(online, now, job)
        good = outcome.status == Status.REPORTED
        spent = outcome.download_s + outcome.compute_s + outcome.upload_s
        spent = np.where(good, 0.0, spent)
        observed = observer.at(online, now)
        orders = {
            name: order(each.forecast_job(observed, job)) for name, each in forecasters.items()
        }
        for name, picked in ({"random": rng.permutation(online.size)} | orders).items():
            rounds[name].append((good[picked[:k]].mean(), spent[picked[:k]].mean()))
    rows: list[tuple[object, ...]] = []
    for name, values in rounds.items():
        # Neighbouring rounds are alike, so hours are resampled whole.
        hours = np.arange(len(values)) // 4
        both = (scores.mean_with_interval(x, hours) for x in np.array(values).reshape(-1, 2).T)
        rows.append((name, *chain.from_iterable(both), hours.size))
    columns = ["valid_ratio", "valid_low", "valid_high", "wasted_s", "wasted_low", "wasted_high"]
    table = pd.DataFrame(rows, columns=["forecaster", *columns, "rounds"])
    named = table.set_index("forecaster")["wasted_s"]
    if {"last-value", "oracle"} <= set(named.index) and named["last-value"] > named["oracle"]:
        gap = named["last-value"] - named["oracle"]
        table["gap_closed"] = (named["last-value"] - table["wasted_s"]) / gap
    return table
