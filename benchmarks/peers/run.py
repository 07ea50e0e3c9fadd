"""What sites without a trusted centre reach although some lie, beside the same rule at a server.

Twenty synthetic sites train softmax regression on handwritten digits for half an hour. A job is
five epochs of SGD on some 70 examples, dealt by a Dirichlet distribution; it takes what 156 work
units do, and a model stands for 25 MB. Each site has ten neighbours, the nearest five on either
side of a ring. Two or four sites lie, and know what all others have sent (`peers/liars.py`). A rule
is for as many liars as there are.

gossip: `Relay` and `ScreenMod`, in rounds (`FedAvg(20)`) or without waiting (`FedBuff(20, 1)`).
server: the same rule where a trusted server averages, `FedAvg(20)` or `FedBuff(20, 11)`.

desktops: twenty synthetic public desktops, half of which are free at a time, in an hour and without
waiting, with two liars; the server's buffer is `FedBuff(20, 5)`.

phones: a hundred synthetic phones whose neighbours are the nearest four on either side, in four
hours, by asynchronous gossip and by `FedBuff(20, 5)`; nobody lies. A job is two minutes of the
median phone, and a model stands for 5 MB.

An accuracy is that on the test digits at the end, of what an honest site would screen next: the
mean over honest sites, and the worst of them; `own` is that of its model after its last job. A
server's model is one for all.

Run it with: python benchmarks/peers/run.py [--keep FILE] [--jobs N] [--seeds N] [--quick]
"""

import argparse
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

from fedstale.apps import classification
from fedstale.contrib.peers import Relay, ScreenMod
from fedstale.flower import model_of, record_of
from fedstale.simulation import Costs, RunEnded, TraceGrid
from fedstale.strategies import FedAvg, FedBuff, Stage, StaleStrategy
from fedstale.strategies.robust import Bulyan, Krum, Median, Rule, TrimmedMean, aggregate
from fedstale.strategies.types import Array, Model
from fedstale.strategies.weighting import polynomial
from fedstale.traces import TraceSet

sys.path.append(str(Path(__file__).parents[1]))
from lab.kept import Kept, play_missing
from lab.results import write_result
from lab.training import FIRST_NODE, work_of
from peers.liars import ATTACKS, Liars

N, NEAREST, UNTIL_S, TIMEOUT_S = 20, 5, 1800.0, 7200.0
SEEDS, CLOSE = (1, 2, 3, 4, 5), 0.03
WORK, MODEL_BYTES = 156.0, 25_000_000
ALPHA, EPOCHS, BATCH, RATE = 1.0, 5, 8, 0.1
PHONES, NEAREST_PHONES, PHONES_UNTIL_S, PHONE_BYTES = 100, 4, 4 * 3600.0, 5_000_000
NONE = "none"
RULES: dict[str, Callable[[int], Rule]] = {
    "mean": lambda f: TrimmedMean(f=0),
    "trimmed mean": lambda f: TrimmedMean(f=f),
    "median": lambda f: Median(f=f),
    "Krum": lambda f: Krum(f=f),
    "Bulyan": lambda f: Bulyan(f=f),
}
ARMS = ("gossip, rounds", "gossip, async", "server, rounds", "server, async")
DESKTOP_ARMS, DESKTOPS_UNTIL_S = ("gossip, desktops", "server, desktops"), 3600.0
DESKTOP_RULES = ("mean", "trimmed mean", "median")
LIARS = (2, 4)


class Case(NamedTuple):
    """What identifies a run."""

    arm: str
    rule: str
    liars: int
    attack: str
    seed: int


# -- Digits.

INITIAL: Model = {"w": np.zeros((64, 10), np.float32), "b": np.zeros(10, np.float32)}


