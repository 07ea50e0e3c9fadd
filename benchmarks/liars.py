"""What five lies about themselves bring devices, with each selector, and what limits them.

A lie is played before, by the defaults, and after, by what is there where devices are not trusted:
`Validation(loss_from="norm", examples_cap=1.5)`. There are three parts:

alike: forty devices that differ in their chances and their data, and a whole server of 20 versions.
    Device 2i + 1 is the honest twin of device 2i; liars have even numbers.
windows: the selection environment on recorded phones that no model has seen. The same devices of
    the same windows play honestly, too, and say what share is fair. A lie about examples moves
    picks there, and never the model.
training: the app digits on recorded phones, as in `agent_training`.

In "alike" and "windows" some other ways to take a stated loss are played as well (`WAYS`), and in
"training" what else an update tells of a loss (`EVIDENCE`). Then the audit of forecasts reads runs
of recorded phones whose forecasts are the embedded forecaster's.

Runs are kept in a file and not repeated:

    OMP_NUM_THREADS=1 python benchmarks/liars.py RECORDINGS --keep FILE --cache FOLDER --jobs 2
"""

import argparse
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import agent_training
import numpy as np
from agent_windows import NOBODY, lied_to
from evidence import EVIDENCE, losses_by, public_loss, taken
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from forecast_bias import testing
from lin_ucb import LinUCB
from numpy import typing as npt
from recorded_fleets import ASSUMED, fleets
from results_file import write_result
from selection_training import FIRST_NODE, NO_LIE, Liars, Lie, LyingGrid, train
from threadpoolctl import threadpool_limits
from training_apps import opened

import fedstale
from fedstale.agents import AgentSelector, Scenario, load
from fedstale.agents.env.episodes import NOISES
from fedstale.agents.env.learning_proxy import update_norms
from fedstale.agents.env.rounds import Policy
from fedstale.agents.env.simulator import Simulator
from fedstale.agents.evaluation import episode_metrics
from fedstale.agents.policy.scorer import by_agent, embedded
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
    Probing,
    Random,
    Selector,
)
from fedstale.strategies.server.reputation import Losses, NodeMedian, Reputation
from fedstale.strategies.server.validation import Validation
from fedstale.strategies.types import FORECAST_RECORD, ClientUpdate
from fedstale.traces import TraceSet
from fedstale.traces.arrays import Array, Index, Mask, stream

Row = dict[str, Any]
NAME = "liars"
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
BEFORE = {"loss_from": "stated", "examples_cap": None}
AFTER = {"loss_from": "norm", "examples_cap": CAP}
SCALED, UPDATE_TIMES = "3 x update", 3.0
"""No lie, but what a device can do against `AFTER`."""
CLIPPED = "after, norm_cap 1.5"
NORM = "the norm itself"
SETTINGS: dict[str, Row] = {
    "after": AFTER,
    CLIPPED: {**AFTER, "norm_cap": 1.5},
    NORM: {**AFTER, "examples_cap": None},
}
WAYS: dict[str, Callable[[Array, Array, Array], npt.ArrayLike]] = {
    "as stated": lambda stated, usual, by_norm: stated,
    "at most the median": lambda stated, usual, by_norm: np.minimum(stated, usual),
    "at most 1.5 x the median": lambda stated, usual, by_norm: np.minimum(stated, 1.5 * usual),
    "at most what the norm says": lambda stated, usual, by_norm: np.minimum(stated, by_norm),
    "what the norm says": lambda stated, usual, by_norm: by_norm,
    "the median for all": lambda stated, usual, by_norm: usual,
}
"""What is made of a stated loss, of the median over devices, and of that times the ratio of the
norm of an update to the median of norms. `NORM`, which is `Validation(loss_from="norm")` alone, is
played beside them."""
BELIEVERS = ("ExpectedUtility", "Oort", "PowerOfChoice", "agent", "LinUCB")
"""Selectors that use losses; the others are the same with each way."""
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
    def train_model(message: Message, context: Any) -> Message:  # noqa: ANN401
        device = int(context.node_config["partition-id"])
        version = int(message.content["config"]["server-round"])
        rng = np.random.default_rng((device, version))
        if rng.random() >= known["p"][device]:
            raise RuntimeError("lost")
        examples = known["examples"][device]
        loss = (0.1 + 2.3 * np.exp(-version / 7.0)) * known["hard"][device]
        loss = float(loss * np.exp(0.3 * rng.standard_normal()))
        norm = float(update_norms(np.array(loss), np.array(examples), rng.standard_normal()))
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


