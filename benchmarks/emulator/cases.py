"""Runs that an emulator of the simulation learns from: a fleet, an app, a job and a schedule each.

Fleets are generated (phones, desktops and sites whose sessions, links and speeds are stretched, and
devices that are always online) or recorded (`lab.fleets`). Apps are quadratics, whose loss is
known in closed form, so that a run is little but its simulation; and `digits`.

A quadratic has ten classes. The loss of class k is sum_j h_kj (w_j - m_kj)^2 / 2; a device holds
classes in shares drawn by Dirichlet(alpha), as digits are dealt, and takes `STEPS` steps of
gradient descent, whose end has a closed form in each coordinate, plus noise.

How hard a target is, is stated in rounds: so many fresh means of ten devices chosen by chance reach
it. Targets of quadratics are shares of the first excess loss, those of digits accuracies. Both are
means over three versions.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedstale.simulation import Costs, Executor, InlineExecutor, RunEnded, TraceGrid
from fedstale.strategies import FedBuff, StaleStrategy
from fedstale.strategies.schedule import k_sync
from fedstale.strategies.selection import BALANCED, Enough, ExpectedUtility, Random
from fedstale.traces import Availability, Series, TraceSet
from fedstale.traces.arrays import DAY_S
from fedstale.traces.synthetic.population import load
from fedstale.traces.trace_set import numbered
from lab.apps import opened
from lab.fleets import ASSUMED, fleets, span
from lab.training import FIRST_NODE, work_of

GENERATED, RECORDED = ("phones", "desktops", "sites", "constant"), ("phones", "desktops", "cars")
SHARES, WRONG = (0.3, 0.1, 0.03), (0.4, 0.25, 0.15)
"""Targets: excess loss over the first, and wrong answers."""
DAYS, MOST_JOBS, MOST_ROUNDS, STEPS, SMOOTHED = 3, 500, 100, 20, 3
"""A run ends at the last target, after some days, or after so many jobs."""
REFERENCE = 10
"""Devices of a round of the reference."""
N_APPS, N_CLASSES, N_WEIGHTS = 8, 10, 20
SPENT = ["download_s", "compute_s", "upload_s"]
FloatArray = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run."""

    fleet: str
    """KIND:NUMBER of a generated one, or recorded-KIND:PART:NUMBER."""
    app: str
    """quadratics:NUMBER, or digits:ALPHA:RATE, with the rate as a multiple of the app's own."""
    minutes: float
    """Training of the mean device at the fleet's median speed."""
    megabytes: float
    """Of a message, and of a reply."""
    patience: float
    """Time-out, in such trainings and a minute."""
    keeps: bool
    """FedBuff, which keeps late jobs; or K-sync, which cancels them."""
    concurrency: int
    buffer_size: int
    balanced: bool
    """Whom: the balanced rule, or by chance."""
    seed: int

    @property
    def timeout_s(self) -> float:
        """Time-out of a message in s."""
        return max(300.0, self.patience * 60.0 * (self.minutes + 1.0))