@cache
def digits(seed: int, n: int = N) -> tuple[list[tuple[Array, Array]], tuple[Array, Array]]:
    """Return what each site trains on, and what models are tested on."""
    rng = np.random.default_rng((seed, 0))
    images, labels = load_digits(return_X_y=True)
    order = rng.permutation(len(labels))
    images, labels = (images / 16.0).astype(np.float32)[order], labels[order]
    test, train = slice(0, len(labels) // 5), slice(len(labels) // 5, None)
    dealt = classification.assign(labels[train], n, ALPHA, rng)
    own = [(images[train][mine], labels[train][mine]) for mine in dealt]
    return own, (images[test], labels[test])


def descend(model: Model, x: Array, y: Array, rng: np.random.Generator) -> Model:
    """Return a model after some epochs of SGD on the cross-entropy."""
    w, b = model["w"].copy(), model["b"].copy()
    for _ in range(EPOCHS):
        order = rng.permutation(len(y))
        for start in range(0, len(y), BATCH):
            batch = order[start : start + BATCH]
            p = np.exp((scores := x[batch] @ w + b) - scores.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            p[np.arange(len(batch)), y[batch]] -= 1.0
            w -= np.float32(RATE / len(batch)) * x[batch].T @ p
            b -= np.float32(RATE / len(batch)) * p.sum(0)
    return {"w": w, "b": b}


def accuracy(model: Model, seed: int) -> float:
    """Return the share of the test digits that a model names rightly."""
    x, y = digits(seed)[1]
    return float((np.argmax(x @ model["w"] + model["b"], axis=1) == y).mean())


class Task(NamedTuple):
    """What sites learn."""

    initial: Model
    accuracy: Callable[[Model, int], float]
    """Takes a model and a seed."""
    app: Callable[[int, Sequence[Mod]], ClientApp]
    """Takes a seed and mods."""


def app(seed: int, mods: Sequence[Mod], n: int = N) -> ClientApp:
    """Return what n sites run."""
    made = ClientApp(mods=list(mods))

    @made.train()
    def train(message: Message, context: Context) -> Message:
        site = int(context.node_config["partition-id"])
        own = digits(seed, n)[0][site]
        number = int.from_bytes(message.metadata.message_id.encode())
        rng = np.random.default_rng((seed, site, number))
        model = descend(model_of(message.content.array_records["arrays"]), *own, rng)
        metrics = MetricRecord({"num-examples": len(own[1])})
        return Message(
            RecordDict({"arrays": record_of(model), "metrics": metrics}), reply_to=message
        )

    return made


DIGITS = Task(INITIAL, accuracy, app)


# -- Runs.


def edges(folder: Path, n: int = N, nearest: int = NEAREST) -> Path:
    """Write who is whose neighbour, and return the path."""
    lines = [f"{i} {(i + k) % n}\n" for i in range(n) for k in range(1, nearest + 1)]
    path = folder / "edges.txt"
    path.write_text("".join(lines), encoding="utf-8")
    return path


def strategy_of(case: Case, stages: list[Stage]) -> StaleStrategy:
    """Return the strategy of a case."""
    settings: dict[str, Any] = {"stages": stages, "seed": case.seed}
    if case.arm.startswith("server") and case.rule != "mean":
        settings["robust"] = RULES[case.rule](case.liars)
    if case.arm.endswith("rounds"):
        return FedAvg(N, **settings)
    if case.arm.startswith("gossip"):
        return FedBuff(N, 1, **settings)
    # Of distinct nodes, of which half are away where desktops come and go.
    return FedBuff(N, 2 * NEAREST + 1 if case.arm in ARMS else 2 * case.liars + 1, **settings)


def run(case: Case, until_s: float = UNTIL_S, task: Task = DIGITS) -> dict[str, float]:
    """Return what one run reached, and what it cost."""
    on_desktops = case.arm in DESKTOP_ARMS
    population, until_s = ("desktops", DESKTOPS_UNTIL_S) if on_desktops else ("sites", until_s)
    rng, is_gossip = np.random.default_rng((case.seed, 3)), case.arm.startswith("gossip")
    liars = rng.permutation(N)[: case.liars].tolist()
    honest = sorted(set(range(N)) - set(liars))
    stages: list[Stage] = []
    if case.attack != NONE:
        nodes = [FIRST_NODE + site for site in liars]
        stages.append(Liars(nodes, case.attack, of_peers=is_gossip, seed=case.seed))
    mods: list[Mod] = []
    rule = RULES[case.rule](case.liars)
    if is_gossip:
        age = {} if case.arm.endswith("rounds") else {"staleness": polynomial(0.5)}
        mods.append(ScreenMod(rule, **age))
    with TemporaryDirectory() as folder, threadpool_limits(1):
        if is_gossip:
            stages.append(Relay(edges(Path(folder)), N))
        grid = TraceGrid(
            TraceSet.synthetic(N, seed=case.seed, population=population),
            task.app(case.seed, mods),
            costs=Costs(model_bytes=MODEL_BYTES),
            seed=case.seed,
            until_s=until_s,
            work=lambda message: WORK,
        )
        strategy = strategy_of(case, stages)
        with grid.running(), suppress(RunEnded):
            strategy.start(grid, record_of(task.initial), 10**6, TIMEOUT_S)
    relay = next((stage for stage in grid.runtime.stages if isinstance(stage, Relay)), None)
    if relay is None:
        own = screened = [task.accuracy(model_of(strategy.result.arrays), case.seed)]
    else:
        models = relay.models
        # An outage may be as long as the run.
        honest = [i for i in honest if i in models]
        own = [task.accuracy(models[i], case.seed) for i in honest]
        near = [around(i, models, N, NEAREST, task.initial) for i in honest]
        screened = [task.accuracy(aggregate(rule, each), case.seed) for each in near]
    jobs = grid.events().to_pandas()
    spent = jobs[["download_s", "compute_s", "upload_s"]].sum()
    return {
        "accuracy": float(np.mean(screened)),
        "worst": float(np.min(screened)),
        "own": float(np.mean(own)),
        "own_worst": float(np.min(own)),
        "jobs": float((jobs["status"] == "reported").sum()),
        "gigabytes": float(jobs[["downloaded_bytes", "uploaded_bytes"]].sum().sum()) / 1e9,
        "device_hours": float(spent.sum()) / 3600.0,
        "training_hours": float(spent["compute_s"]) / 3600.0,
    }


def around(
    site: int, models: Mapping[int, Model], n: int, nearest: int, initial: Model = INITIAL
) -> list[Model]:
    """Return the models of a site and its neighbours; the first one of who has not answered."""
    return [models.get((site + k) % n, initial) for k in range(-nearest, nearest + 1)]


def phones(seed: int) -> dict[str, float]:
    """Return what phones reach by gossip and with a server, and how often neighbours are online."""
    traces = TraceSet.synthetic(PHONES, days=2, seed=seed)
    assert traces.availability is not None
    nobody, instants = np.zeros(PHONES), np.arange(0.0, PHONES_UNTIL_S, 600.0)
    online = np.array(
        [traces.availability.is_available(np.arange(PHONES), nobody + at) for at in instants]
    )
    near = [k for k in range(-NEAREST_PHONES, NEAREST_PHONES + 1) if k]
    n_online = np.sum([np.roll(online, k, axis=1) for k in near], axis=0)
    found = {"three_online": float((n_online >= 3).mean())}
    for arm in ("gossip", "server"):
        mods: list[Mod] = []
        strategy: StaleStrategy = FedBuff(20, 5, seed=seed)
        with TemporaryDirectory() as folder, threadpool_limits(1):
            if arm == "gossip":
                mods = [ScreenMod(TrimmedMean(f=0), staleness=polynomial(0.5))]
                relay = Relay(edges(Path(folder), PHONES, NEAREST_PHONES), PHONES)
                strategy = FedBuff(20, 1, seed=seed, stages=[relay])
            grid = TraceGrid(
                traces,
                app(seed, mods, PHONES),
                costs=Costs(model_bytes=PHONE_BYTES),
                seed=seed,
                until_s=PHONES_UNTIL_S,
                work=lambda message: work_of(traces, 2.0),
            )
            with grid.running(), suppress(RunEnded):
                strategy.start(grid, record_of(INITIAL), 10**6, TIMEOUT_S)
        if arm == "server":
            found[arm] = accuracy(model_of(strategy.result.arrays), seed)
            continue
        models = next(s for s in grid.runtime.stages if isinstance(s, Relay)).models
        each = [around(i, models, PHONES, NEAREST_PHONES) for i in range(PHONES)]
        found[arm] = float(np.mean([accuracy(aggregate(TrimmedMean(f=0), x), seed) for x in each]))
    return found


def cases(seeds: Sequence[int]) -> list[Case]:
    """Return all cases; Bulyan needs 4 f + 3 models, more than neighbours send with f = 4."""
    return [
        Case(arm, rule, liars, attack, seed)
        for seed in seeds
        for arm in (*ARMS, *DESKTOP_ARMS)
        for liars in (LIARS if arm in ARMS else LIARS[:1])
        for rule in (RULES if arm in ARMS else DESKTOP_RULES)
        for attack in (NONE, *ATTACKS)
        if RULES[rule](liars).least <= 2 * NEAREST + 1
    ]


def compared(kept: Kept, all_cases: Sequence[Case], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each case over its seeds; `close` to the mean of its arm without liars."""

    def means(case: Case) -> Mapping[str, float]:
        runs = [kept[list(case._replace(seed=seed))] for seed in seeds]
        return {key: float(np.mean([each[key] for each in runs])) for key in runs[0]}

    rows = []
    for case in all_cases:
        found = means(case)
        reached = means(case._replace(rule="mean", attack=NONE))["accuracy"] - CLOSE
        about = {key: value for key, value in case._asdict().items() if key != "seed"}
        close = {
            "is_close": found["accuracy"] >= reached,
            "is_worst_close": found["worst"] >= reached,
        }
        rows.append({**about, "seeds": list(seeds), **found, **close})
    return rows


def rows_of(kept: Kept, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each case, and one of phones."""
    rows = compared(kept, cases(seeds[:1]), seeds)
    runs = [kept[["phones", seed]] for seed in seeds]
    found = {key: float(np.mean([each[key] for each in runs])) for key in runs[0]}
    return [*rows, {"arm": "phones", "seeds": list(seeds), **found}]


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="seeds, 1 to 5")
    parser.add_argument("--quick", action="store_true", help="a seed, without liars and with ALIE")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    kept, seeds = Kept(args.keep), SEEDS[: args.seeds]
    wanted = cases(seeds)
    if args.quick:
        seeds = SEEDS[:1]
        wanted = [case for case in cases(seeds) if case.attack in (NONE, "ALIE")][:4]
    tasks: list[tuple[Any, Callable[[], Any]]]
    tasks = [(list(case), partial(run, case)) for case in wanted]
    if not args.quick:
        tasks += [(["phones", seed], partial(phones, seed)) for seed in seeds]
    play_missing(kept, tasks, args.jobs, each=lambda case, found: print(*case, found, flush=True))
    some = f" --seeds {args.seeds}" if args.seeds != len(SEEDS) else ""
    command = f"python benchmarks/peers/run.py{some}"
    rows = compared(kept, wanted, seeds) if args.quick else rows_of(kept, seeds)
    write_result("site_peers", rows, command=command, quick=args.quick)


if __name__ == "__main__":
    main()
