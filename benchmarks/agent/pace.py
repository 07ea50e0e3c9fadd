"""Learn how many jobs the agent has in flight, and how many updates make a step.

An episode is a whole training to a target, on recorded devices that agents learn from: the digits
of `real_training.py`, with examples, epochs, learning rate, skew, jobs in flight at most, and the
price of an hour drawn anew. It costs hours x price + device-hours, and an agent's two lines of
weights (`fedstale.agents.policy.how_many`) are judged by the mean logarithm of that over the cost
of the plain schedule: all jobs in flight, half of them a step. Whom to ask is the balanced rule's.

The weights are found by a separable CMA-ES: the few numbers are worth it, and what an episode costs
is no differentiable function of them. Five seeds learn, each in windows of its own, and the agent's
weights are the mean of theirs. Rules of two numbers or a ramp are searched for each price in the
windows of the first seed, as many as it has tried weights. Then all are played on other devices and
days: the mean against the rules, and each seed against the mean.

Reference:
    Ros, Hansen. A Simple Modification in CMA-ES Achieving Linear Time and Space Complexity. PPSN
    2008.

Seeds that are in the folder already are not trained again.

Run it with: python benchmarks/agent/pace.py RECORDINGS --out FOLDER --jobs 2
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tomli_w
from threadpoolctl import threadpool_limits

from fedstale import __version__
from fedstale.agents.env.episodes import AGES, Episodes, EpisodeSettings, JobKinds
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.windows import training_picks_of
from fedstale.agents.policy import by_heuristic
from fedstale.agents.policy.how_many import FACTS, KEPT, decided, facts, weights_in
from fedstale.strategies.types import Candidates
from fedstale.traces import DAY_S, Array, Index, Mask, stream
from fedstale.traces.forecast import embedded

sys.path.append(str(Path(__file__).parents[1]))
from agent.ratios import Row
from agent.real_training import TrainedScenario, TrainingSimulator, accuracy_of
from lab.fleets import ASSUMED, fleets
from lab.kept import played
from lab.results import commit, write_result
from lab.scenarios import DAYS, PARTS, SEED, STEP_S

COMMAND = "python benchmarks/agent/pace.py RECORDINGS --out FOLDER"
FLEETS = ("cars", "phones")
PRICES = (0.25, 1.0, 4.0)
"""Of an hour, in hours of all devices that may be at work."""
MINUTES = (2.0, 2.0, 8.0, 20.0)
"""Of a job on the median device."""
MOST = (3.0, 24.0)
"""Jobs in flight at most."""
EXAMPLES = (8.0, 120.0)
"""Of the mean device."""
EPOCHS = (1, 2, 5)
STEPS = 300.0
"""Examples of a job of the mean device at most, over its epochs."""
RATES = (0.05, 0.2)
OF_RANDOM = 0.95
"""The target: this share of the accuracy that random selection ends with."""
SMOOTHING_S = 300.0
"""Time constant of the accuracy that must reach the target."""
SETTINGS = EpisodeSettings(
    horizon=(60.0, 160.0),
    window_s=12 * 3600.0,
    rounds=2_000,
    budget_share=0.0,
    devices=(24, 150),
    keep_share=0.7,
    deadline_share=0.0,
    request_share=1.0,
    over_reporting_share=0.0,
    inflating_share=0.0,
    skew=(0.1, 1.0),
    spread=(0.2, 1.0),
)
WINDOWS, BATCHES = 64, 4
"""Episodes of a batch in each fleet, and batches of a seed that its generations take in turn."""
SEEDS, HELD_OUT = 5, 1000
"""Trainings, and the first seed of the windows that they are compared on."""
GENERATIONS, POPULATION = 25, 12
_LEAST_H = 0.02

Numbers = Callable[["Trainings", Index], tuple[Index, Index]]
"""From what is played, and rows of it, to jobs in flight and updates of the next step."""


class Trainings(TrainingSimulator):
    """Episodes that end at their target, with epochs and learning rates of their own."""

    def begin(self, episodes: Episodes, seed: int) -> None:
        """Begin episodes; epochs and rates follow from the seed."""
        b, rng = len(episodes), stream(seed, 91)
        mean = np.where(episodes.present, episodes.examples, 0.0).sum(axis=1)
        mean /= episodes.present.sum(axis=1)
        most = np.maximum(STEPS / mean, 1.0)
        self.epochs = np.minimum(rng.choice(EPOCHS, b), most).astype(np.int64)
        self.rates = _log_uniform(rng, RATES, b)
        own = replace(
            episodes,
            concurrency=episodes.concurrency.copy(),
            buffer_size=episodes.buffer_size.copy(),
        )
        self.most, self.accuracy = episodes.concurrency, np.full(b, 0.1)
        self.first_loss, self.loss = np.full(b, np.nan), np.full(b, np.nan)
        super().reset(own, np.arange(b))

    def facts(self, rows: Index, price: Array) -> Array:
        """Return what decisions in some episodes go by, see `how_many.facts`."""
        flat = (rows[:, None] * self.n + np.arange(self.n)).ravel()
        return facts(
            Candidates(flat, self.table, flat),
            self.mask[rows],
            most=self.most[rows],
            price=price[rows],
            fall=np.log(self.first_loss[rows] / self.loss[rows]),
            version=self.version[rows],
            keeps_stragglers=self.episodes.keeps_stragglers[rows],
        )

    def spent_by_now(self, rows: Index) -> Array:
        """Return the device-seconds of some episodes, those of jobs in flight among them."""
        out = np.clip(self.now[rows, None] - self.sent_at[rows], 0.0, self.spent_s[rows])
        working = np.where(self.in_flight[rows], out, 0.0)
        return np.asarray(self.worked_s[rows] + working.sum(axis=1))

    def _merge(self, rows: Index, accepted: Mask, weights: Array) -> tuple[Array, Array]:
        """Note the loss that a server sees, too."""
        examples = np.where(accepted, self.episodes.examples[rows], 0.0)
        seen = (examples * np.where(accepted, self.job_loss[rows], 0.0)).sum(axis=1)
        seen /= examples.sum(axis=1)
        first = np.where(np.isnan(self.first_loss[rows]), seen, self.first_loss[rows])
        before = np.where(np.isnan(self.loss[rows]), seen, self.loss[rows])
        self.first_loss[rows], self.loss[rows] = first, KEPT * before + (1.0 - KEPT) * seen
        return super()._merge(rows, accepted, weights)

    def _measure(self, rows: Index) -> tuple[Array, Array]:
        """Note the accuracy; there is no reward."""
        self.accuracy[rows] = accuracy_of(self.models[rows])
        return np.zeros(rows.size), np.zeros(rows.size)


class Places(TrainedScenario):
    """A scenario whose simulators play whole trainings."""

    def simulator(self, b: int) -> Trainings:
        """Make a simulator with room for b of this scenario's episodes at a time."""
        return Trainings(self, b)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Needed:
    """What episodes needed to their target, or to their end; shape (b,) each."""

    hours: Array
    device_hours: Array
    reached: Mask
    final: Array
    """Accuracy in the last tenth of the episode, of those that did not end before."""

    def costs(self, price: npt.ArrayLike, most: Index) -> Array:
        """Return the logarithms of hours x price + device-hours."""
        return np.log(np.maximum(self.hours * price * most + self.device_hours, _LEAST_H))