@lru_cache(maxsize=4)
def fleet(name: str, recordings: Path) -> TraceSet:
    """Return the devices of a name, with the hour at which runs begin as instant 0."""
    kind, *part, number = name.split(":")
    rng = np.random.default_rng((int(number), len(part), sum(map(ord, kind))))
    if part:
        whole = _recorded(recordings, kind.removeprefix("recorded-"))[part[0]]
        n = int(np.exp(rng.uniform(np.log(30), np.log(min(200, whole.n_devices)))))
        start = rng.uniform(0.0, max(span(whole) - DAY_S, DAY_S))
        some = np.sort(rng.choice(whole.n_devices, n, replace=False))
        return whole.between(start, start + (DAYS + 1) * DAY_S).take(some)
    n = int(np.exp(rng.uniform(np.log(12), np.log(200))))
    spread, stretch, links = rng.uniform(0, 1), np.exp(rng.normal(0, 0.7)), rng.normal(0, 1)
    if kind == "constant":
        rates = np.exp(rng.normal(0, spread, (3, n)) + np.log([[1.0], [2e7], [1e7]]))
        compute, down, up = (Series.constant(x) for x in rates)
        return TraceSet(
            device_ids=numbered("device", n),
            availability=Availability.always(n),
            compute=compute,
            downlink=down,
            uplink=up,
        )
    population = load(kind)

    def stretched(quantiles: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(stretch * x for x in each) for each in quantiles)

    groups = tuple(
        replace(each, session_s=stretched(each.session_s), gap_s=stretched(each.gap_s))
        for each in population.availability.groups
    )
    log = np.log(population.speed)
    speeds = np.exp(log.mean() + 2 * spread * (log - log.mean()))
    changed = replace(
        population,
        availability=replace(population.availability, groups=groups),
        links=replace(population.links, median_log=population.links.median_log + links),
        speed=tuple(speeds.tolist()),
    )
    made = TraceSet.synthetic(n, seed=int(number), days=7, population=changed)
    start = rng.uniform(0.0, 3 * DAY_S)
    return made.between(start, start + (DAYS + 1) * DAY_S)


@cache
def _recorded(recordings: Path, kind: str) -> dict[str, TraceSet]:
    return fleets(recordings, 0, kind, assumed=ASSUMED)


@lru_cache(maxsize=8)
def work_of_minute(name: str, recordings: Path) -> float:
    """Return the work units of a minute at the median speed of a fleet."""
    return work_of(fleet(name, recordings), 1.0)


class Quadratics:
    """Apps whose losses have a closed form, trained as one model; see the top of the file.

    Apps differ in skew, learning rate, curvature and noise; the reference of each has rate 1.
    """

    def __init__(self, number: int, n: int) -> None:
        """Deal classes to n devices; the number draws everything."""
        rng, shape = np.random.default_rng((number, n)), (N_APPS, N_CLASSES, N_WEIGHTS)
        self.alphas = rng.choice([0.1, 0.3, 1.0, 10.0], N_APPS)
        others = np.exp(rng.uniform(-1.4, 1.4, N_APPS))
        self.rates = np.where(rng.random(N_APPS) < 0.5, 1.0, others)
        self.targets = SHARES
        spread = rng.uniform(0.3, 3.0, (N_APPS, 1, 1))
        lowest = -np.log(rng.uniform(2, 30, (N_APPS, 1, 1)))
        curvature = np.exp(lowest * rng.random((N_APPS, 1, N_WEIGHTS)))
        h = curvature * np.exp(rng.normal(0, 0.3, shape))
        m = spread * rng.normal(0, 1, shape)
        shares = np.stack([rng.dirichlet(np.full(N_CLASSES, a), n) for a in self.alphas], axis=1)
        self.examples = np.exp(rng.normal(0, 0.3, n))
        self._h = np.einsum("nak,akw->naw", shares, h)
        """Of each device and app; shape (n, apps, weights)."""
        self._optimum = np.einsum("nak,akw->naw", shares, h * m) / self._h
        weights = self.examples / self.examples.sum()
        self._all = np.einsum("n,naw->aw", weights, self._h)
        self._best = np.einsum("n,naw->aw", weights, self._h * self._optimum) / self._all
        self._noise = rng.choice([0.0, 0.1, 0.3], (N_APPS, 1)) * spread[:, 0]
        # So far goes a job in the steepest coordinate.
        far = np.exp(rng.uniform(np.log(0.05), np.log(0.9), (N_APPS, 1)))
        self._rate = (1 - (1 - far) ** (1 / STEPS)) / self._h.max(axis=(0, 2))[:, None]
        self._first = self._best + 3.0 * rng.normal(0, 1, (N_APPS, N_WEIGHTS))
        self._first_loss = (self._all * (self._first - self._best) ** 2).sum(axis=1)
        self._left = {one: self._kept(r) for one, r in ((True, 1.0), (False, self.rates[:, None]))}

    def _kept(self, rate: Any) -> FloatArray:
        """Return what a job leaves of the way to a device's optimum; at most all of it."""
        return np.asarray(np.clip(1.0 - rate * self._rate * self._h, -1.0, 1.0) ** STEPS)

    def initial(self, seed: int) -> ArrayRecord:
        """Return the first models."""
        return ArrayRecord({"w": Array(self._first)})

    def trained(
        self, w: FloatArray, device: int, rng: np.random.Generator, *, reference: bool = False
    ) -> FloatArray:
        """Return the models that a device ends at; shape (apps, weights)."""
        left = self._left[reference][device]
        noise = self._noise * (1 - left) * rng.normal(0, 1, w.shape)
        return np.asarray(self._optimum[device] + left * (w - self._optimum[device]) + noise)

    def scores(self, w: FloatArray) -> FloatArray:
        """Return the excess losses over those of the first models; shape (apps,)."""
        return np.asarray((self._all * (w - self._best) ** 2).sum(axis=1) / self._first_loss)

    def executor(self, seed: int) -> Executor:
        """Return what trains devices."""
        app, rng = ClientApp(), np.random.default_rng((seed, 8))

        @app.train()
        def train(message: Message, context: Context) -> Message:
            device = int(context.node_config["partition-id"])
            w = message.content.array_records["arrays"]["w"].numpy()
            loss = float((self._h[device] * (w - self._optimum[device]) ** 2).sum())
            n = max(round(50 * self.examples[device]), 1)
            metrics = MetricRecord({"train_loss": loss, "num-examples": n})
            arrays = ArrayRecord({"w": Array(self.trained(w, device, rng))})
            return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

        return InlineExecutor(app)

    def rounds(self) -> list[list[int | None]]:
        """Return in how many rounds of fresh means each app reaches each target; None if never."""
        found: list[FloatArray] = []
        for repeat in range(3):
            rng, w = np.random.default_rng((repeat, 5)), self._first
            n, scores = len(self.examples), [np.ones(N_APPS)]
            for _ in range(MOST_ROUNDS):
                some = rng.permutation(n)[:REFERENCE]
                each = np.array([self.trained(w, i, rng, reference=True) for i in some])
                w = np.average(each, axis=0, weights=self.examples[some])
                scores.append(self.scores(w))
            found.append(reached(np.array(scores), SHARES))
        middle = np.median(found, axis=0)
        return [[None if x == np.inf else round(x) for x in own] for own in middle]


