"""The tables of a backtest, from traces or from forecasters that are fitted already.

Two of them are for plots, which reports draw. `survival` holds, for bins of the forecast survival
online, how often devices remained; `fan` holds the history of one device and the quantiles of its
rates, beside the rates that came.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fedstale.errors import ConfigError
from fedstale.traces import Array, Index, Job, TraceSet
from fedstale.traces.forecast.base import FILES, Forecaster, forecaster_class, forecaster_folder
from fedstale.traces.forecast.baselines import Oracle, Persistence
from fedstale.traces.forecast.conformal import Adaptation
from fedstale.traces.forecast.dataset import Examples, draw_parts, examples_at, split
from fedstale.traces.forecast.evaluation import backtest, jobs
from fedstale.traces.forecast.evaluation.backtest import reliability
from fedstale.traces.forecast.evaluation.verdict import against_persistence
from fedstale.traces.forecast.observation import (
    LEVELS,
    RATE_HORIZONS_S,
    RATES,
    Observation,
    TraceObserver,
)
from fedstale.traces.forecast.sessions import HORIZONS_S

TITLES = {
    "verdict": "Share of persistence's loss; less is better",
    "horizons": "By horizon",
    "per_device": "Error of the mean rate over 5 min, as a logarithm: quantiles over devices",
    "cold_start": "Cold start: pinball of rates and Brier of survival, by length of history",
    "jobs": "The job",
    "reliability": "Reliability of the probability to finish",
    "decision": "Picking the most reliable devices",
}
"""Tables by name, and their titles; `survival` and `fan` are for plots alone."""
Watch = Callable[[str, int, int], None]
"""Called with what comes next, how many parts of a backtest are done, and how many there are."""
SURVIVAL_S = (900.0, 3600.0)
"""Horizons whose survival is plotted, in s."""
PAST_S = 7200.0
"""How much of the history a fan shows, in s."""
_STEP_S = 300.0
_SPANS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))
_LONGEST_SAID_S = 86_400.0
"""Longer errors in s have no size: a forecast of never is 1e9 s."""
_COUNTS = {"decision": "rounds", "reliability": "n", "survival": "n", "jobs": "n"}
_WHY_EMPTY = {
    "verdict": "There was nothing that persistence did not foresee.",
    "horizons": "No origin has an outcome that the record still holds.",
    "jobs": "No device was online at an origin that the record holds the outcome of.",
    "reliability": "Of no job is it known whether it was done by its deadline.",
    "survival": "Of no device online is it known how long it stayed.",
    "decision": "No round of the job is over before the record ends.",
    "no choice": "At no instant were twice as many devices online as are picked: take more "
    "devices, or a smaller k.",
    "fan": "At no origin was a device online with two hours of history before it and of record "
    "after it.",
    "per_device": "The traces hold none of compute, downlink and uplink.",
    "cold_start": "No forecaster was tested that does not read the future.",
}
_OF_HORIZONS = {
    "skill": "Brier skill of remaining as now and of being online; 1 is perfect, 0 the mere share",
    "mase": "MASE of rates; less is better, 1 is the error of the last value in training",
}
_OF_JOBS = {
    "finish": "its probability to finish by the deadline",
    "training_s": "its time to train; pinball and width of 80 % intervals are of logarithms",
    "reporting_s": "its time to upload",
    "total_s": "its whole time, if nothing interrupts",
}


def backtested(
    traces: TraceSet,
    kinds: Sequence[str],
    trained: Sequence[str | Path],
    job: Job,
    *,
    step_s: float,
    k: int,
    examples: int,
    seed: int,
    all_devices: bool = False,
    watch: Watch | None = None,
) -> dict[str, pd.DataFrame]:
    """Return the tables of a backtest on the testing part of traces, or on all devices.

    Args:
        traces: the devices; what needs all four channels is left out where some are unknown.
        kinds: forecasters to fit on the learning part and test.
        trained: forecasters to test, as `forecaster_folder` takes them.
        job: what is sent.
        step_s: time between origins.
        k: devices picked in a round of the decision table.
        examples: number of examples to fit on.
        seed: of everything.
        all_devices: test on every device, none of which the trained ones have learnt from; the
            fitted ones still learn from most of them, before the hours that are tested.
        watch: is told what comes next.

    Raises:
        ConfigError: nothing is to be tested, or a trained one used another split of these traces.
    """
    has_jobs = len(traces.known) == 4
    n_tested = len(kinds) + len(trained)
    # Drawing, then fits, the tables of processes, and for each forecaster its jobs; last, rounds.
    done, total = 0, 1 + len(kinds) + 2 + (n_tested + 1) * has_jobs

    def begin(what: str) -> None:
        nonlocal done
        if watch is not None:
            watch(what, done, total)
        done += 1

    begin("drawing examples")
    parts = split(traces, seed=seed)
    devices = np.arange(traces.n_devices) if all_devices else parts.testing
    training, held_out = draw_parts(traces, n=examples, seed=seed)
    fitted: dict[str, Forecaster] = {}
    for kind in kinds:
        begin(f"fitting {kind}")
        if forecaster_class(kind) is Oracle:
            fitted[kind] = Oracle(traces)
        else:
            fitted[kind] = forecaster_class(kind)().fit(training, held_out, seed=seed)
    for name in trained:
        folder = forecaster_folder(name)
        learnt_with = FILES.describe(folder)["provenance"].get("seed", seed)
        if learnt_with != seed and not all_devices:
            raise ConfigError(
                f"{folder}: trained with seed {learnt_with}, tested with {seed}: expected the same "
                "seed, which splits the devices, or --all-devices if it learnt from none of them"
            )
        forecaster = Forecaster.load(folder)
        fitted[f"{forecaster.kind} ({folder.name})"] = forecaster
    if not fitted:
        raise ConfigError("no forecaster: expected kinds, or folders of trained ones")
    observer = TraceObserver(traces)
    begin("scores by horizon and history")
    tested = backtest.rolling(
        observer, devices, start=parts.turn, until=parts.end, step_s=step_s, seed=seed
    )
    persistence = Persistence().fit(training, held_out, seed=seed)
    least = backtest.least_rates(training)
    tables = {"verdict": against_persistence(fitted, tested, persistence, least)}
    tables |= process_tables(fitted, observer, tested, parts.end, training)
    begin("curves")
    tables["survival"] = survival(fitted, tested)
    tables["fan"] = fan(fitted, observer, tested, parts.end)
    if has_jobs:
        tables |= job_tables(
            fitted,
            observer,
            tested.observed,
            parts.end,
            job,
            held_out=(traces, held_out.observed, parts.turn),
            devices=devices,
            k=k,
            seed=seed,
            begin=begin,
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
    begin: Callable[[str], None] | None = None,
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
        begin: is told what comes next.
    """
    begin = begin or (lambda what: None)
    sent = origins.take(origins.online)
    times = jobs.true_times(observer.traces, sent, job, until)
    finished = jobs.finishes(observer.traces, sent, job, until)
    parts, curves = [], []
    for name, forecaster in fitted.items():
        begin(f"jobs, {name}")
        forecast = forecaster.forecast_job(sent, job)
        parts.append(jobs.job_scores(name, forecast, sent, times, finished))
        curves.append(reliability(forecast.p_finish, finished).assign(forecaster=name))
        if forecaster.reads_the_future:
            continue
        traces, alike, end = held_out
        fleet = jobs.calibration_scores(forecaster, traces, alike, job, end)
        for variant, adaptation in (("fleet", Adaptation(step=0.0)), ("own", Adaptation())):
            better = jobs.calibrated(forecast, sent, times, fleet, adaptation)
            parts.append(jobs.job_scores(f"{name} + {variant}", better, sent, times, finished))
    tables = {
        "jobs": pd.concat(parts, ignore_index=True),
        "reliability": pd.concat(curves, ignore_index=True),
    }
    begin("rounds")
    instants = _rounds(sent, until, job)
    if instants.size:
        tables["decision"] = jobs.decision(fitted, observer, devices, instants, job, k=k, seed=seed)
    return tables


