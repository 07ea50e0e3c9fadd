"""Is forecasting worth it, and is an LSTM: on recorded devices that no forecaster learnt from.

Three fleets are made of published recordings and share no phone, no host and no link: one to learn
from, one to stop early and to calibrate on, one to test on. The first two are used for their first
30 hours, the third from there to its 48th hour, with the load of other days. Links alone are
tested on whole sessions of the test fleet as they were recorded, and on links of another study.

Run it with: python benchmarks/forecasting.py RECORDINGS [--quick]
With --ship it only trains the embedded forecaster. With --rules, --bound, --calibration or --speed
it measures only that, of simple forecasters fitted again and of the embedded one. Speeds are of one
core: run that with OMP_NUM_THREADS=1.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from recorded_fleets import DAY_S, LENGTH_S, fleets, sessions_of
from results_file import write_result

from fedstale.traces import Availability, Job, TraceSet
from fedstale.traces.arrays import Index
from fedstale.traces.forecast import (
    KINDS,
    LSTM,
    Examples,
    Forecaster,
    JobForecast,
    Observation,
    Oracle,
    TraceObserver,
    draw,
    embedded,
    examples_at,
)
from fedstale.traces.forecast.evaluation import (
    SHOWN,
    by_horizon,
    decision,
    job_tables,
    process_tables,
    rolling,
    wide,
)
from fedstale.traces.forecast.evaluation.jobs import most_reliable
from fedstale.traces.forecast.survival import survival_at

TURN_S = 30 * 3600.0
JOBS = {
    "short": Job(work=300.0, download_bytes=5_000_000, upload_bytes=5_000_000, ttl_s=1800.0),
    "long": Job(work=1200.0, download_bytes=5_000_000, upload_bytes=5_000_000, ttl_s=7200.0),
}
SHIPPED = Path(__file__).parent.parent / "traces" / "forecast"


def trained(
    learn: Examples, stop: Examples, seeds: range, *, left_out: tuple[str, ...] = ()
) -> dict[str, list[Forecaster]]:
    """Return forecasters of every kind; learnt ones that depend on a seed once for each seed."""
    made: dict[str, list[Forecaster]] = {}
    for kind, which in KINDS.items():
        if which.reads_the_future or kind in left_out:
            continue
        started = time.perf_counter()
        made[kind] = [
            which().fit(learn, stop, seed=seed) for seed in (seeds if kind == "lstm" else (0,))
        ]
        print(f"{kind}: trained in {time.perf_counter() - started:.0f} s", flush=True)
    return made


def fleet_tables(
    forecasters: Mapping[str, Forecaster],
    parts: Mapping[str, TraceSet],
    learn: Examples,
    stop: Examples,
    *,
    step_s: float,
    seed: int,
) -> dict[str, pd.DataFrame]:
    """Return all tables on the composed fleet."""
    test, everyone = parts["test"], np.arange(parts["test"].n_devices)
    observer = TraceObserver(test)
    tested = rolling(observer, everyone, start=TURN_S, until=LENGTH_S, step_s=step_s, seed=seed)
    fitted = {**forecasters, "oracle": Oracle(test)}
    tables = process_tables(fitted, observer, tested, LENGTH_S, learn)
    for size, job in JOBS.items():
        found = job_tables(
            fitted,
            observer,
            tested.observed,
            LENGTH_S,
            job,
            held_out=(parts["stop"], stop.observed, TURN_S),
            devices=everyone,
            k=10,
            seed=seed,
        )
        tables |= {f"{name}, {size} job": table for name, table in found.items()}
    return tables


def recording_table(
    forecasters: Mapping[str, Forecaster], traces: TraceSet, learn: Examples, *, step_s: float
) -> pd.DataFrame:
    """Return the scores on recordings as they are, from their beginnings to their ends."""
    observer = TraceObserver(traces)
    ends = np.max([c.lengths[c.rows] for c in (traces.compute, traces.downlink) if c], axis=0)
    devices = np.repeat(np.arange(traces.n_devices), (ends // step_s).astype(np.int64))
    first = np.flatnonzero(np.diff(devices, prepend=-1))
    now = (np.arange(devices.size) - np.repeat(first, np.diff(first, append=devices.size))) * step_s
    tested = examples_at(observer, devices, now, until=ends[devices])
    return by_horizon(dict(forecasters), tested, learn)


def speeds(forecasters: Mapping[str, Forecaster], n: int) -> list[dict[str, Any]]:
    """Return how many forecasts a second of processor time each makes, and how long one takes."""
    traces, job = TraceSet.synthetic(n, days=2, seed=0), JOBS["short"]
    observer, everyone = TraceObserver(traces), np.arange(n)
    observed, one = observer.at(everyone, 1.5 * DAY_S), observer.at([0], 1.5 * DAY_S)
    observing = n / min(_seconds(3, lambda: observer.at(everyone, 1.5 * DAY_S)))
    rows = []
    for name, forecaster in forecasters.items():
        forecaster.forecast_job(observed.take(np.arange(min(n, 2000))), job)
        some = observed.take(np.arange(min(n, 4000))) if name == "boosting" else observed
        forecast = forecaster.forecast(some)
        processes = min(_seconds(5, partial(forecaster.forecast, some)))
        times = min(_seconds(5, partial(forecast.of_job, job)))
        rows.append(
            {
                "forecaster": name,
                "table": "speed",
                "processes_per_s": len(some) / processes,
                "jobs_per_s": len(some) / (processes + times),
                "observations_per_s": observing,
                "one_device_ms": 1e3
                * np.median(_seconds(50, partial(forecaster.forecast_job, one, job))),
            }
        )
    return rows


def _seconds(times: int, call: Callable[[], object]) -> list[float]:
    """Return how long a call takes, each time, in s of a processor that others may share."""
    taken = []
    for _ in range(times):
        started = time.process_time()
        call()
        taken.append(time.process_time() - started)
    return taken


def rules(
    forecasters: Mapping[str, Forecaster], test: TraceSet, *, step_s: float
) -> list[dict[str, Any]]:
    """Return the decision table by both rules, on one moment drawn in each step."""
    instants = np.arange(TURN_S, LENGTH_S, step_s)
    instants += np.random.default_rng(1).random(instants.size) * step_s
    fitted = {**forecasters, "oracle": Oracle(test)}
    rows = []
    for size, job in JOBS.items():
        when = instants[instants + float(np.max(job.ttl_s)) <= LENGTH_S]
        for rule, order in (("chance", most_reliable), ("cost", least_loss)):
            table = decision(
                fitted,
                TraceObserver(test),
                np.arange(test.n_devices),
                when,
                job,
                k=10,
                seed=0,
                order=order,
            )
            rows += [{"table": f"{rule}, {size} job", **row} for row in table.to_dict("records")]
    return rows


def least_loss(forecast: JobForecast) -> Index:
    """Return the devices by the expected loss of device-seconds for each report, least first.

    That is (1 - p) / p times the median of the total time.
    """
    p = np.maximum(forecast.p_finish, 1e-3)
    return np.argsort((1.0 - p) / p * forecast.total_s[:, 1], kind="stable")


class TrueTimes(Oracle):
    """Knows how long a job takes, and of survival what another forecaster does: an upper bound."""

    def __init__(self, traces: TraceSet, other: Forecaster) -> None:
        always = Availability.always(traces.n_devices)
        super().__init__(replace(traces, availability=always))
        self.other = other

    def forecast_job(self, observed: Observation, job: Job) -> JobForecast:
        """Return the true times, and the survival as long as that."""
        forecast = super().forecast_job(observed, replace(job, ttl_s=np.inf))
        total = forecast.total_s[:, 1]
        survival = np.ascontiguousarray(self.other.forecast(observed).survival.T)
        p = survival_at(survival, total[None])[0] * (total <= np.asarray(job.ttl_s))
        return replace(forecast, p_finish=p)


def bounds(
    forecasters: Mapping[str, Forecaster], stop: TraceSet, *, step_s: float
) -> list[dict[str, Any]]:
    """Return what knowing all times would be worth, on the second fleet, which is not tested on."""
    compared = {name: forecasters[name] for name in ("last-value", "lstm")}
    knowing = {f"true times, {name}": TrueTimes(stop, f) for name, f in compared.items()}
    rows = []
    for size, job in JOBS.items():
        last = TURN_S - float(np.max(job.ttl_s))
        table = decision(
            {**compared, **knowing, "oracle": Oracle(stop)},
            TraceObserver(stop),
            np.arange(stop.n_devices),
            np.arange(TURN_S - DAY_S, last, step_s),
            job,
            k=10,
            seed=0,
            order=least_loss,
        )
        rows += [{"table": f"bound, {size} job", **row} for row in table.to_dict("records")]
    return rows


def calibrations(
    forecasters: Mapping[str, Forecaster],
    parts: Mapping[str, TraceSet],
    stop: Examples,
    *,
    step_s: float,
) -> list[dict[str, Any]]:
    """Return the scores of jobs on the test fleet, as forecast and as corrected by outcomes."""
    test = parts["test"]
    observer, everyone = TraceObserver(test), np.arange(test.n_devices)
    tested = rolling(observer, everyone, start=TURN_S, until=LENGTH_S, step_s=step_s, seed=0)
    rows = []
    for size, job in JOBS.items():
        tables = job_tables(
            forecasters,
            observer,
            tested.observed,
            LENGTH_S,
            job,
            held_out=(parts["stop"], stop.observed, TURN_S),
            devices=everyone,
            k=10,
            seed=0,
        )
        rows += [{"table": f"jobs, {size} job", **row} for row in tables["jobs"].to_dict("records")]
    return rows


def ship(learn: Examples, stop: Examples, command: str) -> None:
    """Train the embedded forecaster, and write it to its place."""
    made = LSTM().fit(learn, stop, seed=0, progress=_say)
    about = {
        "recordings": "FLASH, AI Benchmark, PlanetLab, 5G production dataset (Download)",
        "command": command,
        "examples": len(learn),
        "seed": 0,
    }
    made.save(SHIPPED, about)


def _say(epoch: int, loss: float, tested: float) -> None:
    print(f"epoch {epoch}: {loss:.4f}, on the second fleet {tested:.4f}", flush=True)


def rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with five digits of each number: more would suggest that they are known."""
    return {
        k: (None if np.isnan(v) else float(f"{v:.5g}")) if isinstance(v, float) else v
        for k, v in row.items()
    }


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--quick", action="store_true", help="few examples, no boosting")
    parser.add_argument("--ship", action="store_true", help="only train and write the embedded one")
    parser.add_argument("--rules", action="store_true", help="only compare rules of selection")
    parser.add_argument("--calibration", action="store_true", help="only correct intervals")
    parser.add_argument("--bound", action="store_true", help="only measure true times")
    parser.add_argument("--speed", action="store_true", help="only measure speed")
    options = parser.parse_args()
    n, step_s = (4_000, 3600.0) if options.quick else (40_000, 900.0)
    seeds = range(1) if options.quick else range(5)
    parts = fleets(options.recordings, seed=0)
    learn, stop = (
        draw(
            TraceObserver(parts[name]),
            np.arange(parts[name].n_devices),
            start=0.0,
            until=TURN_S,
            n=size,
            seed=seed,
            short_history=0.2,
        )
        for name, size, seed in (("learn", n, 1), ("stop", n // 4, 2))
    )
    if options.ship:
        ship(
            learn,
            stop,
            "python benchmarks/forecasting.py RECORDINGS --ship" + " --quick" * options.quick,
        )
        return
    if options.rules or options.bound or options.speed or options.calibration:
        left_out = ("lstm",) if options.speed and not options.quick else ("lstm", "boosting")
        simple = trained(learn, stop, seeds, left_out=left_out)
        fitted = {kind: each[0] for kind, each in simple.items()} | {"lstm": embedded()}
        if options.rules:
            name, rows = "rules", rules(fitted, parts["test"], step_s=step_s)
        elif options.bound:
            name, rows = "bound", bounds(fitted, parts["stop"], step_s=step_s)
        elif options.calibration:
            name, rows = "calibration", calibrations(fitted, parts, stop, step_s=step_s)
        else:
            name, rows = "speed", speeds(fitted, 10_000 if options.quick else 100_000)
        print(pd.DataFrame(rows).to_string())
        command = f"python benchmarks/forecasting.py RECORDINGS --{name}"
        command += " --quick" * options.quick
        print(write_result(f"forecasting_{name}", [rounded(row) for row in rows], command=command))
        return
    made = trained(learn, stop, seeds, left_out=("boosting",) if options.quick else ())
    first = {kind: each[0] for kind, each in made.items()}
    tables = fleet_tables(first, parts, learn, stop, step_s=step_s, seed=0)
    links = TraceSet.read(options.recordings / "uccmisl-5g.zip")
    alone = {
        "links as recorded": recording_table(
            first, links.take(sessions_of("test", links, 0)), learn, step_s=30.0
        ),
        "links of another study": recording_table(
            first, TraceSet.read(options.recordings / "mahimahi"), learn, step_s=10.0
        ),
    }
    rows = [
        {"table": name, **row}
        for name, table in (tables | alone).items()
        for row in table.to_dict("records")
    ]
    for seed, lstm in zip(seeds, made["lstm"], strict=True):
        again = fleet_tables(
            {"lstm": lstm, "last-value": first["last-value"]},
            parts,
            learn,
            stop,
            step_s=step_s,
            seed=0,
        )
        for name in ("horizons", "decision, short job", "decision, long job"):
            table = again[name]
            if name == "horizons":
                table = table[table["metric"].eq("brier") & table["quantity"].eq("online")]
            rows += [
                {"table": f"{name} by seed", "seed": seed, **row}
                for row in table[table["forecaster"].eq("lstm")].to_dict("records")
            ]
    for name, table in (tables | alone).items():
        shown = name.split(",")[0]
        shown = wide(shown if shown in SHOWN else "horizons", table)
        print(f"\n{name}\n\n{shown.to_string(float_format=lambda x: f'{x:.3f}')}")
    command = "python benchmarks/forecasting.py RECORDINGS" + " --quick" * options.quick
    print(write_result("forecasting", [rounded(row) for row in rows], command=command))


if __name__ == "__main__":
    main()