def reached(scores: FloatArray, targets: Sequence[float]) -> FloatArray:
    """Return the version of each app at which means over versions reach each target; else inf.

    Args:
        scores: excess losses by version; shape (versions, apps).
        targets: shares of the first excess.

    Returns:
        Shape (apps, targets).
    """
    if len(scores) < SMOOTHED:
        return np.full((scores.shape[1], len(targets)), np.inf)
    means = np.mean([scores[i : len(scores) - SMOOTHED + 1 + i] for i in range(SMOOTHED)], axis=0)
    is_there = means[:, :, None] <= np.array(targets)
    first = is_there.argmax(axis=0) + SMOOTHED - 1.0
    return np.where(is_there.any(axis=0), first, np.inf)


class Digits:
    """The app `digits` as benchmarks train it; its scores are shares of wrong answers."""

    targets = WRONG

    def __init__(self, n: int, alpha: float, rate: float) -> None:
        """Deal digits to n devices."""
        self._app, self._n, self._seed = opened("digits"), n, 1
        self.alphas, self.rates = np.array([alpha]), np.array([rate])
        examples = self._app.examples(n, alpha, self._seed)
        self.examples = examples / examples.mean()

    def initial(self, seed: int) -> ArrayRecord:
        """Return the first model."""
        return self._app.initial(seed)

    @property
    def config(self) -> dict[str, Any]:
        """The run config."""
        own = self._app.config(float(self.alphas[0]), self._seed)
        return own | {"learning-rate": float(self.rates[0]) * float(own["learning-rate"])}

    def executor(self, seed: int) -> Executor:
        """Return what trains devices."""
        return self._app.executor()

    def scores_of(self, arrays: ArrayRecord) -> FloatArray:
        """Return the share of wrong answers on the app's test set; shape (1,)."""
        return np.array([1.0 - self._app.evaluate(arrays, self._seed)[0]])


