"""What steps that are preconditioned by shared Kronecker factors bring sites, and what is due.

Ten sites have digits, or 1,800 images of clothes (Fashion-MNIST, of which four pixels are one),
dealt by Dirichlet(0.1) or nearly evenly, by Dirichlet(100), and train 64-32-10 or 196-32-10 units:
a pass a round in batches of 8, by SGD with momentum 0.9, merged by examples. K-FAC preconditions
these steps by factors that sites measure on the model of each fifth version, clipped as in the
paper (kappa 0.001): by those of each site alone, which take no bytes; or by those of all, which the
server inverts, or sites for each other. SGD also has five passes a round, or the same clip.

Each arm has the rate, and the damping or kappa, with the highest mean accuracy over ten versions on
three seeds that are not used again; sites that invert have those of the server that does. The
target is what SGD has after 30 versions on these seeds, rounded down to 0.01. What is reported
comes from five other seeds, paired with SGD: versions, local steps, bytes of all messages and
replies, and virtual time until a version has the target, in 30 versions. Sites and server do 5e9
multiplications and additions a second, counted by formula (`work`), on links of 1 and of 100 Mbit/s
without latency.

Run it with: python benchmarks/papers/kfac_steps.py [--only DATA] [--keep FILE] [--quick]
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from fedstale.apps import client
from fedstale.apps.classification import Data
from fedstale.apps.client import Index
from fedstale.contrib.kfac import SharedInverses, exchange_inverses, kronecker_factors
from fedstale.contrib.kfac.merge import ABOUT, damped, inverses, layers_of
from fedstale.flower import model_of, record_of
from fedstale.simulation import Costs, TraceGrid
from fedstale.strategies import FedAvg, Validation
from fedstale.strategies.types import Array, Model
from fedstale.traces import TraceSet

sys.path.append(str(Path(__file__).parents[1]))
from lab.apps import TrainingApp
from lab.curves import difference, ratio
from lab.kept import Kept, play_missing
from lab.results import write_result
from lab.training import FIRST_NODE
from papers.inverting_sites import INVERT, SitesInvert, full, inverted
from papers.kfac import TASKS

N, BATCH, MOMENTUM, KAPPA, EVERY = 10, 8, 0.9, 0.001, 5
SEEDS, OTHER_SEEDS = (1, 2, 3, 4, 5), (101, 102, 103)
VERSIONS, TUNED_ON = 30, 10
SPEED, LINKS = 5e9, (1e6, 100e6)
"""Multiplications and additions a second, and bits a second each way."""
PLACES = {
    f"{data}, {alpha:g}": (data, alpha) for data in ("digits", "clothes") for alpha in (0.1, 100.0)
}
RATES, DAMPINGS = (0.003, 0.01, 0.03), (0.1, 0.01)
SECONDS = tuple(f"seconds_at_{link / 1e6:g}" for link in LINKS)
Row = dict[str, Any]
Run = tuple[str, str, float, float, int, int]
"""Place, arm, rate, damping (of SGD that is clipped, kappa), seed and versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """How sites take steps."""

    tries: tuple[tuple[float, float], ...] = tuple((r, d) for d in DAMPINGS for r in RATES)
    """Rates and dampings; none where it has those of another arm."""
    passes: int = 1
    stage: type[SharedInverses] | None = None


SGD, SERVER, SITES = "SGD", "K-FAC, server inverts", "K-FAC, sites invert"
LONG, CLIPPED, OWN = "SGD, five passes", "SGD, clipped", "K-FAC, own factors"
PLAIN = tuple((rate, 0.0) for rate in (0.01, 0.03, 0.1, 0.3))
ARMS = {
    SGD: Arm(tries=PLAIN),
    LONG: Arm(tries=PLAIN[:3], passes=5),
    CLIPPED: Arm(tries=tuple((r, k) for k in (0.01, 0.001) for r in (0.03, 0.1, 0.3))),
    OWN: Arm(),
    SERVER: Arm(stage=SharedInverses),
    SITES: Arm(tries=(), stage=SitesInvert),
}


class Small(TASKS["clothes"][0]):  # type: ignore[misc]
    """Images of clothes of 14 x 14 pixels, for a network of 196-32-10 units."""

    def __init__(self) -> None:
        """Read the images, and make them smaller."""
        super().__init__()
        self._test = smaller(self._test[0]), self._test[1]
        self._network = small(0)

    def initial(self, seed: int) -> ArrayRecord:
        """Return the first model."""
        return ArrayRecord(small(seed).state_dict())

    def _dealt(self, n_devices: int, alpha: float, seed: int) -> list[Data]:
        return [(smaller(images), y) for images, y in super()._dealt(n_devices, alpha, seed)]