def _rounds(sent: Observation, until: float, job: Job) -> Array:
    """Return the origins at which a round of the job is over before the part ends."""
    instants = np.unique(sent.now)
    return instants[instants + float(np.max(np.asarray(job.ttl_s))) <= until]


def printed(tables: Mapping[str, pd.DataFrame]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Return titles and tables for a terminal; what there is no value for is in none.

    Args:
        tables: from `backtested`.
    """
    for name, title in TITLES.items():
        table = tables.get(name)
        if table is None or why_empty(name, tables):
            continue
        if name == "horizons":
            for metric, what in _OF_HORIZONS.items():
                part = table[table["metric"].eq(metric)].dropna(subset="value")
                if len(part):
                    found = part.pivot(
                        index=["quantity", "forecaster"], columns="horizon_s", values="value"
                    )
                    yield f"{title}: {what}", found.rename(columns=span_text)
        elif name == "jobs":
            for quantity, what in _OF_JOBS.items():
                part = table[table["quantity"].eq(quantity) & table["metric"].ne("mae_s")]
                if quantity == "finish":
                    # Corrections of times leave the probability as it is.
                    part = part[~part["forecaster"].str.contains(" + ", regex=False)]
                if part["value"].notna().any():
                    yield f"{title}: {what}", _of_job(part)
        else:
            yield title, _whole(name, table)


def _of_job(part: pd.DataFrame) -> pd.DataFrame:
    """Return the scores of a job's times or chances, a row a forecaster in the order of tests."""
    names, metrics = part["forecaster"].unique(), part["metric"].unique()
    found = part.pivot(index="forecaster", columns="metric", values="value").loc[names, metrics]
    if "median_error_s" in found:
        found["median_error_s"] = found["median_error_s"].map(error_text)
    return found.rename(columns={"median_error_s": "median error"})


def _whole(name: str, table: pd.DataFrame) -> pd.DataFrame:
    """Return a table that is printed as it is, a row a forecaster."""
    if name == "reliability":
        counted = table[table["n"] > 0].astype({"n": np.int64})
        return counted.set_index("forecaster")
    if name == "cold_start":
        found = table.pivot(index="forecaster", columns="history_s")
        return found.rename(columns=lambda x: span_text(x) if isinstance(x, float) else str(x))
    if name == "per_device":
        return table.set_index(["channel", "forecaster"]).sort_index(level=0, sort_remaining=False)
    return table.set_index("forecaster")


def why_empty(name: str, tables: Mapping[str, pd.DataFrame]) -> str:
    """Return why a table of a backtest has no values, in a sentence; nothing if it has some.

    Args:
        name: of the table, as in `TITLES`, or "survival" or "fan".
        tables: from `backtested`.
    """
    table = tables.get(name)
    if table is not None and name in _COUNTS and table[_COUNTS[name]].gt(0).any():
        return ""
    if table is not None and name not in _COUNTS and len(table):
        return ""
    if name in {"jobs", "reliability", "decision"} and "jobs" not in tables:
        return "The traces do not hold all of availability, compute, downlink and uplink."
    if name == "decision" and table is not None:
        name = "no choice"
    return _WHY_EMPTY[name]


def span_text(span_s: float) -> str:
    """Return a span in a unit that divides it.

    Example:
        >>> span_text(10.0), span_text(1800.0), span_text(86_400.0), span_text(0.0)
        ('10 s', '30 min', '24 h', 'none')
    """
    if span_s == 0.0:
        return "none"
    unit, size = next((u, s) for s, u in _SPANS if span_s % s == 0 or s == 1.0)
    return f"{span_s / size:g} {unit}"


def error_text(error_s: float) -> str:
    """Return an error of a time in words; that of a forecast of never has no size.

    Example:
        >>> error_text(12.34), error_text(5400.0), error_text(1e9), error_text(np.nan)
        ('12.3 s', '1.5 h', '> 1 day', '-')
    """
    if not np.isfinite(error_s):
        return "-"
    if error_s > _LONGEST_SAID_S:
        return "> 1 day"
    unit, size = next(((u, s) for s, u in _SPANS[:2] if error_s >= s), ("s", 1.0))
    return f"{error_s / size:.3g} {unit}"


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
