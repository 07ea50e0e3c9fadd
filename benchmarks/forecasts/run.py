"""Is forecasting worth it, and is an LSTM: on recorded devices that no forecaster learnt from.

Three fleets are made of published recordings (`lab.fleets`), each in three parts without a
device, a host or a link in common: one to learn from, one to stop early and to calibrate on, one to
test on, which for desktops and cars is later, too. A seed divides them anew. Chances are tested at
instants drawn at random over the logs; jobs at rolling origins. Links are tested on the test part's
and on those of another study.

Run it with: python benchmarks/forecasts/run.py RECORDINGS [--quick]
With --ship it only trains the forecasters that come with fedstale, with --speed it only measures
how many forecasts they make; run that with OMP_NUM_THREADS=1.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedstale.traces import Job, TraceSet
from fedstale.traces.arrays import Array
from fedstale.traces.forecast import (
    KINDS,
    LSTM,
    Examples,
    FleetStatistics,
    Forecaster,
    TraceObserver,
    draw,
    embedded,
    log_spans,
)
from fedstale.traces.forecast.backtest import least_rates, rolling
from fedstale.traces.forecast.base import FLEETS
from fedstale.traces.forecast.lstm import SESSIONS
from fedstale.traces.forecast.observation import RATES
from fedstale.traces.forecast.sessions import HORIZONS_S

sys.path.append(str(Path(__file__).parents[1]))
from forecasts.compared import Boosting
from forecasts.horizons import by_horizon, mean_with_interval
from forecasts.jobs import corrected_scores
from lab.fleets import ASSUMED, fleets, span
from lab.kept import Kept
from lab.results import write_result

FLEETS_TESTED = ("phones", "desktops", "cars")
JOBS = {
    "short": Job(work=300.0, download_bytes=5_000_000, upload_bytes=5_000_000, ttl_s=1800.0),
    "long": Job(work=1200.0, download_bytes=5_000_000, upload_bytes=5_000_000, ttl_s=7200.0),
}
SHIPPED = Path(__file__).parents[2] / "traces" / "forecast" / "embedded"
BASELINES = ("persistence", "last-value", "hour", "hour-of-week", "hourly-markov", "ewma")
LEARNT = ("linear", "perceptron", "lstm")
SEEDS = range(5)
"""Divisions of the devices into parts."""
EXAMPLES = {"phones": 40_000, "desktops": 120_000, "cars": 40_000, "mixed": 120_000}
"""Examples to learn from. Desktops were logged for months. More of the few days of phones would be
learnt by heart, and more of cars make stays of a day worse in later months."""
SHORT_HISTORY = 0.2
SHOWN_S = (900.0, 1800.0, 3600.0, 14_400.0, 86_400.0)
"""Horizons of chances that are written, in s."""
KEPT = ["forecaster", "quantity", "horizon_s", "metric", "value"]
"""Columns of scores that are written."""
ORIGINS = 40
"""Instants at which jobs are sent."""


def examples(
    parts: Mapping[str, TraceSet], n: int, seed: int
) -> tuple[Examples, Examples, Examples]:
    """Return n examples to learn from, and fewer to stop early on and to test on.

    Of the devices of the first two, a fifth remembers only a part of its history.
    """
    made, sizes = [], (("learn", n), ("stop", min(n // 4, 10_000)), ("test", min(n // 2, 20_000)))
    for k, (name, size) in enumerate(sizes):
        everyone = np.arange(parts[name].n_devices)
        is_test = name == "test"
        made.append(
            draw(
                TraceObserver(parts[name]),
                everyone,
                start=0.0,
                until=float(log_spans(parts[name], everyone)[2].max()),
                n=size,
                seed=3 * seed + k,
                short_history=0.0 if is_test else SHORT_HISTORY,
                balanced=not is_test,
            )
        )
    return made[0], made[1], made[2]


def fitted(
    learn: Examples,
    stop: Examples,
    kinds: tuple[str, ...],
    seed: int,
    channels: Mapping[str, Forecaster],
) -> dict[str, Forecaster]:
    """Return forecasters by kind.

    Processors and links were recorded once: the networks of channels are learnt with the phones.
    """
    made: dict[str, Forecaster] = {}
    for kind in kinds:
        started = time.process_time()
        new = KINDS[kind]()
        if isinstance(new, LSTM):
            known = channels.get(kind)
            assert known is None or isinstance(known, LSTM)
            made[kind] = with_channels_of(known, new, learn, stop, seed)
        else:
            is_trees = isinstance(new, Boosting)
            made[kind] = new.fit(only_shown_chances(learn) if is_trees else learn, stop, seed=seed)
        print(f"{kind}: fitted in {time.process_time() - started:.0f} s", flush=True)
    return made


def with_channels_of(
    known: LSTM | None, new: LSTM, learn: Examples, stop: Examples, seed: int
) -> LSTM:
    """Fit a forecaster, whose networks of channels are another's if there is one."""
    if known is None:
        return new.fit(learn, stop, seed=seed)
    silent = (replace(each, rates=np.full_like(each.rates, np.nan)) for each in (learn, stop))
    new.fit(*silent, seed=seed)
    new.fleet = FleetStatistics.of(learn)
    new.networks |= {name: w for name, w in known.networks.items() if name != SESSIONS}
    new.spread, new.margins = known.spread, known.margins
    return new