def smaller(images: Tensor) -> Tensor:
    """Return the means of four pixels, flat and in [0, 1], of images of 28 x 28, uint8."""
    return images.view(-1, 14, 2, 14, 2).float().mean((2, 4)).flatten(1) / 255


def small(seed: int) -> nn.Module:
    """Return the network of `Small`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(196, 32), nn.ReLU(), nn.Linear(32, 10))


@cache
def task(data: str) -> TrainingApp:
    """Return what sites train on."""
    return Small() if data == "clothes" else TASKS[data][0]()


def own_inverses(network: nn.Module, images: Tensor, damping: float, seed: int) -> ArrayRecord:
    """Return the inverses of a site's own factors."""
    factors = model_of(kronecker_factors(network, images.split(64), seed=seed))
    found = {}
    for layer in layers_of(factors):
        pair = {name: full(factors[name]) for name in (f"{layer}.A", f"{layer}.G")}
        found |= inverses(damped(pair, damping))
    return record_of(found)


def steps(
    model: Model, data: Data, order: Index, rate: float, *, held: ArrayRecord | None, clip: float
) -> Model:
    """Return a model of two layers after SGD with momentum.

    It takes the steps of `Preconditioner` and `torch.optim.SGD`, without autograd, which would take
    five times as long.

    Args:
        model: with weights and biases of the layers 0 and 2.
        data: images and labels.
        order: of the examples, one row an epoch.
        rate: of SGD.
        held: inverses of layers; with none, plain gradients are clipped. None for neither.
        clip: kappa.
    """
    ws = [np.hstack([model[f"{k}.weight"], model[f"{k}.bias"][:, None]]) for k in (0, 2)]
    speeds = [np.zeros_like(w) for w in ws]
    pairs = {
        i: [full(held[f"{k}.{x}"].numpy()).astype(np.float32) for x in "GA"]
        for i, k in enumerate((0, 2))
        if held is not None and f"{k}.A" in held
    }
    one = np.ones((len(data[1]), 1), np.float32)
    images, labels = np.hstack([data[0].numpy(), one]), data[1].numpy()
    for batch in (row[i : i + BATCH] for row in order for i in range(0, len(row), BATCH)):
        x, n = images[batch], len(batch)
        before = x @ ws[0].T
        hidden = np.hstack([np.maximum(before, 0), one[:n]])
        said = hidden @ ws[1].T
        error = np.exp(said - said.max(1, keepdims=True))
        error /= error.sum(1, keepdims=True)
        error[np.arange(n), labels[batch]] -= 1
        error /= n
        back = (error @ ws[1][:, :-1]) * (before > 0)
        grads = [back.T @ x, error.T @ hidden]
        if held is not None:
            moved = {i: g @ grads[i] @ a for i, (g, a) in pairs.items()} or dict(enumerate(grads))
            total = sum(float((each * grads[i]).sum()) for i, each in moved.items())
            scale = np.float32(min(1.0, (clip / max(rate**2 * total, 1e-30)) ** 0.5))
            grads = [scale * moved[i] if i in moved else grads[i] for i in range(2)]
        speeds = [MOMENTUM * v + grad for v, grad in zip(speeds, grads, strict=True)]
        ws = [w - np.float32(rate) * v for w, v in zip(ws, speeds, strict=True)]
    return {
        name: part
        for k, w in zip((0, 2), ws, strict=True)
        for name, part in ((f"{k}.weight", w[:, :-1]), (f"{k}.bias", w[:, -1]))
    }


def shapes(network: nn.Module) -> list[tuple[str, tuple[int, int]]]:
    """Return the linear layers of a network, with their inputs, a bias among them, and outputs."""
    return [
        (name, (x.in_features + 1, x.out_features))
        for name, x in network.named_modules()
        if isinstance(x, nn.Linear)
    ]


def client_app(place: str, arm: str, rate: float, damping: float) -> ClientApp:
    """Return the app of sites."""
    app, trains = ClientApp(), task(PLACES[place][0])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        data = trains.data(*client.place(context), context.run_config)
        job, network = client.job(message, context, data), trains.network(message.content["arrays"])
        own = client.number_of(message) % 2**31
        held, clip, records = None, KAPPA, {}
        if arm == CLIPPED:
            held, clip = ArrayRecord(), damping
        elif arm == OWN:
            if int(message.metadata.group_id) % EVERY == 0:
                context.state["own"] = own_inverses(network, data[0], damping, own)
            held = context.state["own"]
        elif ARMS[arm].stage is not None:
            factors = partial(kronecker_factors, network, data[0].split(64), seed=own)
            known, records = exchange_inverses(message, context, factors)
            held = known or None  # the first steps are plain, and not clipped
        if arm == SITES:
            records |= inverted(message)
        model = model_of(message.content["arrays"])
        arrays = record_of(steps(model, data, job["order"], rate, held=held, clip=clip))
        metrics = MetricRecord({"num-examples": len(data[0])})
        content = RecordDict({"arrays": arrays, "metrics": metrics, **records})
        return Message(content, reply_to=message)

    return app