@cache
def _rounds_of_digits(n: int, alpha: float) -> list[list[int | None]]:
    """Return in how many rounds of fresh means each target is reached; None if never."""
    app, scores = Digits(n, alpha, 1.0), list[FloatArray]()

    def evaluate(version: int, arrays: ArrayRecord) -> None:
        scores.append(app.scores_of(arrays))
        if (reached(np.array(scores), WRONG) < np.inf).all():
            raise RunEnded("reached")

    grid = TraceGrid(
        TraceSet.ideal(n),
        app.executor(0),
        costs=Costs(constant_replies=True),
        work=lambda message: 1.0,
        run_config=app.config,
    )
    schedule = k_sync(min(REFERENCE, n), min(REFERENCE, n))
    with grid.running(is_ours=True), suppress(RunEnded):
        StaleStrategy(schedule=schedule, seed=1).start(
            grid, app.initial(1), MOST_ROUNDS, evaluate_fn=evaluate
        )
    found = reached(np.array(scores), WRONG)
    return [[None if x == np.inf else round(x) for x in own] for own in found]


@lru_cache(maxsize=8)
def quadratics(number: int, n: int) -> tuple[Quadratics, list[list[int | None]]]:
    """Return apps on n devices, and the rounds of their targets."""
    made = Quadratics(number, n)
    return made, made.rounds()


def apps_of(case: Case, n: int) -> tuple[Any, list[list[int | None]]]:
    """Return the apps of a case on n devices, and the rounds of the targets of each."""
    kind, *rest = case.app.split(":")
    if kind == "quadratics":
        return quadratics(int(rest[0]), n)
    alpha, rate = map(float, rest)
    return Digits(n, alpha, rate), _rounds_of_digits(n, alpha)


def play(case: Case, recordings: Path) -> dict[str, Any]:
    """Run a case.

    Returns:
        For each app `alpha`, `rate`, `rounds` of each target, and `reached`, what each took, or
        None; and the same of all at the `end`.
    """
    traces = fleet(case.fleet, recordings)
    app, rounds = apps_of(case, traces.n_devices)
    work = case.minutes * work_of_minute(case.fleet, recordings)
    is_digits, sent = isinstance(app, Digits), [0]
    scores, at = list[FloatArray](), list[float]()

    def evaluate(version: int, arrays: ArrayRecord) -> None:
        scores.append(app.scores_of(arrays) if is_digits else app.scores(arrays["w"].numpy()))
        at.append(grid.now())
        is_done = len(scores) % 5 == 0 and (reached(np.array(scores), app.targets) < np.inf).all()
        if is_done or sent[0] > MOST_JOBS:
            raise RunEnded("enough")

    def work_of_job(message: Message) -> float:
        sent[0] += 1
        if sent[0] > 2 * MOST_JOBS:
            raise RunEnded("enough")
        return float(work * app.examples[message.metadata.dst_node_id - FIRST_NODE])

    grid = TraceGrid(
        traces,
        app.executor(case.seed),
        costs=Costs(model_bytes=round(case.megabytes * 1e6), constant_replies=True),
        work=work_of_job,
        seed=case.seed,
        run_config=app.config if is_digits else {},
        until_s=DAYS * DAY_S,
    )
    selector = Enough(ExpectedUtility(BALANCED)) if case.balanced else Random()
    jobs, size = case.concurrency, case.buffer_size
    strategy = (
        FedBuff(jobs, size, selector=selector, seed=case.seed)
        if case.keeps
        else StaleStrategy(schedule=k_sync(jobs, size), selector=selector, seed=case.seed)
    )
    with grid.running(is_ours=True), suppress(RunEnded), np.errstate(all="ignore"):
        strategy.start(grid, app.initial(case.seed), 10**6, case.timeout_s, evaluate_fn=evaluate)
    events = grid.events().to_pandas()
    spent = events[SPENT].sum(axis=1).to_numpy()
    begun, merged = events["started_at"].to_numpy(), events["aggregated_version"].to_numpy()
    ended = np.where(events["status"] != "in-flight", events["ended_at"].to_numpy(), np.inf)

    def needed(version: float, now: float) -> dict[str, Any]:
        used = (merged > 0) & (merged <= version)
        total = float(np.clip(now - begun, 0.0, spent).sum())
        stale = events["staleness"].to_numpy()[used]
        middle, high = np.quantile(stale, [0.5, 0.9]) if stale.size else (0.0, 0.0)
        return {
            "steps": version,
            "hours": now / 3600,
            "device_hours": total / 3600,
            "wasted": float(spent[~used & (ended <= now)].sum()) / total if total else 0.0,
            "stale_50": float(middle),
            "stale_90": float(high),
        }

    when = reached(np.array(scores), app.targets)
    return {
        "apps": [
            {
                "alpha": float(alpha),
                "rate": float(rate),
                "rounds": own,
                "reached": [None if v == np.inf else needed(v, at[int(v)]) for v in versions],
            }
            for alpha, rate, own, versions in zip(app.alphas, app.rates, rounds, when, strict=True)
        ],
        "end": needed(len(scores) - 1, grid.now()) | {"jobs": len(events)},
    }