def only_shown_chances(learn: Examples) -> Examples:
    """Return examples of which only the chances are known that are written.

    Trees are grown for each horizon, and would take five times as long as all else.
    """
    is_other = ~np.isin(HORIZONS_S, SHOWN_S)
    return replace(
        learn,
        rates=np.full_like(learn.rates, np.nan),
        survival=np.where(is_other, np.nan, learn.survival),
        available=np.where(is_other, np.nan, learn.available),
    )


def scores(
    forecasters: Mapping[str, Forecaster], tested: Examples, learn: Examples, *, rates: bool
) -> list[dict[str, Any]]:
    """Return the skill and the calibration of chances, and the scores of rates if these count."""
    table = by_horizon(forecasters, tested, least_rates(learn))
    shown = table["metric"].isin(["skill", "ece"]) & table["horizon_s"].isin(SHOWN_S)
    if rates:
        # Trees were grown for chances alone.
        of_rates = table["metric"].isin(["pinball", "coverage"]) & table["quantity"].isin(RATES)
        shown |= of_rates & table["forecaster"].ne("boosting")
    return table.loc[shown, KEPT].to_dict("records")


def differences(
    forecasters: Mapping[str, Forecaster], tested: Examples, against: Sequence[str]
) -> list[dict[str, Any]]:
    """Return by how much the LSTM's Brier score is above another's, with an interval."""
    made = {name: f.forecast(tested.observed) for name, f in forecasters.items()}
    online, rows = tested.observed.online, []
    for other in against:
        for quantity, chosen, field, happened in (
            ("online", online, "survival", tested.survival),
            ("offline", ~online, "survival", tested.survival),
            ("available", np.ones_like(online), "available", tested.available),
        ):
            ours, theirs = (getattr(made[name], field) for name in ("lstm", other))
            gap = (ours - happened) ** 2 - (theirs - happened) ** 2
            for horizon in SHOWN_S:
                worse: Array = gap[:, int(np.searchsorted(HORIZONS_S, horizon))]
                worse = np.where(chosen, worse, np.nan)
                value, low, high = mean_with_interval(worse, tested.observed.devices)
                rows.append(
                    {
                        "forecaster": f"lstm - {other}",
                        "quantity": quantity,
                        "horizon_s": horizon,
                        "metric": "brier difference",
                        "value": value,
                        "low": low,
                        "high": high,
                    }
                )
    return rows


def on_other_links(traces: TraceSet, links: TraceSet, seed: int) -> TraceSet:
    """Return devices whose links are of another study, minutes long and repeated."""
    which = np.random.default_rng(seed).integers(links.n_devices, size=traces.n_devices)
    downlink, uplink = (links.channel(name).take(which) for name in ("downlink", "uplink"))
    return replace(traces, downlink=downlink, uplink=uplink)


def job_rows(
    forecasters: Mapping[str, Forecaster],
    parts: Mapping[str, TraceSet],
    stop: Examples,
    *,
    seed: int,
) -> list[dict[str, Any]]:
    """Return how often intervals of the times of both jobs covered on the test part."""
    test = parts["test"]
    everyone, observer = np.arange(test.n_devices), TraceObserver(test)
    begin, end = 0.25 * span(test), span(test)
    tested = rolling(
        observer, everyone, start=begin, until=end, step_s=(end - begin) / ORIGINS, seed=seed
    )
    held_out = parts["stop"], stop.observed, float(stop.observed.now.max()) + 86_400.0
    rows = []
    for size, job in JOBS.items():
        covered = corrected_scores(forecasters, test, tested.observed, end, job, held_out=held_out)
        covered = covered.loc[covered["metric"].eq("coverage"), [k for k in KEPT if k in covered]]
        rows += [{"job": size} | row for row in covered.to_dict("records")]
    return rows


