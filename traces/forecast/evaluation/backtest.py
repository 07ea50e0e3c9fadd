"""Rolling-origin backtest: forecasts at many instants, against what then happened.

Tables are long: one row a forecaster, quantity, horizon and metric, with an interval from
resampling devices.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from fedstale.errors import ConfigError, TraceError
from fedstale.traces import Array, Availability, Index, Job, Status, TraceSet
from fedstale.traces.forecast.base import FILES, Forecaster, forecaster_class, forecaster_folder
from fedstale.traces.forecast.baselines import Persistence
from fedstale.traces.forecast.dataset import (
    Examples,
    draw_parts,
    examples_at,
    log_spans,
    split,
)
from fedstale.traces.forecast.evaluation import scores
from fedstale.traces.forecast.evaluation.verdict import against_persistence
from fedstale.traces.forecast.observation import (
    RATE_HORIZONS_S,
    RATES,
    Observation,
    TraceObserver,
)
from fedstale.traces.forecast.sessions import HORIZONS_S
from fedstale.traces.forecast.survival import PHASES, DeviceForecast, JobForecast

Watch = Callable[[str, int, int], None]
"""Called with what comes next, how many parts of a backtest are done, and how many there are."""
_COLUMNS = ["forecaster", "quantity", "horizon_s", "metric", "value", "low", "high", "n"]
_SPANS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))
_PRINTED = {
    "horizons": {
        "skill": "Brier skill of remaining as now and of being online; 1 is perfect, 0 the mere "
        "share",
        "pinball": "Pinball loss of the logarithms of rates; less is better",
    },
    "jobs": {
        "finish": "Probability to finish the job by its deadline",
        "training_s": "Time to train; pinball loss of the logarithm, coverage of 80 % intervals",
        "reporting_s": "Time to upload",
        "total_s": "Whole time of the job, if nothing interrupts",
    },
}
_BY = {"horizons": "metric", "jobs": "quantity"}


def backtested(
    traces: TraceSet,
    kinds: Sequence[str],
    trained: Sequence[str | Path],
    job: Job,
    *,
    step_s: float,
    examples: int,
    seed: int,
    all_devices: bool = False,
    watch: Watch | None = None,
) -> dict[str, pd.DataFrame]:
    """Test forecasters on the testing part of traces, or on all devices.

    Args:
        traces: the devices; without all four channels there are no tables of the job.
        kinds: forecasters to fit on the learning part and test.
        trained: forecasters to test, as `forecaster_folder` takes them.
        job: what is sent; its deadline must be finite.
        step_s: time between origins.
        examples: number of examples to fit on.
        seed: of everything.
        all_devices: test on every device, none of which the trained ones have learnt from; the
            fitted ones still learn from most of them, before the hours that are tested.
        watch: is told what comes next.

    Returns:
        Tables verdict, horizons, jobs and reliability; see `against_persistence`, `by_horizon`,
        `job_scores` and `scores.reliability`.

    Raises:
        ConfigError: nothing is to be tested, or a trained one used another split of these traces.
    """
    has_jobs = len(traces.known) == 4
    # Drawing, then fits, the tables of processes, and for each forecaster its jobs.
    done, total = 0, 1 + len(kinds) + 1 + (len(kinds) + len(trained)) * has_jobs

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
    begin("scores by horizon")
    observer = TraceObserver(traces)
    tested = rolling(observer, devices, start=parts.turn, until=parts.end, step_s=step_s, seed=seed)
    usual, least = Persistence().fit(training, held_out, seed=seed), scores.least_rates(training)
    tables = {
        "verdict": against_persistence(fitted, tested, usual, least),
        "horizons": by_horizon(fitted, tested, least),
    }
    if not has_jobs:
        return tables
    sent = tested.observed.take(tested.observed.online)
    times = true_times(traces, sent, job, parts.end)
    finished = finishes(traces, sent, job, parts.end)
    found, curves = [], []
    for name, forecaster in fitted.items():
        begin(f"jobs, {name}")
        forecast = forecaster.forecast_job(sent, job)
        found.append(job_scores(name, forecast, sent, times, finished))
        curves.append(scores.reliability(forecast.p_finish, finished).assign(forecaster=name))
    return tables | {"jobs": pd.concat(found), "reliability": pd.concat(curves)}


def rolling(
    observer: TraceObserver,
    devices: Index,
    *,
    start: float,
    until: float,
    step_s: float,
    seed: int,
    most: int = 200,
) -> Examples:
    """Draw examples at one origin in each step: the devices online then, and as many offline.

    Where in its step an origin lies is drawn, lest every origin fall on a change of records that
    have a step of their own.

    Args:
        observer: of the devices' traces.
        devices: positions to test on.
        start: first origin in s.
        until: instant in s before which origins and labels lie.
        step_s: time between origins.
        seed: of the draw among devices.
        most: at most this many devices online, and as many offline, at each origin.

    Returns:
        Examples in order of time.

    Raises:
        TraceError: no origin lies in the part.
    """
    rng = np.random.default_rng(seed)
    drawn: list[Index] = []
    when: list[Array] = []
    availability = observer.traces.availability
    which, begins, ends = log_spans(observer.traces, devices)
    grid = np.arange(start, until, step_s)
    for now in np.minimum(grid + step_s * rng.random(grid.size), np.nextafter(until, 0.0)):
        recorded = devices[which[(begins <= now) & (now < ends)]]
        if availability is None:
            chosen = _some(recorded, most, rng)
        else:
            is_online = availability.is_available(recorded, now)
            online = _some(recorded[is_online], most, rng)
            offline = _some(recorded[~is_online], max(online.size, 1), rng)
            chosen = np.concatenate([online, offline])
        drawn.append(np.sort(chosen))
        when.append(np.full(chosen.size, now))
    if sum(d.size for d in drawn) == 0:
        raise TraceError(f"no origin to test on in [{start}, {until}) s every {step_s} s")
    return examples_at(observer, np.concatenate(drawn), np.concatenate(when), until=until)


def _some(devices: Index, most: int, rng: np.random.Generator) -> Index:
    if devices.size <= most:
        return devices
    return rng.choice(devices, most, replace=False)


def by_horizon(
    forecasters: Mapping[str, Forecaster], tested: Examples, least: Array
) -> pd.DataFrame:
    """Score forecasters on the horizon grid.

    Args:
        forecasters: fitted ones, by the name in the table.
        tested: examples at rolling origins.
        least: from `scores.least_rates`.

    Returns:
        Columns forecaster, quantity, horizon_s, metric, value, low, high, n.
    """
    rows: list[tuple[object, ...]] = []
    for name, forecaster in forecasters.items():
        forecast = forecaster.forecast(tested.observed)
        rows += _chances(name, forecast, tested)
        rows += _rates(name, forecast, tested, least)
    return pd.DataFrame(rows, columns=_COLUMNS)


def _chances(name: str, forecast: DeviceForecast, tested: Examples) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    online, block = tested.observed.online, scores.blocks(tested.observed)
    for quantity, chosen, chances, outcomes in (
        ("online", online, forecast.survival, tested.survival),
        ("offline", ~online, forecast.survival, tested.survival),
        ("available", np.ones(online.size, dtype=bool), forecast.available, tested.available),
    ):
        for k, horizon in enumerate(HORIZONS_S):
            p, happened = chances[chosen, k], outcomes[chosen, k]
            known = int(np.count_nonzero(~np.isnan(happened)))
            if known == 0:
                continue
            head = (name, quantity, float(horizon))
            rows += scores.scored(head, {"brier": scores.brier(p, happened)}, block[chosen], known)
            for metric, value in (
                ("skill", scores.skill(p, happened)),
                ("ece", scores.calibration_error(p, happened)),
            ):
                rows.append((*head, metric, value, np.nan, np.nan, known))
    return rows


def _rates(
    name: str, forecast: DeviceForecast, tested: Examples, least: Array
) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    truth, predicted = scores.logs(tested.rates, least), scores.logs(forecast.rates, least)
    block = scores.blocks(tested.observed)
    for c, channel in enumerate(RATES):
        for k, horizon in enumerate(RATE_HORIZONS_S):
            y, q = truth[:, c, k], predicted[:, c, k]
            known = int(np.count_nonzero(~np.isnan(y)))
            if known:
                metrics = {"pinball": scores.pinball(q, y), "coverage": scores.covered(q, y)}
                rows += scores.scored((name, channel, float(horizon)), metrics, block, known)
    return rows


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


def finishes(traces: TraceSet, origins: Observation, job: Job, until: float) -> Array:
    """Score jobs sent to devices online: 1 if reported in time, 0 if not, else NaN.

    NaN are devices that are offline, and jobs whose deadline lies beyond the part or the log.
    """
    outcome = traces.trips(origins.devices, origins.now, job)
    known = np.minimum(traces.log_at(origins.devices, origins.now)[1], until)
    tried = origins.online & (origins.now + np.asarray(job.ttl_s) <= known)
    return np.where(tried, outcome.status == Status.REPORTED, np.nan)


def job_scores(
    name: str, forecast: JobForecast, origins: Observation, times: Array, finished: Array
) -> pd.DataFrame:
    """Score the forecasts of one job.

    Args:
        name: of the forecaster.
        forecast: at the origins.
        origins: devices and instants.
        times: what the times were, in s, NaN where unknown; shape (n, 3).
        finished: 1 where the job was reported in time, 0 where not, NaN where it was not tried;
            shape (n,).

    Returns:
        Columns forecaster, quantity, metric, value, low, high, n. Times are in s, their pinball
        loss is of logarithms.
    """
    rows: list[tuple[object, ...]] = []
    block = scores.blocks(origins)
    for p, phase in enumerate(PHASES):
        y, q = times[:, p], forecast.times_s[:, p]
        log_y, log_q = (np.log(np.maximum(x, 1e-6)) for x in (y, q))
        metrics = {"pinball": scores.pinball(log_q, log_y), "coverage": scores.covered(q, y)}
        known = int(np.isfinite(y).sum())
        # One forecast of never, 1e9 s, is the mean of all errors; it does not move the median.
        middle = float(np.nanmedian(np.abs(y - q[:, 1]))) if known else np.nan
        rows.append((name, phase, "median_error_s", middle, np.nan, np.nan, known))
        rows += scores.scored((name, phase), metrics, block, known)
    tried = int(np.isfinite(finished).sum())
    metrics = {"brier": scores.brier(forecast.p_finish, finished)}
    rows += scores.scored((name, "finish"), metrics, block, tried)
    own = scores.skill(forecast.p_finish, finished)
    rows.append((name, "finish", "skill", own, np.nan, np.nan, tried))
    return pd.DataFrame(rows, columns=[name for name in _COLUMNS if name != "horizon_s"])


def printed(tables: Mapping[str, pd.DataFrame]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Lay tables of a backtest out for a terminal, with their titles.

    Args:
        tables: from `backtested`; what there is no value for is in none.
    """
    if len(tables["verdict"]):
        title = "Share of persistence's loss; less is better"
        yield title, tables["verdict"].set_index("forecaster")
    for name in _BY:
        if name not in tables:
            continue
        table = tables[name].dropna(subset="value")
        rows, columns = ["forecaster"], "metric"
        if name == "horizons":
            rows, columns = ["quantity", "forecaster"], "horizon_s"
        for value, title in _PRINTED[name].items():
            part = table[table[_BY[name]].eq(value)]
            if len(part):
                found = part.pivot(index=rows, columns=columns, values="value")
                yield title, found.rename(columns=span_text if name == "horizons" else str)
    if "reliability" in tables and (some := tables["reliability"]["n"] > 0).any():
        counted = tables["reliability"][some].astype({"n": np.int64})
        yield "Reliability of the probability to finish", counted.set_index("forecaster")


def span_text(span_s: float) -> str:
    """Write a span in a unit that divides it.

    Example:
        >>> span_text(10.0), span_text(1800.0), span_text(86_400.0)
        ('10 s', '30 min', '24 h')
    """
    unit, size = next((u, s) for s, u in _SPANS if span_s % s == 0 or s == 1.0)
    return f"{span_s / size:g} {unit}"