def drawn(name: str, part: str, recordings: Path) -> list[Case]:
    """Draw the cases of a fleet: of tests one job with many schedules, else several jobs."""
    n, rng = fleet(name, recordings).n_devices, np.random.default_rng((*map(ord, name), 3))
    found = []
    for job in range(1 if part == "test" else 3):
        app = f"quadratics:{int(rng.integers(10**6))}"
        minutes = round(float(np.exp(rng.uniform(np.log(0.5), np.log(20)))), 2)
        megabytes = round(float(np.exp(rng.uniform(np.log(0.2), np.log(50)))), 2)
        patience = float(rng.choice([3.0, 10.0, 30.0]))
        for i in range(10 if part == "test" else 2):
            jobs = round(float(np.exp(rng.uniform(np.log(2), np.log(min(64, n))))))
            share = rng.choice([0.0, 0.25, 0.5, 0.75, 1.0])
            found.append(
                Case(
                    fleet=name,
                    app=app,
                    minutes=minutes,
                    megabytes=megabytes,
                    patience=patience,
                    keeps=bool(rng.random() < 0.55),
                    concurrency=jobs,
                    buffer_size=max(round(share * jobs), 1),
                    balanced=bool(rng.random() < 0.25),
                    seed=100 * job + i,
                )
            )
    return found


def of_digits(name: str, part: str, recordings: Path) -> list[Case]:
    """Return cases of digits on a fleet: of tests a grid of settings, else a few that are drawn."""
    cases, rng = drawn(name, part, recordings), np.random.default_rng((*map(ord, name), 4))
    alpha = float(rng.choice([0.3, 1.0]))
    if part != "test":
        rates = rng.choice([0.3, 1.0, 3.0], len(cases))
        return [
            replace(each, app=f"digits:{alpha}:{rate}")
            for each, rate in list(zip(cases, rates, strict=True))[::3]
        ]
    own = {"minutes": 2.0, "megabytes": 5.0, "patience": 10.0}
    return [
        Case(
            fleet=name,
            app=f"digits:{alpha}:{rate}",
            **own,
            seed=number,
            keeps=keeps,
            concurrency=jobs,
            buffer_size=max(round(share * jobs), 1),
            balanced=False,
        )
        for number, (keeps, jobs, share, rate) in enumerate(
            product((True, False), (4, 16), (0.0, 0.5, 1.0), (0.3, 1.0, 3.0))
        )
        if keeps or share
    ]


def key(case: Case) -> dict[str, Any]:
    """Return what identifies a run."""
    return asdict(case)


Played = Callable[[Case], dict[str, Any]]