def work(arm: str, message: Message, examples: float, sizes: Sequence[tuple[int, int]]) -> float:
    """Return the multiplications and additions of a job.

    Args:
        arm: of `ARMS`.
        message: of training.
        examples: of the site.
        sizes: inputs and outputs of each layer.
    """
    about: Any = message.content.config_records.get(ABOUT, {"measure": False})
    passes, own = ARMS[arm].passes, arm == OWN
    measures = about["measure"] or (own and int(message.metadata.group_id) % EVERY == 0)
    weights = sum(m * n for m, n in sizes)
    done = 6.0 * examples * passes * weights
    # Inverses come with the message after their factors, or in the one after that.
    first = {SERVER: 1, SITES: 2, OWN: 0, CLIPPED: np.inf}.get(arm, np.inf)
    if int(message.metadata.group_id) >= first:
        done += (
            np.ceil(examples / BATCH) * passes * sum(2 * (m * m * n + n * n * m) for m, n in sizes)
        )
    if measures:
        done += examples * (6 * weights + 2 * sum(m * m + n * n for m, n in sizes))
    if own and measures:
        done += inversion(sizes)
    for array in message.content.array_records.get(INVERT, {}).values():
        done += inversion([(len(full(array.numpy())), 0)])
    return float(done)


def inversion(sizes: Iterable[tuple[int, int]]) -> float:
    """Return the multiplications and additions of inverting layers, by Cholesky."""
    return sum(2.0 * (m**3 + n**3) for m, n in sizes)


def server_work(arm: str, version: int, sizes: Sequence[tuple[int, int]]) -> float:
    """Return the multiplications and additions of the server before it sends a version.

    It checks by Cholesky that the factors of each site are no less than zero, and inverts.
    """
    if ARMS[arm].stage is None or version % EVERY != 1:
        return 0.0
    checks = N * sum(m**3 + n**3 for m, n in sizes) / 3.0
    return checks + (inversion(sizes) if arm == SERVER else 0.0)


def run(of: Run) -> list[list[float]]:
    """Return what each version has: accuracy, local steps, MB, and s at each link until then.

    Args:
        of: what is trained, how, from which seed, and how far.
    """
    torch.set_num_threads(1)
    place, name, rate, damping, seed, versions = of
    (data, alpha), arm = PLACES[place], ARMS[name]
    trains, accuracy, clock = task(data), list[float](), list[float]()
    sizes = [pair for _, pair in shapes(trains.network(trains.initial(seed)))]
    examples = trains.examples(N, alpha, seed)
    grid = TraceGrid(
        TraceSet.constant(N, compute=SPEED, downlink_bit_per_s=LINKS[0], uplink_bit_per_s=LINKS[0]),
        client_app(place, name, rate, damping),
        costs=Costs(),
        work=lambda message: work(name, message, examples[place_of(message)], sizes),
        run_config=trains.config(alpha, seed) | {"local-epochs": arm.passes, "batch-size": BATCH},
        seed=seed,
    )

    def evaluate(version: int, arrays: ArrayRecord) -> None:
        accuracy.append(trains.evaluate(arrays, seed)[0])
        clock.append(grid.now())

    stages = [] if arm.stage is None else [arm.stage(damping, every=EVERY)]
    strategy = FedAvg(stages=stages, validation=Validation(most_bytes=10**8), seed=seed)
    with grid.running(), threadpool_limits(1):
        strategy.start(grid, trains.initial(seed), versions, evaluate_fn=evaluate)
    jobs = grid.events().to_pandas()
    jobs["bytes"] = jobs["downloaded_bytes"] + jobs["uploaded_bytes"]
    # The clock of the grid has the first link, and no work of the server.
    seconds = [rounds_s(jobs, link) for link in LINKS]
    np.testing.assert_allclose(np.cumsum(seconds[0]), clock[1:], rtol=1e-6)
    served = [server_work(name, version, sizes) / SPEED for version in range(1, versions + 1)]
    steps = arm.passes * np.ceil(examples / BATCH).sum()
    columns = [
        np.full(versions, steps),
        jobs.groupby("base_version")["bytes"].sum() / 1e6,
        *(each + served for each in seconds),
    ]
    found = np.array([np.concatenate([[0.0], np.cumsum(x)]) for x in columns])
    return [[a, *rest] for a, rest in zip(accuracy, found.T.tolist(), strict=True)]


def place_of(message: Message) -> int:
    """Return the partition of the site that a message is to."""
    return message.metadata.dst_node_id - FIRST_NODE