def play(
    simulator: Trainings,
    episodes: Episodes,
    numbers: Numbers,
    *,
    target: Array | None = None,
    seed: int = 0,
    selects: bool = True,
) -> Needed:
    """Play episodes to their targets, or to their ends if there are none.

    Args:
        simulator: with room for all.
        episodes: to play.
        numbers: decides for each server step.
        target: accuracy of each; shape (b,).
        seed: of the devices' epochs and rates, which are the episode's, and of the picks.
        selects: whether the balanced rule picks; else chance.
    """
    b, rows = len(episodes), np.arange(len(episodes))
    simulator.begin(episodes, seed)
    rng = stream(seed, 92)
    score = by_heuristic if selects else _by_chance
    pick = training_picks_of(simulator, score, rng)
    start, end = episodes.start, episodes.end
    mean, before, last = np.zeros(b), np.full(b, 0.1), start.copy()
    tail, final = end - 0.1 * (end - start), np.zeros(b)
    at, spent = np.full(b, np.nan), np.full(b, np.nan)
    live = rows[~simulator.done]
    while live.size:
        new = live[simulator.begins[live]]
        jobs, updates = numbers(simulator, new)
        simulator.episodes.concurrency[new] = jobs
        simulator.episodes.buffer_size[new] = np.minimum(updates, jobs)
        version, room = simulator.version[live].copy(), simulator.slots[live] > 0
        simulator.dispatch(live[room], pick(live[room]))
        nobody = np.zeros((int((~room).sum()), simulator.n), dtype=bool)
        simulator.dispatch(live[~room], nobody)
        simulator.advance(live)
        made = live[simulator.version[live] > version]
        now = simulator.now[made]
        mean[made] += (1.0 - np.exp(-(now - last[made]) / SMOOTHING_S)) * (
            before[made] - mean[made]
        )
        final[made] += np.maximum(now - np.maximum(last[made], tail[made]), 0.0) * before[made]
        last[made], before[made] = now, simulator.accuracy[made]
        if target is not None:
            there = made[mean[made] >= target[made]]
            at[there], spent[there] = simulator.now[there], simulator.spent_by_now(there)
            simulator.done[there] = True
        live = rows[~simulator.done]
    final += np.maximum(end - np.maximum(last, tail), 0.0) * before
    missed = np.isnan(at)
    hours = np.where(missed, np.minimum(simulator.now, end), at) - start
    device_s = np.where(missed, simulator.spent_by_now(rows), spent)
    return Needed(
        hours=hours / 3600.0,
        device_hours=device_s / 3600.0,
        reached=~missed,
        final=final / (end - tail),
    )