def speeds(n: int) -> list[dict[str, Any]]:
    """Return how many forecasts a second of processor time the embedded ones make."""
    traces, job = TraceSet.synthetic(n, days=2, seed=0), JOBS["short"]
    observer, everyone = TraceObserver(traces), np.arange(n)
    observed, one = observer.at(everyone, 1.5 * 86_400.0), observer.at([0], 1.5 * 86_400.0)
    observing = n / min(_seconds(3, lambda: observer.at(everyone, 1.5 * 86_400.0)))
    rows = []
    for fleet in FLEETS:
        forecaster = embedded(fleet)
        forecast = forecaster.forecast(observed)
        processes = min(_seconds(3, partial(forecaster.forecast, observed)))
        times = min(_seconds(3, partial(forecast.of_job, job)))
        rows.append(
            {
                "forecaster": fleet,
                "processes_per_s": n / processes,
                "jobs_per_s": n / (processes + times),
                "observations_per_s": observing,
                "one_device_ms": 1e3
                * float(np.median(_seconds(50, lambda f=forecaster: f.forecast(one).of_job(job)))),
                "parameters": sum(a.size for a in forecaster.state_dict().values()),
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


def ship(recordings: Path, most: int, command: str) -> None:
    """Train the embedded forecasters on so many examples at most, and write them."""
    phones: LSTM | None = None
    for fleet in ("phones", "desktops", "cars", "any"):
        kind = "mixed" if fleet == "any" else fleet
        parts = fleets(recordings, 0, kind, assumed=ASSUMED)
        learn, stop, _ = examples(parts, min(most, EXAMPLES[kind]), 0)
        made = with_channels_of(phones, LSTM(), learn, stop, seed=0)
        phones = phones or made
        about = {
            "fleet": kind,
            "recordings": "FLASH (705 phones over days), library desktops (UNC Greensboro), "
            "home-charged cars (Norway), AI Benchmark, PlanetLab, 5G production dataset (Download)",
            "command": command,
            "examples": len(learn),
            "seed": 0,
        }
        made.save(SHIPPED / fleet, about)


def fleet_rows(
    recordings: Path,
    fleet: str,
    *,
    n: int,
    seed: int,
    kinds: tuple[str, ...],
    channels: dict[str, Forecaster],
) -> list[dict[str, Any]]:
    """Return all scores of one fleet, divided by one seed; jobs for the first seed alone.

    Args:
        recordings: folder of the published files.
        fleet: one of `FLEETS_TESTED`.
        n: examples to learn from.
        seed: of the division and of all that is drawn.
        kinds: of forecasters; "lstm" and "perceptron" are among them.
        channels: forecasters whose networks of channels are taken; filled by the first fleet.
    """
    parts = fleets(recordings, seed, fleet, assumed=ASSUMED)
    learn, stop, test = examples(parts, n, seed)
    about = {"fleet": fleet, "seed": seed, "devices": parts["test"].n_devices}
    print(about, flush=True)
    made = fitted(learn, stop, kinds, seed, channels)
    if not channels:
        channels |= made
    found = scores(made, test, learn, rates=fleet == "phones")
    others = [kind for kind in ("perceptron", "boosting") if kind in made]
    found += differences(made, test, others)
    if seed == 0:
        # The one that comes with fedstale learnt from the same parts of all fleets.
        found += scores({"any": embedded("any")}, test, learn, rates=False)
        compared = {kind: made[kind] for kind in ("last-value", "ewma", "lstm")}
        links = TraceSet.read(recordings / "mahimahi")
        other = {**parts, "test": on_other_links(parts["test"], links, seed)}
        found += job_rows(compared, parts, stop, seed=seed)
        for row in job_rows({"lstm": made["lstm"]}, other, stop, seed=seed):
            found.append({**row, "links": "another study"})
    return [{**about, **row} for row in found]


def rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with four digits of each number: more would suggest that they are known."""
    return {
        k: (None if np.isnan(v) else float(f"{v:.4g}")) if isinstance(v, float) else v
        for k, v in row.items()
    }


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--quick", action="store_true", help="few examples, no boosting")
    parser.add_argument(
        "--ship", action="store_true", help="only train and write the embedded ones"
    )
    parser.add_argument("--keep", type=Path, help="file of divisions; not measured again")
    parser.add_argument("--speed", action="store_true", help="only measure speed")
    options = parser.parse_args()
    command = "python benchmarks/forecasts/run.py RECORDINGS"
    most, seeds = (4_000, SEEDS[:1]) if options.quick else (max(EXAMPLES.values()), SEEDS)
    if options.ship:
        ship(options.recordings, most, command + " --ship" + " --quick" * options.quick)
        return
    if options.speed:
        rows = speeds(10_000 if options.quick else 100_000)
        print(pd.DataFrame(rows).to_string())
        rows, command = [*map(rounded, rows)], f"{command} --speed"
        print(write_result("forecasting_speed", rows, command=command, quick=options.quick))
        return
    kinds = (*BASELINES, *LEARNT, *(() if options.quick else ("boosting",)))
    kept, rows = Kept(options.keep), []
    for seed in seeds:
        rows += kept.get(seed, partial(division, options.recordings, seed, most, kinds))
        # What is measured so far is kept, should the rest be interrupted.
        path = write_result("forecasting", rows, command=command, quick=options.quick)
    skills = pd.DataFrame([row for row in rows if row.get("metric") == "skill"])
    for fleet, table in skills.groupby("fleet"):
        wide = table.pivot_table(["value"], ["quantity", "forecaster"], "horizon_s")["value"]
        print(f"\n{fleet}: skill, mean of {len(seeds)} seeds\n")
        print(wide.to_string(float_format="{:.3f}".format))
    print(path)


def division(
    recordings: Path, seed: int, most: int, kinds: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Return all scores of all fleets, divided by one seed, of so many examples at most."""
    channels: dict[str, Forecaster] = {}
    return [
        rounded(row)
        for fleet in FLEETS_TESTED
        for row in fleet_rows(
            recordings,
            fleet,
            n=min(most, EXAMPLES[fleet]),
            seed=seed,
            kinds=kinds,
            channels=channels,
        )
    ]


if __name__ == "__main__":
    main()