def rounds_s(jobs: pd.DataFrame, bit_per_s: float) -> Array:
    """Return how long each round takes, until its last site has answered, in s."""
    each = 8.0 * jobs["bytes"] / bit_per_s + jobs["work"] / SPEED
    return np.array(each.groupby(jobs["base_version"]).max())


def reached(found: Sequence[Sequence[float]], target: float) -> list[float]:
    """Return whether a version has an accuracy, the first that does or the last, and its row."""
    at = [i for i, row in enumerate(found) if row[0] >= target]
    i = at[0] if at else len(found) - 1
    return [float(bool(at)), float(i), *found[i]]


def rows_of(place: str, target: float, runs: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return a row for each arm of a place, paired with SGD.

    Args:
        place: of `PLACES`.
        target: accuracy to reach.
        runs: by arm its `rate`, `damping` and `found`, what runs have come to.
    """
    rows, base = [], [reached(each, target) for each in runs[SGD]["found"]]
    for name, arm in runs.items():
        own = [reached(each, target) for each in arm["found"]]
        pairs = [(x, y) for x, y in zip(base, own, strict=True) if x[0] or y[0]]
        row: Row = {
            "place": place,
            "arm": name,
            "rate": arm["rate"],
            "damping": arm["damping"],
            "target": target,
            "reached": int(sum(each[0] for each in own)),
            "pairs": len(pairs),
            "base_is_censored": any(not x[0] for x, _ in pairs),
            "is_censored": any(not y[0] for _, y in pairs),
        }
        for i, key in enumerate(("versions", "accuracy", "steps", "megabytes", *SECONDS), start=1):
            if key != "accuracy":
                row[key] = float(np.median([each[i] for each in own]))
                row[f"{key}_ratio"] = ratio([y[i] for _, y in pairs], [x[i] for x, _ in pairs])
        ends = [each[-1][0] for each in arm["found"]]
        row["final"] = float(np.mean(ends))
        row["to_sgd"] = difference([each[-1][0] for each in runs[SGD]["found"]], ends)
        rows.append(row)
    return rows


def measured(place: str, kept: Kept, jobs: int) -> list[Row]:
    """Choose rates and dampings of a place, and return its rows."""

    def play(runs: Iterable[Run]) -> None:
        play_missing(kept, ((list(of), partial(run, of)) for of in runs), jobs)

    def tried(arm: str, setting: tuple[float, float]) -> list[Run]:
        return [(place, arm, *setting, seed, TUNED_ON) for seed in OTHER_SEEDS]

    play(of for arm in ARMS for each in ARMS[arm].tries for of in tried(arm, each))
    best: dict[str, tuple[float, float]] = {}
    for arm, about in ARMS.items():
        scores = {
            each: np.mean([row[0] for of in tried(arm, each) for row in kept[list(of)][1:]])
            for each in about.tries
        }
        best[arm] = max(scores, key=scores.__getitem__) if scores else best[SERVER]
    ahead = [(place, SGD, *best[SGD], seed, VERSIONS) for seed in OTHER_SEEDS]
    final = {arm: [(place, arm, *best[arm], seed, VERSIONS) for seed in SEEDS] for arm in ARMS}
    play([*ahead, *(of for some in final.values() for of in some)])
    target = floor(100 * float(np.mean([kept[list(of)][-1][0] for of in ahead]))) / 100
    runs = {
        arm: {
            "rate": best[arm][0],
            "damping": best[arm][1],
            "found": [kept[list(of)] for of in final[arm]],
        }
        for arm in ARMS
    }
    return rows_of(place, target, runs)


def short(place: str) -> list[Row]:
    """Return the rows of a place on two seeds, for as long as settings are chosen on."""
    runs = {}
    for arm in ARMS:
        rate, damping = (0.01, 0.01) if arm in (OWN, SERVER, SITES) else (0.1, 0.01)
        found = [run((place, arm, rate, damping, seed, TUNED_ON)) for seed in SEEDS[:2]]
        runs[arm] = {"rate": rate, "damping": damping, "found": found}
    return rows_of(place, 0.8, runs)


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", choices=("digits", "clothes"), help="one of the two")
    parser.add_argument("--quick", action="store_true", help="a place of each, two seeds")
    arguments = parser.parse_args()
    kept = Kept(arguments.keep)
    quick, seeds = arguments.quick, SEEDS[:2] if arguments.quick else SEEDS
    for data in [arguments.only] if arguments.only else ("digits", "clothes"):
        rows = []
        for place in [name for name, (of, _) in PLACES.items() if of == data][
            : 1 if quick else None
        ]:
            for row in short(place) if quick else measured(place, kept, arguments.jobs):
                print(row, flush=True)
                rows.append({**row, "seeds": list(seeds)})
        command = f"python benchmarks/papers/kfac_steps.py --only {data}"
        write_result(f"kfac_steps_{data}", rows, command=command, quick=quick)


if __name__ == "__main__":
    main()
