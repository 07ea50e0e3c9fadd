"""What phones that differ and leave cost rounds: FLASH's findings 1 and 6, on its own recordings.

700 phones are drawn from those that FLASH recorded, with replacement, as its simulator does; each
is available while idle, charging and on Wi-Fi, and goes on with its job when it is again. Their
speed is one of its three classes of devices. 30 that are available are asked in each round (FLASH:
100 of some 3,500), train five epochs in batches of ten and have 270 s; a round is void if fewer
than 80 % make it. "Unaware" are the same rounds where every phone is the middle one and always
available, without a deadline.

They train a network of 784-32-10 units on Fashion-MNIST, as the handwriting of FEMNIST is not at
hand: labels by a Dirichlet distribution of 1, as many images as FEMNIST's writers have in
proportion, a quarter of them. A job costs a phone what FLASH measured for FEMNIST, of all.

Reference:
    Yang, Wang, Xu, Chen, Bian, Liu, Liu. Characterizing Impacts of Heterogeneity in Federated
    Learning upon Large-Scale Smartphone Data. WWW 2021. Findings are numbered as in the abstract of
    FLASH: Heterogeneity-Aware Federated Learning at Scale. IEEE TMC 2022. Settings are those of its
    code, for FEMNIST and five epochs.
    Caldas et al. LEAF: A Benchmark for Federated Settings. 2018 (the writers of FEMNIST).
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from flwr.app import ArrayRecord, RecordDict

from fedstale.errors import ProtocolError
from fedstale.flower import model_of, record_of
from fedstale.simulation import Costs, RunEnded, TraceGrid
from fedstale.strategies import FedAvg, Stage
from fedstale.strategies.schedule import Schedule
from fedstale.strategies.types import Array, ClientUpdate, Job, Model
from fedstale.traces import Availability, Series, TraceSet
from lab.curves import final
from reproduce import clothes

N_PHONES, PER_ROUND, LEAST, ROUNDS, SEEDS = 700, 30, 18, 300, (1, 2, 3)
DEADLINE_S, NEEDED, EPOCHS, BATCH, RATE = 270.0, 0.8, 5, 10, 0.01
ALPHA, SHARE = 1.0, 60 / 227
"""Of the deal of labels, and images that are trained on for one that is paid for."""
EXAMPLES, SPREAD, MOST = 226.8, 88.9, 340
"""Of FEMNIST's writers: mean and standard deviation (LEAF), and FLASH's `max_sample`."""
SECONDS_A_BATCH, SHARES = np.array([1.642, 0.588, 0.179]), np.array([18820.0, 16428.0, 159.0])
"""Of FLASH's three devices, for a batch of ten of FEMNIST, and how many phones count as each."""
MODEL_BYTES, DOWN_BIT_PER_S, UP_BIT_PER_S = 26_000_000, 8 * 4.3e6, 8 * 3.3e6
"""Of FEMNIST's network, and the median Wi-Fi of FLASH's measurements."""
WINDOW = 10
CLAIMS = {
    "accuracy": (0.01, 0.138),
    "time": (1.2, 3.48),
    "failed": (0.05, 0.2),
    "top": (0.76, 0.96),
}
"""Between what a figure must be to reproduce FLASH's. Of finding 1, that accuracy drops by up to
9.2 % and time to converge grows up to 2.32 times: a drop of 1 % and a fifth more time at least, and
at most half as much again as FLASH's largest. Of finding 6, that more than 10 % of the clients fail
and the busiest 30 % do 86 % of the work: failures within a factor of two, the share within .1."""
_DRAWN, _SIZES, _DEAL, _ORDER = range(4)


def phones(recordings: Path, seed: int, *, aware: bool, n: int = N_PHONES) -> TraceSet:
    """Return the phones of a seed, as they are or all alike and always there."""
    rng = np.random.default_rng((seed, _DRAWN))
    recorded = TraceSet.read(recordings / "flash-days.json").channel("availability")
    drawn = rng.integers(recorded.n_devices, size=n)
    kinds = rng.choice(3, size=n, p=SHARES / SHARES.sum())
    seconds = SECONDS_A_BATCH[kinds] if aware else np.full(n, SECONDS_A_BATCH[1])
    return TraceSet(
        device_ids=TraceSet.ideal(n).device_ids,
        availability=recorded.take(drawn) if aware else Availability.always(n),
        compute=Series.constant(1.0 / seconds),
        downlink=Series.constant(np.full(n, DOWN_BIT_PER_S)),
        uplink=Series.constant(np.full(n, UP_BIT_PER_S)),
    )


def examples(seed: int, n: int = N_PHONES) -> Array:
    """Return how many images each phone pays for; shape (n,)."""
    rng = np.random.default_rng((seed, _SIZES))
    return np.clip(np.rint(rng.normal(EXAMPLES, SPREAD, n)), BATCH, MOST).astype(np.int64)