def plain(simulator: Trainings, rows: Index) -> tuple[Index, Index]:
    """Have all jobs in flight, and half of them a step."""
    most = simulator.most[rows]
    return most, np.maximum(most // 2, 1)


def learnt(weights: Array, price: Array) -> Numbers:
    """Decide by an agent's weights, at the price of each episode."""
    return lambda simulator, rows: decided(
        weights, simulator.facts(rows, price), simulator.most[rows]
    )


def ramp(share: float, every: float, last: float, updates: float) -> Numbers:
    """Decide by a rule: from a share of the jobs one more each `every` versions, to another share.

    Args:
        share: of the jobs beyond one at first.
        every: versions from one job more to the next.
        last: share of the jobs beyond one at most.
        updates: share of the jobs in flight beyond one that a step waits for.
    """

    def numbers(simulator: Trainings, rows: Index) -> tuple[Index, Index]:
        beyond = simulator.most[rows] - 1
        now = beyond * share + simulator.version[rows] / every
        jobs = np.rint(1 + np.minimum(now, beyond * max(last, share)))
        return jobs.astype(np.int64), np.rint(1 + (jobs - 1) * updates).astype(np.int64)

    return numbers


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """Episodes of one fleet, and what the plain schedule needs in them."""

    simulator: Trainings
    episodes: Episodes
    seed: int
    price: Array
    """Each of `PRICES` in turn; shape (b,)."""
    target: Array
    plain: Needed

    @classmethod
    def of(cls, place: Places, simulator: Trainings, n: int, seed: int) -> "Batch":
        """Draw n episodes, and play them by chance and by the plain schedule."""
        rng = stream(seed, 93)
        drawn = place.draw(n, rng)
        present = drawn.present.sum(axis=1)
        mean = np.where(drawn.present, drawn.examples, 0.0).sum(axis=1) / present
        wanted = _log_uniform(rng, EXAMPLES, n)[:, None]
        examples = np.maximum(np.rint(drawn.examples / mean[:, None] * wanted), 1.0)
        most = np.rint(_log_uniform(rng, MOST, n)).astype(np.int64)
        aged = (1.0 + np.arange(AGES)) ** -0.5
        episodes = replace(
            drawn,
            examples=examples,
            work_scale=examples / wanted,
            concurrency=np.clip(most, int(MOST[0]), np.maximum(present // 5, int(MOST[0]))),
            age_weights=np.where(rng.random((n, 1)) < 0.5, 1.0, aged),
        )
        by_chance = play(simulator, episodes, plain, seed=seed, selects=False)
        target = OF_RANDOM * by_chance.final
        return cls(
            simulator=simulator,
            episodes=episodes,
            seed=seed,
            price=np.array(PRICES)[np.arange(n) % len(PRICES)],
            target=target,
            plain=play(simulator, episodes, plain, target=target, seed=seed),
        )

    def played(self, numbers: Numbers) -> Needed:
        """Play the episodes to their targets."""
        return play(self.simulator, self.episodes, numbers, target=self.target, seed=self.seed)

    def costs(self, needed: Needed, price: npt.ArrayLike) -> Array:
        """Return logarithms of costs over those of the plain schedule; 0 where neither arrives."""
        most = self.episodes.concurrency
        more = needed.costs(price, most) - self.plain.costs(price, most)
        return np.where(needed.reached | self.plain.reached, more, 0.0)


def batches(recordings: Path, part: str, n: int, seeds: Sequence[int]) -> list[list[Batch]]:
    """Return batches, each of all fleets.

    Args:
        recordings: folder of the published files.
        part: "training" or "validation".
        n: episodes of each fleet.
        seeds: of each batch.
    """
    places = [_place(recordings, fleet, part) for fleet in FLEETS]
    simulators = [place.simulator(n) for place in places]
    return [
        [
            Batch.of(place, simulator, n, seed)
            for place, simulator in zip(places, simulators, strict=True)
        ]
        for seed in seeds
    ]


def _place(recordings: Path, fleet: str, part: str) -> Places:
    parts = fleets(recordings, seed=SEED, kind=fleet, assumed=ASSUMED)
    n, (first, last) = len(MINUTES), DAYS[fleet][part]
    kinds = JobKinds.of_fleet(
        parts["learn"], minutes=MINUTES, megabytes=(5.0,) * n, patience=(10.0,) * n
    )
    scenario = Scenario.of(
        parts[PARTS[part]],
        forecaster=embedded(fleet),
        start=first * DAY_S,
        end=last * DAY_S,
        kinds=kinds,
        settings=SETTINGS,
        step_s=2.0 * STEP_S[fleet],
    )
    return Places.like(scenario)


def first_weights() -> Array:
    """Return weights that have fewer jobs in flight where an hour costs less."""
    weights = np.zeros((2, len(FACTS)))
    weights[:, FACTS.index("one")] = 0.3, -1.6
    weights[:, FACTS.index("price")] = 1.6, 0.8
    return weights


def mean_cost(weights: Array, batch: Sequence[Batch]) -> float:
    """Return the mean logarithm of the costs by some weights, and a little for large ones."""
    found = [own.costs(own.played(learnt(weights, own.price)), own.price).mean() for own in batch]
    return float(np.mean(found) + 0.002 * np.mean(weights**2))


def search(
    first: Array,
    costs: Sequence[Callable[[Array], float]],
    generations: int,
    *,
    seed: int = 0,
    population: int = POPULATION,
    told: Callable[[int, Array], None] = lambda generation, weights: None,
) -> Array:
    """Return the weights that a separable CMA-ES with mirrored samples ends with.

    Args:
        first: weights to begin with; any shape.
        costs: of weights, which generations take in turn.
        generations: how many.
        seed: of the samples.
        population: weights that are tried in a generation, an even number.
        told: is told of each generation and the weights after it.
    """
    rng, n = np.random.default_rng(seed), first.size
    parents = population // 2
    shares = np.log(parents + 0.5) - np.log(np.arange(1, parents + 1))
    shares /= shares.sum()
    mass = 1.0 / (shares**2).sum()
    c_path, c_sigma = (4 + mass / n) / (n + 4 + 2 * mass / n), (mass + 2) / (n + mass + 5)
    c_one = 2 / ((n + 1.3) ** 2 + mass)
    c_mu = min(1 - c_one, 2 * (mass - 2 + 1 / mass) / ((n + 2) ** 2 + mass))
    c_one, c_mu = c_one * (n + 2) / 3, min(1 - c_one * (n + 2) / 3, c_mu * (n + 2) / 3)
    damping = 1 + 2 * max(0.0, np.sqrt((mass - 1) / (n + 1)) - 1) + c_sigma
    usual = np.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n * n))
    mean, sigma = first.ravel(), 0.5
    spread, path, sigma_path = np.ones(n), np.zeros(n), np.zeros(n)
    for generation in range(generations):
        began, half = time.monotonic(), rng.standard_normal((parents, n))
        drawn = np.concatenate([half, -half])
        tried = (mean + sigma * np.sqrt(spread) * drawn).reshape(-1, *first.shape)
        found = np.array([costs[generation % len(costs)](weights) for weights in tried])
        best = drawn[np.argsort(found)[:parents]]
        step = shares @ best
        mean = mean + sigma * np.sqrt(spread) * step
        sigma_path *= 1 - c_sigma
        sigma_path += np.sqrt(c_sigma * (2 - c_sigma) * mass) * step
        path = (1 - c_path) * path + np.sqrt(c_path * (2 - c_path) * mass * spread) * step
        moved = shares @ (spread * best**2)
        spread = (1 - c_one - c_mu) * spread + c_one * path**2 + c_mu * moved
        length = float(np.linalg.norm(sigma_path))
        sigma *= np.exp(min(0.3, c_sigma / damping * (length / usual - 1)))
        took = time.monotonic() - began
        at = f"{np.exp(found.min()):.3f}, mean {np.exp(found.mean()):.3f}"
        print(
            f"generation {generation + 1}: cost {at}, sigma {sigma:.2f}, {took:.0f} s", flush=True
        )
        told(generation + 1, mean.reshape(first.shape))
    return np.asarray(mean.reshape(first.shape))


def rules(n: int, seed: int = 0) -> list[tuple[float, float, float, float]]:
    """Return n rules of two numbers or a ramp: ones that are plain, and others at random."""
    never = 1e9
    found = [(s, never, s, k) for s in (0.0, 1 / 3, 0.5, 1.0) for k in (0.0, 0.25, 0.5)]
    found += [(0.0, every, 1.0, 0.0) for every in (12.0, 25.0, 50.0, 100.0)]
    rng = np.random.default_rng(seed)
    while len(found) < n:
        every = float(_log_uniform(rng, (8.0, 200.0), 1)[0])
        found.append(
            (
                rng.choice([0.0, 0.2, 0.4, 0.7]),
                every,
                rng.choice([0.3, 0.6, 1.0]),
                rng.choice([0.0, 0.25, 0.5]),
            )
        )
    return found[:n]


def costs_of_rule(rule: tuple[float, float, float, float], batch: Sequence[Batch]) -> Array:
    """Return the mean logarithm of a rule's costs at each of `PRICES`."""
    needed = [own.played(ramp(*rule)) for own in batch]
    return np.array(
        [
            np.mean(
                [own.costs(each, price).mean() for own, each in zip(batch, needed, strict=True)]
            )
            for price in PRICES
        ]
    )


def best_rules(
    batched: Sequence[Sequence[Batch]], n: int, *, jobs: int
) -> list[tuple[float, float, float, float]]:
    """Return the best of n rules at each of `PRICES`: of the best in one batch, in all."""
    tried = rules(n)
    found = np.array(_mapped(partial(costs_of_rule, batch=batched[0]), tried, jobs))
    best = []
    for i in range(len(PRICES)):
        finalists = [tried[j] for j in np.argsort(found[:, i])[:5]]
        again = [_mapped(partial(costs_of_rule, batch=b), finalists, jobs) for b in batched]
        best.append(finalists[int(np.mean(again, axis=0)[:, i].argmin())])
    return best


def _mapped(function: Callable[[Any], Any], arguments: Sequence[Any], jobs: int) -> list[Any]:
    """Map in processes, which share what is in memory."""
    global _FUNCTION  # noqa: PLW0603 - forked processes inherit it, and batches are not sent
    _FUNCTION = function
    with get_context("fork").Pool(jobs) as pool:
        return pool.map(_called, arguments, chunksize=1)


_FUNCTION: Callable[[Any], Any]


def _called(argument: Any) -> Any:
    with threadpool_limits(1):
        return _FUNCTION(argument)


def _by_chance(given: object, mask: Mask, rng: np.random.Generator) -> Array:
    del given
    return rng.random(mask.shape)


def _log_uniform(rng: np.random.Generator, pair: tuple[float, float], n: int) -> Array:
    return np.exp(rng.uniform(np.log(pair[0]), np.log(pair[1]), n))


def learn(
    recordings: Path,
    seed: int,
    generations: int,
    *,
    n: int,
    n_batches: int,
    population: int,
    out: Path,
) -> Array:
    """Return the weights of a seed; those in a file of as many generations are not learnt again.

    Args:
        recordings: folder of the published files.
        seed: of the samples, and the first of the windows.
        generations: how many.
        n: episodes of a batch in each fleet.
        n_batches: that generations take in turn.
        population: weights that are tried in a generation.
        out: file of the weights, which is written after each generation.
    """
    if out.exists() and f"generation = {generations}\n" in out.read_text(encoding="utf-8"):
        return weights_in(out)
    with threadpool_limits(1):
        learning = batches(
            recordings, "training", n, range(seed * n_batches, (seed + 1) * n_batches)
        )
        costs = [partial(mean_cost, batch=batch) for batch in learning]

        def told(generation: int, weights: Array) -> None:
            write_weights(out, weights, seed=seed, generation=generation)

        return search(
            first_weights(), costs, generations, seed=seed, population=population, told=told
        )


def write_weights(path: Path, weights: Array, **about: int) -> None:
    """Write weights as pace.toml of the agent has them."""
    provenance = {
        "made_by": COMMAND,
        "fedstale": __version__,
        "commit": commit(),
        "learnt_on": list(FLEETS),
        **about,
    }
    own = {
        of: {name: round(float(x), 4) for name, x in zip(FACTS, row, strict=True)}
        for of, row in zip(("jobs", "updates"), weights, strict=True)
    }
    path.write_text(tomli_w.dumps({"provenance": provenance, **own}), encoding="utf-8")


def compared(one: Array, other: Array, about: Row) -> Row:
    """Return a row: costs of two, and the ratio of the first to the second with its interval."""
    more = one - other
    half = 1.96 * more.std(ddof=1) / np.sqrt(more.size)
    row = {
        **about,
        "cost": round(float(np.exp(one.mean())), 3),
        "of": round(float(np.exp(other.mean())), 3),
        "ratio": [round(float(np.exp(more.mean() + x)), 3) for x in (0.0, -half, half)],
        "episodes": more.size,
    }
    print(row, flush=True)
    return row


def main() -> None:
    """Train, validate, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument(
        "--quick", action="store_true", help="two seeds, a generation, few episodes"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--generations", type=int, default=GENERATIONS)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    quick = options.quick
    n, n_batches = (6, 1) if quick else (WINDOWS, BATCHES)
    seeds, generations, population = (
        (2, 1, 2) if quick else (options.seeds, options.generations, POPULATION)
    )
    tasks = [
        (
            seed,
            partial(
                learn,
                options.recordings,
                seed,
                generations,
                n=n,
                n_batches=n_batches,
                population=population,
                out=options.out / f"seed-{seed}.toml",
            ),
        )
        for seed in range(seeds)
    ]
    found = dict(played(tasks, options.jobs))
    mean = np.mean([found[seed] for seed in range(seeds)], axis=0)
    write_weights(options.out / "pace.toml", mean, seeds=seeds, generation=generations)
    learning = batches(options.recordings, "training", n, range(n_batches))
    ruled = best_rules(learning, generations * population, jobs=options.jobs)
    held_out = batches(options.recordings, "validation", n, range(HELD_OUT, HELD_OUT + n_batches))
    own = [b for batch in held_out for b in batch]
    rows = []
    for price, rule in zip(PRICES, ruled, strict=True):

        def costs(numbers: Callable[[Batch], Numbers], price: float = price) -> Array:
            return np.concatenate([b.costs(b.played(numbers(b)), price) for b in own])

        def of(weights: Array, price: float = price) -> Array:
            return costs(lambda b: learnt(weights, 0 * b.price + price))

        agent, by_rule = of(mean), costs(lambda b, rule=rule: ramp(*rule))
        about = {"price": price, "rule": [round(float(x), 3) for x in rule]}
        rows.append(compared(agent, by_rule, {"about": "rule", **about}))
        rows += [
            compared(of(found[seed]), agent, {"about": "seed", "price": price, "seed": seed})
            for seed in range(seeds)
        ]
    name = "agent_pace-quick" if quick else "agent_pace"
    print(write_result(name, rows, command=COMMAND + " --quick" * quick))


if __name__ == "__main__":
    main()