@contextmanager
def taking(way: str) -> Iterator[None]:
    """Let servers make of stated losses what a way does."""
    plain = Reputation.losses

    def losses(
        self: Reputation, update: ClientUpdate, *, stated: float, stated_square: float
    ) -> Losses:
        heard = vars(self).setdefault("_heard", [NodeMedian(100, ENOUGH) for _ in range(2)])
        for median, value in zip(heard, (stated, update.norm), strict=True):
            median.hear(update.node_id, value)
        if not heard[0].holds or way == "as stated":
            return plain(self, update, stated=stated, stated_square=stated_square)
        usual, norm = (median.times(1.0) for median in heard)
        taken = WAYS[way](np.array(stated), np.array(usual), np.array(usual * update.norm / norm))
        return Losses(float(np.asarray(taken)), float("nan"))

    with losses_by(losses):
        yield


# -- Windows of recorded phones.


class Lying(Simulator):
    """Episodes in which some devices lie, and servers that take losses in some way.

    Args:
        scenario: where they take place.
        b: number of episodes.
        lies: which devices lie; shape (b, n).
        lie: what about.
        way: what is made of stated losses, of `WAYS`.
        cap: multiple of the median that examples count up to; none if None.
    """

    def __init__(
        self,
        scenario: Scenario,
        b: int,
        lies: Mask,
        lie: Lie,
        *,
        way: str = "as stated",
        cap: float | None = None,
    ) -> None:
        super().__init__(scenario, b)
        self.lies, self.lie, self.way, self.cap = lies, lie, way, cap
        self.heard = np.full((4, b, self.n), np.nan)
        """Losses and norms of jobs, and those that a server heard last; examples it heard."""
        self.stated = np.full((b, self.n), np.nan)

    def _train(self, at: tuple[Index, Index]) -> None:
        super()._train(at)
        if not self.takes_norms:
            times = np.where(self.lies[at], self.lie.loss, 1.0)
            self.job_loss[at] *= times
            self.job_square_loss[at] *= times**2
        turn = (self.known["times_picked"][at] + NOISES // 2) % NOISES
        of_model = (self.episodes.mixtures[at] * self.losses[at[0]]).sum(axis=1)
        noise = self.episodes.noise[at[0], at[1], turn]
        self.heard[1][at] = update_norms(of_model, self.episodes.examples[at], noise)

    def _accept(self, rows: Index, accepted: Mask) -> None:
        which, column = np.nonzero(accepted)
        at = rows[which], column
        if self.way != "as stated" and which.size:
            self.heard[2][at], self.heard[3][at] = self.job_loss[at], self.heard[1][at]
            usual, norm = (_medians(self.heard[i][rows])[which] for i in (2, 3))
            stated = self.job_loss[at]
            taken = WAYS[self.way](stated, usual, usual * self.heard[1][at] / norm)
            holds = np.isfinite(usual)
            self.job_loss[at] = np.where(holds, taken, stated)
            ratio = np.where(holds, self.job_loss[at] / stated, 1.0)
            self.job_square_loss[at] *= ratio**2
        super()._accept(rows, accepted)
        times = np.where(self.lies[at], self.lie.examples, 1.0)
        stated = self.episodes.examples[at] * times
        self.stated[at] = stated
        if self.cap is not None and which.size:
            most = self.cap * _medians(self.stated[rows])[which]
            stated = np.where(np.isfinite(most), np.minimum(stated, most), stated)
        self.known["examples"][at] = stated

    def _report_forecasts(self, row: Index, column: Index, now: Array) -> None:
        super()._report_forecasts(row, column, now)
        lies = self.lies[row, column]
        at, known = (row[lies], column[lies]), self.known
        if self.lie.chance is not None:
            p = known["forecast_p_finish"][at]
            known["forecast_p_finish"][at] = np.where(np.isnan(p), p, self.lie.chance)
        known["forecast_duration_s"][at] *= self.lie.duration


def _medians(values: Array) -> Array:
    """Return the median of each row's known values; NaN where too few are known."""
    found, known = np.full(len(values), np.nan), ~np.isnan(values)
    for i in np.flatnonzero(known.sum(axis=1) >= ENOUGH):
        found[i] = np.median(values[i][known[i]])
    return found


@cache
def policies(most: int) -> dict[str, Policy]:
    """Return the selectors, the agent as a score."""
    made: dict[str, Policy] = {name: make() for name, make in SELECTORS.items()}
    return made | {
        "PowerOfChoice": PowerOfChoice(2 * most),
        "agent": by_agent(load(embedded()).weights),
    }


def windows(run: Row, scenario: Scenario, n: int, validation: Row, way: str) -> Row:
    """Return means over some windows in which a share of the devices lies."""
    how = {**NOBODY, "inflating_share": 1.0, "inflating_clients": run["share"]}
    among = lied_to(scenario, how)
    episodes = among.draw(n, stream(0, 9))
    lies = episodes.inflates & episodes.present
    episodes = replace(episodes, inflates=np.zeros_like(lies))
    settings = replace(among.settings, loss_from=validation["loss_from"])
    cap = validation["examples_cap"]
    simulator = Lying(
        replace(among, settings=settings), n, lies, SAID[run["lie"]], way=way, cap=cap
    )
    most = max(2, round(settings.devices[1] * settings.concurrency_share[1]))
    played = episode_metrics(simulator, episodes, policies(most)[run["selector"]], seed=0)
    sent = simulator.known["times_picked"] * episodes.present
    total = np.maximum(sent.sum(axis=1), 1)
    ended = played["aggregated"] + played["failed"] + played["discarded"]
    return {
        "got": float(((sent * lies).sum(axis=1) / total).mean()),
        "fair": float((lies.sum(axis=1) / episodes.present.sum(axis=1)).mean()),
        "finished": float((1.0 - played["failed"] / ended).mean()),
        "rewards": [round(float(x), 3) for x in played["reward"]],
    }


# -- Real training of digits.

SKEW, TARGET, CONCURRENCY = 0.3, 0.79, 4


def training(run: Row, recordings: Path, folder: Path, validation: Row) -> Row:
    """Return what one run of digits needed to its target."""
    name, seed, app = run["selector"], run["seed"], opened("digits")
    window, told = _training_window(recordings, folder, seed)
    make = (lambda: PowerOfChoice(8)) if name == "PowerOfChoice" else SELECTORS[name]

    def strategy(selector: Selector, seed: int) -> StaleStrategy:
        schedule = k_sync(CONCURRENCY, 3 * CONCURRENCY // 4)
        checks = Validation(**validation)
        return StaleStrategy(selector=selector, schedule=schedule, seed=seed, validation=checks)

    # The same devices are looked at where none of them lies.
    liars = Liars.of(SAID[run["lie"]], window.n_devices, run["share"], seed)
    judged = (
        taken(run["when"], public_loss(app, seed)) if run["when"] in EVIDENCE else nullcontext()
    )
    with threadpool_limits(1), judged:
        trained = train(window, app, SKEW, make(), forecasts=told, strategy=strategy, liars=liars)
    found = agent_training.outcome(trained, TARGET, window.n_devices)
    return {
        "got": float(liars.who[trained.devices].mean()),
        "fair": float(liars.who.mean()),
        "finished": found["valid_ratio"],
        "device_hours": found["device_hours"],
        "reached": found["reached"],
        "accuracy": found["accuracy"],
    }


@cache
def _training_window(recordings: Path, folder: Path, seed: int) -> tuple[Any, Any]:
    traces = fleets(recordings, seed=0, kind="phones", assumed=ASSUMED)["test"]
    for window in agent_training.windows(traces, "phones", agent_training.SEEDS):
        if window.seed == seed:
            return window, agent_training.told(traces, "phones", window, folder)
    raise ValueError(f"{seed}: no such window")


# -- The audit of forecasts.


def audited(recordings: Path, seed: int, until: str) -> Row:
    """Return how many honest phones alarm that no forecaster has learnt from."""
    traces = fleets(recordings, seed=0, kind="phones", assumed=ASSUMED)["test"]
    traces = traces.take(np.random.default_rng((seed, 73)).permutation(traces.n_devices)[:100])
    config = {
        **{"forecasts": True, "strategy": "fedbuff", "concurrency": 10, "buffer-size": 5},
        "num-server-rounds": 100_000,
    }
    with TemporaryDirectory() as folder:
        traces.write(Path(folder) / "phones.parquet")
        run = fedstale.simulate(
            "digits", traces=str(Path(folder) / "phones.parquet"), until=until, run_config=config,
            executor="inline", seed=seed,
        )  # fmt: skip
        found = fedstale.audit(run)
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
        for way, name, share in product((*WAYS, NORM), BELIEVERS, FEWER):
            yield {**about, "selector": name, "lie": "3 x loss", "share": share, "when": way}


def _wanted_on_phones() -> Iterator[Row]:
    about: Row = {"part": "windows", "seed": 0}
    for name, share, lie, when in product(SELECTORS, SHARES, (HONEST, *LIES), WHEN):
        yield {**about, "selector": name, "lie": lie, "share": share, "when": when}
    for way, name, lie in product((*WAYS, NORM), BELIEVERS, (HONEST, "3 x loss")):
        yield {**about, "selector": name, "lie": lie, "share": 0.3, "when": way}
    for seed in agent_training.SEEDS:
        about = {"part": "training", "seed": seed}
        for name, lie, share, when in product(SELECTORS, (HONEST, *LIES), SHARES, WHEN):
            yield {**about, "selector": name, "lie": lie, "share": share, "when": when}
        for when, name in product((NORM, *EVIDENCE), BELIEVERS):
            yield {**about, "selector": name, "lie": HONEST, "share": 0.3, "when": when}
    for seed in range(AUDITS):
        about = {"part": "audit", "seed": seed}
        yield {**about, "selector": "", "lie": HONEST, "share": 0.0, "when": ""}


def measured(run: Row, recordings: Path | None, folder: Path, n_windows: int) -> Row:
    """Return what came of a run."""
    when = run["when"]
    validation, way = SETTINGS.get(when, BEFORE), when if when in WAYS else "as stated"
    if run["part"] == "alike":
        with taking(way):
            return alike(run, validation)
    if recordings is None:
        raise ValueError(f"{run}: needs recordings")
    if run["part"] == "windows":
        return windows(run, _scenario(recordings, folder), n_windows, validation, way)
    if run["part"] == "audit":
        return audited(recordings, run["seed"], "12h")
    return training(run, recordings, folder, validation)


@cache
def _scenario(recordings: Path, folder: Path) -> Scenario:
    return testing(recordings, "phones", folder)


def main() -> None:
    """Play, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path, nargs="?", help="folder; without it no phones")
    parser.add_argument("--quick", action="store_true", help="a lie, two selectors, no phones")
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--cache", type=Path, help="folder to keep forecasts in")
    parser.add_argument("--windows", type=int, default=200, help="windows of each run of that part")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    runs = wanted(options.recordings, quick=options.quick)
    folder = options.cache or Path("build/liars")
    folder.mkdir(parents=True, exist_ok=True)
    measure = partial(
        measured, recordings=options.recordings, folder=folder, n_windows=options.windows
    )
    kept = _read(options.keep)
    missing = [run for run in runs if _key(run) not in kept]
    for run, found in zip(missing, _each(measure, missing, options.jobs), strict=True):
        kept[_key(run)] = row = {
            k: round(float(v), 4) if isinstance(v, float) else v for k, v in found.items()
        }
        print(run, {k: v for k, v in row.items() if k != "rewards"}, flush=True)
        if options.keep:
            with options.keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps([_key(run), row]) + "\n")
    rows = [{**run, **kept[_key(run)]} for run in runs]
    command = "OMP_NUM_THREADS=1 python benchmarks/liars.py RECORDINGS --keep FILE"
    name = f"{NAME}-quick" if options.quick else NAME
    print(write_result(name, rows, command=command + " --quick" * options.quick))


def _each(measure: Callable[[Row], Row], runs: Sequence[Row], jobs: int) -> Iterator[Row]:
    """Yield what came of each run, in their order."""
    # Each lost job, and each number that is capped, would be a line.
    quiet = partial(logging.disable, logging.WARNING)
    if jobs == 1:
        quiet()
        yield from map(measure, runs)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=quiet) as pool:
        yield from pool.map(measure, runs)


def _key(run: Row) -> str:
    return json.dumps(run, sort_keys=True)


def _read(path: Path | None) -> dict[str, Row]:
    lines: Sequence[str] = path.read_text("utf-8").splitlines() if path and path.exists() else ()
    return dict(json.loads(line) for line in lines)


if __name__ == "__main__":
    main()