def deal(seed: int, n: int = N_PHONES) -> list[Array]:
    """Return which images each phone has."""
    rng, labels = np.random.default_rng((seed, _DEAL)), clothes.images()[1]
    places = [np.flatnonzero(labels == label) for label in range(10)]
    counts = np.maximum(np.rint(SHARE * examples(seed, n)), 1).astype(np.int64)
    shares = rng.dirichlet(np.full(10, ALPHA), size=n)
    return [
        np.concatenate([rng.choice(p, k) for p, k in zip(places, own, strict=True)])
        for own in (rng.multinomial(m, share) for m, share in zip(counts, shares, strict=True))
    ]


class Enough(Stage):
    """Voids the rounds in which too small a share of the phones made it."""

    def __init__(self, share: float) -> None:
        """Set the share of those asked that a step needs."""
        self.share, self.n_asked = share, 0

    def outgoing(self, job: Job, content: RecordDict) -> RecordDict:
        """Count who is asked."""
        self.n_asked += 1
        return content

    def step(self, mean: Model, updates: Sequence[ClientUpdate]) -> Mapping[str, float]:
        """Raise ProtocolError, by which the round is void, or add no metric."""
        needed, self.n_asked = self.share * self.n_asked, 0
        if len(updates) < needed:
            raise ProtocolError(f"{len(updates)} phones made it, of {needed:g} needed")
        return {}


class Clients(clothes.Clients):
    """Trains phones for some epochs."""

    def train(self, model: Model, mine: Array, rng: np.random.Generator) -> dict[str, float]:
        """Take a step for each batch."""
        orders = [rng.permutation(mine) for _ in range(EPOCHS)]
        batches = [order[i : i + BATCH] for order in orders for i in range(0, len(mine), BATCH)]
        x, y, *_ = clothes.images()
        clothes.train(model, x, y, batches, RATE)
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came of a run."""

    at_s: Array
    """When each version was made; shape (versions,)."""
    accuracy: Array
    """Its accuracy, averaged over the last ten versions; shape (versions,)."""
    jobs: pd.DataFrame
    """A row a job that has ended."""

    def to_s(self, target: float) -> float:
        """Return when the accuracy reaches a target, or the end."""
        there = np.flatnonzero(self.accuracy >= target)
        return float(self.at_s[there[0] if there.size else -1])


def run(recordings: Path, seed: int, *, aware: bool, rounds: int = ROUNDS) -> Run:
    """Return what rounds came to."""
    _, _, test_x, test_y = clothes.images()
    # A unit of work is a batch.
    work = EPOCHS * np.ceil(examples(seed) / BATCH)
    grid = TraceGrid(
        phones(recordings, seed, aware=aware),
        Clients(deal(seed), seed, _ORDER),
        costs=Costs(work={"train": 1.0}, model_bytes=MODEL_BYTES, constant_replies=True),
        work=lambda message: float(work[int(message.metadata.dst_node_id) - 1000]),
        seed=seed,
        on_interrupt="pause",
    )
    deadline_s = DEADLINE_S if aware else np.inf
    strategy = FedAvg(
        schedule=Schedule(concurrency=PER_ROUND, deadline_s=deadline_s, min_available_nodes=LEAST),
        stages=[Enough(NEEDED)],
        seed=seed,
    )
    seen: list[tuple[float, float]] = []

    def evaluate(version: int, arrays: ArrayRecord) -> None:
        right = clothes.scores(model_of(arrays), test_x).argmax(1) == test_y
        seen.append((grid.now(), float(right.mean())))

    first = clothes.initial((784, 32, 10), seed)
    with grid.running(), suppress(RunEnded):
        strategy.start(
            grid,
            record_of(first),
            num_rounds=rounds,
            timeout=DEADLINE_S if aware else 1e9,
            evaluate_fn=evaluate,
        )
    at_s, accuracy = np.array(seen).T
    padded = np.concatenate([np.full(WINDOW - 1, accuracy[0]), accuracy])
    smooth = np.convolve(padded, np.ones(WINDOW) / WINDOW, mode="valid")
    return Run(at_s=at_s, accuracy=smooth, jobs=grid.events().to_pandas())


def figures(aware: Run, unaware: Run) -> dict[str, float]:
    """Return what is compared with the findings.

    Time is to the accuracy that both reach: the lower of their means over the last tenth. A job
    that came in time counts as done, also if its round was void.
    """
    ends = final(aware.accuracy), final(unaware.accuracy)
    done = aware.jobs[aware.jobs["status"] != "in-flight"]
    work = done.groupby("device_id")["work"].sum().sort_values(ascending=False)
    return {
        "accuracy": 1.0 - ends[0] / ends[1],
        "time": aware.to_s(min(ends)) / unaware.to_s(min(ends)),
        "failed": float((~done["status"].isin(["reported", "rejected"])).mean()),
        "top": float(work.iloc[: round(0.3 * N_PHONES)].sum() / work.sum()),
    }
