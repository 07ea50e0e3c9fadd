"""The tables of a backtest, from traces or from forecasters that are fitted already.

Two of them are for plots, which reports draw. `survival` holds, for bins of the forecast survival
online, how often devices remained; `fan` holds the history of one device and the quantiles of its
rates, beside the rates that came.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fedstale.errors import ConfigError
from fedstale.traces.arrays import Array, Index
from fedstale.traces.forecast.base import FILES, Forecaster, forecaster_class
from fedstale.traces.forecast.baselines import Oracle
from fedstale.traces.forecast.conformal import Adaptation
from fedstale.traces.forecast.dataset import Examples, draw_parts, examples_at, split
from fedstale.traces.forecast.evaluation import backtest, jobs
from fedstale.traces.forecast.evaluation.backtest import reliability
from fedstale.traces.forecast.observation import (
    LEVELS,
    RATE_HORIZONS_S,
    RATES,
    Observation,
    TraceObserver,
)
from fedstale.traces.forecast.sessions import HORIZONS_S
from fedstale.traces.trace_set import TraceSet
from fedstale.traces.trip import Job

SHOWN = {
    "horizons": "By horizon: Brier skill of remaining as now and of being online, MASE of rates",
    "per_device": "Error of the mean rate over 5 min, as a logarithm: quantiles over devices",
    "cold_start": "Cold start: pinball of rates and Brier of survival, by length of history",
    "jobs": "The job: errors of its times, coverage of 80 % intervals, and its finish",
    "reliability": "Reliability of the probability to finish",
    "decision": "Picking the most reliable devices",
}
"""Tables by name, and their titles; `survival` and `fan` are for plots alone."""
SURVIVAL_S = (900.0, 3600.0)
"""Horizons whose survival is plotted, in s."""
PAST_S = 7200.0
"""How much of the history a fan shows, in s."""
_STEP_S = 300.0


def backtested(
    traces: TraceSet,
    kinds: Sequence[str],
    trained: Sequence[Path],
    job: Job,
    *,
    step_s: float,
    k: int,
    examples: int,
    seed: int,
) -> dict[str, pd.DataFrame]:
    """Return the tables of a backtest on the testing part of traces.

    Args:
        traces: the devices; what needs all four channels is left out where some are unknown.
        kinds: forecasters to fit on the learning part and test.
        trained: folders of forecasters to test.
        job: what is sent.
        step_s: time between origins.
        k: devices picked in a round of the decision table.
        examples: number of examples to fit on.
        seed: of everything.

    Raises:
        ConfigError: nothing is to be tested, or a trained one used another split of these traces.
    """
    parts = split(traces, seed=seed)
    training, held_out = draw_parts(traces, None, n=examples, seed=seed)
    fitted: dict[str, Forecaster] = {}
    for kind in kinds:
        if forecaster_class(kind) is Oracle:
            fitted[kind] = Oracle(traces)
        else:
            fitted[kind] = forecaster_class(kind)().fit(training, held_out, seed=seed)
    for folder in trained:
        learnt_with = FILES.describe(folder)["provenance"].get("seed", seed)
        if learnt_with != seed:
            raise ConfigError(
                f"{folder}: trained with seed {learnt_with}, tested with {seed}: expected the same "
                "seed, which splits the devices"
            )
        forecaster = Forecaster.load(folder)
        fitted[f"{forecaster.kind} ({Path(folder).name})"] = forecaster
    if not fitted:
        raise ConfigError("no forecaster: expected --forecasters or --trained")
    observer = TraceObserver(traces)
    tested = backtest.rolling(
        observer, parts.testing, start=parts.turn, until=parts.end, step_s=step_s, seed=seed
    )
    tables = process_tables(fitted, observer, tested, parts.end, training)
    tables["survival"] = survival(fitted, tested)
    tables["fan"] = fan(fitted, observer, tested, parts.end)
    if len(traces.known) == 4:
        tables |= job_tables(
            fitted,
            observer,
            tested.observed,
            parts.end,
            job,
            held_out=(traces, held_out.observed, parts.turn),
            devices=parts.testing,
            k=k,
            seed=seed,
        )
    return tables


def process_tables(
    fitted: Mapping[str, Forecaster],
    observer: TraceObserver,
    tested: Examples,
    until: float,
    training: Examples,
) -> dict[str, pd.DataFrame]:
    """Return the tables of the processes: horizons, per_device and cold_start."""
    least = backtest.least_rates(training)
    return {
        "horizons": backtest.by_horizon(fitted, tested, training),
        "per_device": backtest.error_per_device(fitted, tested, least),
        "cold_start": backtest.cold_start(fitted, observer, tested, until, least),
    }


def job_tables(
    fitted: Mapping[str, Forecaster],
    observer: TraceObserver,
    origins: Observation,
    until: float,
    job: Job,
    *,
    held_out: tuple[TraceSet, Observation, float],
    devices: Index,
    k: int,
    seed: int,
) -> dict[str, pd.DataFrame]:
    """Return the tables of a job: jobs, reliability and decision.

    Args:
        fitted: forecasters by name.
        observer: of the devices to test on.
        origins: devices and instants; jobs are sent to those online.
        until: end of the test in s.
        job: what is sent; a finite deadline for reliability and decision.
        held_out: traces, observations and end of devices that were not learnt from, to calibrate
            on.
        devices: to choose from in the decision table.
        k: devices picked in a round.
        seed: of random choices.
    """
    sent = origins.take(origins.online)
    times = jobs.true_times(observer.traces, sent, job, until)
    finished = jobs.finishes(observer.traces, sent, job, until)
    parts, curves = [], []
    for name, forecaster in fitted.items():
        forecast = forecaster.forecast_job(sent, job)
        parts.append(jobs.job_scores(name, forecast, sent, times, finished))
        curves.append(reliability(forecast.p_finish, finished).assign(forecaster=name))
        if forecaster.reads_the_future:
            continue
        traces, alike, end = held_out
        fleet = jobs.calibration_scores(forecaster, traces, alike, job, end)
        for variant, adaptation in (
            ("fleet", Adaptation(step=0.0)),
            ("own", Adaptation()),
            ("shared", Adaptation(shared_step=0.002)),
        ):
            better = jobs.calibrated(forecast, sent, times, fleet, adaptation)
            parts.append(jobs.job_scores(f"{name} + {variant}", better, sent, times, finished))
    tables = {
        "jobs": pd.concat(parts, ignore_index=True),
        "reliability": pd.concat(curves, ignore_index=True),
    }
    instants = _rounds(sent, until, job)
    if instants.size:
        tables["decision"] = jobs.decision(fitted, observer, devices, instants, job, k=k, seed=seed)
    return tables


def _rounds(sent: Observation, until: float, job: Job) -> Array:
    """Return the origins at which a round of the job is over before the part ends."""
    instants = np.unique(sent.now)
    return instants[instants + float(np.max(np.asarray(job.ttl_s))) <= until]


def wide(name: str, table: pd.DataFrame) -> pd.DataFrame:
    """Return the part of a table that is printed: a row a forecaster."""
    if name == "horizons":
        shown = table[table["metric"].eq("skill") | table["metric"].eq("mase")]
        return shown.pivot_table(
            index=["quantity", "metric", "forecaster"], columns="horizon_s", values="value"
        )
    if name == "jobs":
        shown = table.assign(what=table["quantity"] + " " + table["metric"])
        return shown.pivot_table(index="forecaster", columns="what", values="value")
    if name == "reliability":
        return table[table["n"] > 0].set_index("forecaster")
    if name == "cold_start":
        return table.pivot_table(index="forecaster", columns="history_s")
    if name == "per_device":
        return table.set_index(["channel", "forecaster"])
    return table.set_index("forecaster")


def survival(forecasters: Mapping[str, Forecaster], tested: Examples) -> pd.DataFrame:
    """Return how often devices remained online, by the survival that was forecast.

    Args:
        forecasters: fitted ones, by name; at least one.
        tested: examples; those of devices offline are left out.

    Returns:
        Columns forecaster, horizon_s, predicted, observed, n; ten bins each, NaN where one is
        empty.
    """
    online = tested.observed.online
    parts = []
    for name, forecaster in forecasters.items():
        predicted = forecaster.forecast(tested.observed).survival[online]
        for horizon in SURVIVAL_S:
            k = int(np.flatnonzero(horizon == HORIZONS_S)[0])
            curve = reliability(predicted[:, k], tested.survival[online, k])
            parts.append(curve.assign(forecaster=name, horizon_s=horizon))
    columns = ["forecaster", "horizon_s", "predicted", "observed", "n"]
    return pd.concat(parts, ignore_index=True)[columns]


def fan(
    forecasters: Mapping[str, Forecaster],
    observer: TraceObserver,
    tested: Examples,
    until: float,
) -> pd.DataFrame:
    """Return the history of one device, its forecasts, and what it then did.

    The origin is the middle one of those at which the device is online and the longest horizon ends
    in time: picked by its place in the test, not by its values.

    Args:
        forecasters: fitted ones, by name; those that read the future are left out.
        observer: of the devices' traces.
        tested: examples to pick from, in order of time.
        until: instant in s before which the longest horizon must end.

    Returns:
        Columns device_id, now, forecaster, channel, offset_s, actual, and the quantiles q10, q50
        and q90. Up to an offset of 0, `actual` is the mean rate over the five minutes before, and
        there is no forecaster; beyond 0, everything is the mean rate from now to the offset. No
        rows if no origin will do.
    """
    quantiles = [f"q{100 * level:.0f}" for level in LEVELS]
    columns = ["device_id", "now", "forecaster", "channel", "offset_s", "actual", *quantiles]
    origins = tested.observed
    ends = origins.now + RATE_HORIZONS_S[-1] <= until
    able = np.flatnonzero(ends & origins.online & (origins.now >= PAST_S))
    if able.size == 0:
        return pd.DataFrame(columns=columns)
    middle = able[able.size // 2]
    device, now = origins.devices[middle : middle + 1], float(origins.now[middle])
    here = examples_at(observer, device, now, until=until)
    start = now - np.arange(PAST_S, 0.0, -_STEP_S)
    parts = []
    for c, channel in enumerate(RATES):
        series = getattr(observer.traces, channel)
        if series is None:
            continue
        before: Array = series.integral(np.repeat(device, start.size), start, start + _STEP_S)
        history = {"offset_s": start + _STEP_S - now, "actual": before / _STEP_S}
        parts.append(pd.DataFrame(history).assign(forecaster="", channel=channel))
        for name, forecaster in forecasters.items():
            if forecaster.reads_the_future:
                continue
            ahead = pd.DataFrame(forecaster.forecast(here.observed).rates[0, c], columns=quantiles)
            ahead = ahead.assign(offset_s=RATE_HORIZONS_S, actual=here.rates[0, c])
            parts.append(ahead.assign(forecaster=name, channel=channel))
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    about = {"device_id": observer.traces.device_ids[device[0]], "now": now}
    return table.assign(**about).reindex(columns=columns)
