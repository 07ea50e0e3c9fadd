"""What five lies about themselves bring devices, with each selector, and what limits them.

A lie is played before, by the defaults, and after, by what is there where devices are not trusted:
`Validation(loss_from="norm", examples_cap=1.5)`. There are two parts:

alike: forty devices that differ in their chances and their data, and a whole server of 20 versions.
    Device 2i + 1 is the honest twin of device 2i; liars have even numbers.
training: the app digits on recorded phones, as in `agent.training`.

Then the audit of forecasts reads runs of recorded phones whose forecasts are the embedded
forecaster's. Lies in windows of the selection environment, and what else a server can take for a
loss, were measured once, by `benchmarks/liars.py` and `evidence.py` of commit 7cededf; their rows
are in `results/liars_once.json`.

Runs are kept in a file and not repeated:

    OMP_NUM_THREADS=1 python benchmarks/liars/run.py RECORDINGS --keep FILE --jobs 2
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from threadpoolctl import threadpool_limits

import fedstale
from fedstale.agents import AgentSelector
from fedstale.contrib.audit import Probing, audited
from fedstale.simulation import Costs
from fedstale.strategies import FedAvg, StaleStrategy
from fedstale.strategies.schedule import k_sync
from fedstale.strategies.selection import (
    ExpectedUtility,
    Fastest,
    LeastAvailable,
    MostReliable,
    Oort,
    PowerOfChoice,
    Random,
    Selector,
)
from fedstale.strategies.server.checks import Validation
from fedstale.strategies.types import FORECAST_RECORD
from fedstale.traces import TraceSet
from fedstale.traces.arrays import Array, Mask
from fedstale.traces.forecast import embedded

sys.path.append(str(Path(__file__).parents[1]))
from agent.lin_ucb import LinUCB
from agent.training import SEEDS
from lab.apps import opened
from lab.fleets import ASSUMED, fleets
from lab.kept import Kept, play_missing
from lab.results import write_result
from lab.training import (
    FIRST_NODE,
    NO_LIE,
    Liars,
    Lie,
    LyingGrid,
    WindowForecasts,
    curves,
    judged,
    outcome,
    own_jobs,
    train,
)
from lab.training import windows as training_windows

Row = dict[str, Any]
HONEST = "none"
LIES = {
    "chance 1": Lie(chance=1.0),
    "chance 0": Lie(chance=0.0),
    "3 x loss": Lie(loss=3.0),
    "10 x examples": Lie(examples=10.0),
    "third of the duration": Lie(duration=1.0 / 3.0),
}
LOSSES = {
    "loss of 0": Lie(loss=0.0),
    "1.5 x loss": Lie(loss=1.5),
    "10 x loss": Lie(loss=10.0),
}
"""Other lies of loss, played in "alike" alone."""
SAID = {HONEST: NO_LIE, **LIES, **LOSSES}
SHARES = (0.1, 0.3, 0.5)
FEWER = SHARES[:2]
"""Of what is played beside the five lies."""
CAP = 1.5
WHEN = ("before", "after")
NORM_LOSS, NORM_EXAMPLES, NORM_NOISE = 0.553, 0.338, 0.379
"""The norm of an update in an unknown unit, L^a n^b exp(c z) with z standard normal: a fit to 4,962
updates of digits on recorded phones (`benchmarks/results/update_norms.json`)."""
BEFORE = {"loss_from": "stated", "examples_cap": None}
AFTER = {"loss_from": "norm", "examples_cap": CAP}
SCALED, UPDATE_TIMES = "3 x update", 3.0
"""No lie, but what a device can do against `AFTER`."""
CLIPPED = "after, norm_cap 1.5"
SETTINGS: dict[str, Row] = {
    "after": AFTER,
    CLIPPED: {**AFTER, "norm_cap": 1.5},
}
BELIEVERS = ("ExpectedUtility", "Oort", "PowerOfChoice", "agent", "LinUCB")
"""Selectors that use losses; others are the same whatever is taken for a loss."""
ENOUGH, AUDITS = 5, 3

# -- Forty devices alike.

N, PICKED, VERSIONS, DRAWS = 40, 8, 20, 3
SELECTORS: dict[str, Callable[[], Selector]] = {
    "Random": Random,
    "MostReliable": MostReliable,
    "ExpectedUtility": ExpectedUtility,
    "Probing(ExpectedUtility)": lambda: Probing(ExpectedUtility()),
    "Oort": Oort,
    "PowerOfChoice": lambda: PowerOfChoice(20),
    "FedCS": Fastest,
    "LeastAvailable": LeastAvailable,
    "LinUCB": LinUCB,
    "agent": AgentSelector,
}


def alike(run: Row, validation: Row) -> Row:
    """Return the shares of one run of a whole server on devices of which some lie."""
    seed, lie, share = run["seed"], run["lie"], run["share"]
    rng = np.random.default_rng((seed, 5))
    pairs = rng.permutation(N // 2)[: round(share * N)]
    lies = np.isin(np.arange(N), 2 * pairs)
    twins = {key: np.repeat(values, 2) for key, values in _drawn(rng, N // 2).items()}
    traces = TraceSet.constant(N, compute=1.0, downlink_bit_per_s=1e9, uplink_bit_per_s=1e9)
    costs = Costs(work_per_example=1.0, epochs=1, examples=50, model_bytes=1000)
    scales = lies & (lie == SCALED)
    liars = Liars(who=lies, lie=SAID.get(lie, NO_LIE))
    grid = LyingGrid(traces, _client(twins, scales), liars=liars, costs=costs, seed=seed)
    checks = Validation(**validation)
    strategy = FedAvg(PICKED, selector=SELECTORS[run["selector"]](), seed=seed, validation=checks)
    with grid.running():
        strategy.start(grid, ArrayRecord([np.zeros(8)]), num_rounds=VERSIONS, timeout=900.0)
    jobs = grid.events().to_pandas()
    device = jobs["node_id"].to_numpy() - FIRST_NODE
    got, of_twins = lies[device].sum(), np.isin(device, 2 * pairs + 1).sum()
    return {
        "got": got / device.size,
        "fair": float(lies.mean()),
        "of_both": float(got / max(got + of_twins, 1)),
        "finished": float((jobs["status"] == "reported").mean()),
    }


def _drawn(rng: np.random.Generator, n: int) -> dict[str, Array]:
    return {
        "p": rng.uniform(0.6, 0.95, n),
        "hard": np.exp(0.3 * rng.standard_normal(n)),
        "examples": np.rint(50.0 * np.exp(0.3 * rng.standard_normal(n))),
    }


def _client(known: dict[str, Array], scales: Mask) -> ClientApp:
    """Return clients that fail by chance, and move further the larger their loss is."""
    app = ClientApp()

    @app.train()
    def train_model(message: Message, context: Any) -> Message:
        device = int(context.node_config["partition-id"])
        version = int(message.content["config"]["server-round"])
        rng = np.random.default_rng((device, version))
        if rng.random() >= known["p"][device]:
            raise RuntimeError("lost")
        examples = known["examples"][device]
        loss = (0.1 + 2.3 * np.exp(-version / 7.0)) * known["hard"][device]
        loss = float(loss * np.exp(0.3 * rng.standard_normal()))
        norm = float(
            loss**NORM_LOSS * examples**NORM_EXAMPLES * np.exp(NORM_NOISE * rng.standard_normal())
        )
        step = rng.standard_normal(8)
        norm *= UPDATE_TIMES if scales[device] else 1.0
        arrays = [x + 0.01 * norm * step / np.linalg.norm(step) for x in _arrays(message)]
        metrics = {"train_loss": loss, "num-examples": int(examples)}
        chance = float(known["p"][device])
        forecast = {"p_finish": chance, "duration_s": 50.0, "p_available": 0.9}
        content = RecordDict(
            {
                "arrays": ArrayRecord(arrays),
                "metrics": MetricRecord(metrics),
                FORECAST_RECORD: ConfigRecord(forecast),
            }
        )
        return Message(content, reply_to=message)

    return app


def _arrays(message: Message) -> list[Array]:
    return message.content.array_records["arrays"].to_numpy_ndarrays()


# -- Real training of digits.

SKEW, TARGET, CONCURRENCY = 0.3, 0.79, 4


def training(run: Row, recordings: Path, validation: Row) -> Row:
    """Return what one run of digits needed to its target."""
    name, seed, app = run["selector"], run["seed"], opened("digits")
    window, told = _training_window(recordings, seed)
    make = (lambda: PowerOfChoice(8)) if name == "PowerOfChoice" else SELECTORS[name]

    def strategy(selector: Selector, seed: int) -> StaleStrategy:
        schedule = k_sync(CONCURRENCY, 3 * CONCURRENCY // 4)
        checks = Validation(**validation)
        return StaleStrategy(selector=selector, schedule=schedule, seed=seed, validation=checks)

    # The same devices are looked at where none of them lies.
    liars = Liars.of(SAID[run["lie"]], window.n_devices, run["share"], seed)
    with threadpool_limits(1):
        trained = train(window, app, SKEW, make(), forecasts=told, strategy=strategy, liars=liars)
    found = outcome(trained, window.n_devices) | judged(curves(trained), TARGET)
    return {
        "got": float(liars.who[trained.devices].mean()),
        "fair": float(liars.who.mean()),
        "finished": found["valid_ratio"],
        "device_hours": found["device_hours"],
        "reached": found["reached"],
        "accuracy": found["accuracy"],
    }


@cache
def _training_window(recordings: Path, seed: int) -> tuple[Any, Any]:
    traces = fleets(recordings, seed=0, kind="phones", assumed=ASSUMED)["test"]
    for window in training_windows(traces, "phones", SEEDS):
        if window.seed == seed:
            told = WindowForecasts(traces, embedded("phones"), window)
            return window, told.of(own_jobs(window, opened("digits"), SKEW))
    raise ValueError(f"{seed}: no such window")


# -- The audit of forecasts.


def alarms(recordings: Path, seed: int, until: str) -> Row:
    """Return how many honest phones alarm that no forecaster has learnt from."""
    traces = fleets(recordings, seed=0, kind="phones", assumed=ASSUMED)["test"]
    traces = traces.take(np.random.default_rng((seed, 73)).permutation(traces.n_devices)[:100])
    config = {
        **{"forecasts": True, "strategy": "FedBuff(10, 5, stages=[ForecastRequest()])"},
        "num-server-rounds": 100_000,
        "seed": 1,  # of the data and the first model; the seed below draws devices
    }
    with TemporaryDirectory() as folder:
        traces.write(Path(folder) / "phones.parquet")
        run = fedstale.simulate(
            "digits", traces=str(Path(folder) / "phones.parquet"), until=until, run_config=config,
            executor="inline", seed=seed,
        )  # fmt: skip
        found = audited(run)
    tested = found.devices[found.devices["tested"] > 0]
    return {
        **{"devices": len(tested), "tested": int(tested["tested"].sum())},
        **{"alarms": len(found.alarms)},
        **{x: int((found.alarms["direction"] == x).sum()) for x in ("over", "under", "short")},
    }


# -- All of them.


def wanted(recordings: Path | None, *, quick: bool) -> list[Row]:
    """Return the runs of the comparison; without recordings those that need none."""
    if quick:
        some = [
            {"part": "alike", "selector": "ExpectedUtility", "lie": lie, "share": 0.3, "seed": 0}
            for lie in (HONEST, "3 x loss")
        ]
        return [{**about, "when": when} for about in some for when in WHEN]
    runs = list(_wanted_alike())
    return runs if recordings is None else [*runs, *_wanted_on_phones()]


def _wanted_alike() -> Iterator[Row]:
    for seed in range(DRAWS):
        about = {"part": "alike", "seed": seed}
        for name in SELECTORS:
            for lie, share, when in product((HONEST, *LIES), SHARES, WHEN):
                yield {**about, "selector": name, "lie": lie, "share": share, "when": when}
        for name, lie, share, when in product(BELIEVERS, LOSSES, FEWER, WHEN):
            yield {**about, "selector": name, "lie": lie, "share": share, "when": when}
        for name, share, when in product(BELIEVERS, FEWER, ("after", CLIPPED)):
            yield {**about, "selector": name, "lie": SCALED, "share": share, "when": when}


def _wanted_on_phones() -> Iterator[Row]:
    for seed in SEEDS:
        about = {"part": "training", "seed": seed}
        for name, lie, share, when in product(SELECTORS, (HONEST, *LIES), SHARES, WHEN):
            yield {**about, "selector": name, "lie": lie, "share": share, "when": when}
    for seed in range(AUDITS):
        about = {"part": "audit", "seed": seed}
        yield {**about, "selector": "", "lie": HONEST, "share": 0.0, "when": ""}


def measured(run: Row, recordings: Path | None) -> Row:
    """Return what came of a run."""
    validation = SETTINGS.get(run["when"], BEFORE)
    if run["part"] == "alike":
        found = alike(run, validation)
    elif recordings is None:
        raise ValueError(f"{run}: needs recordings")
    elif run["part"] == "audit":
        found = alarms(recordings, run["seed"], "12h")
    else:
        found = training(run, recordings, validation)
    return {k: round(float(v), 4) if isinstance(v, float) else v for k, v in found.items()}


def main() -> None:
    """Play, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path, nargs="?", help="folder; without it no phones")
    parser.add_argument("--quick", action="store_true", help="a lie, two selectors, no phones")
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    runs = wanted(options.recordings, quick=options.quick)
    measure = partial(measured, recordings=options.recordings)
    kept = Kept(options.keep)
    play_missing(
        kept,
        ((run, partial(measure, run)) for run in runs),
        options.jobs,
        # Each lost job, and each number that is capped, would be a line.
        before=partial(logging.disable, logging.WARNING),
        each=partial(print, flush=True),
    )
    rows = [{**run, **kept[run]} for run in runs]
    command = "OMP_NUM_THREADS=1 python benchmarks/liars/run.py RECORDINGS --keep FILE"
    print(write_result("liars", rows, command=command, quick=options.quick))


if __name__ == "__main__":
    main()
