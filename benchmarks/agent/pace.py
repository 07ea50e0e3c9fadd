"""Learn how many jobs the agent has in flight, and how many updates make a step.

An episode is a whole training to a target (`whole_trainings.py`). An agent's two lines of weights
(`fedstale.agents.policy.how_many`) are judged by the mean logarithm of what episodes cost, each at
a price of an hour of its own.

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
from functools import partial
from pathlib import Path

import numpy as np
import tomli_w
from threadpoolctl import threadpool_limits

from fedstale import __version__
from fedstale.agents.env.scenario import log_uniform
from fedstale.agents.policy.how_many import FACTS, weights_in
from fedstale.traces import Array

sys.path.append(str(Path(__file__).parents[1]))
from agent.ratios import Row
from agent.whole_trainings import FLEETS, PRICES, Batch, Fleets, learnt, ramp
from lab.kept import played
from lab.results import commit, write_result

COMMAND = "python benchmarks/agent/pace.py RECORDINGS --out FOLDER"
WINDOWS, BATCHES = 48, 4
"""Episodes of a batch in each fleet, and batches of a seed that its generations take in turn."""
SEEDS, HELD_OUT = 5, 1000
"""Trainings, and the first seed of the windows that they are compared on."""
GENERATIONS, POPULATION = 24, 12
FINALISTS = 12
"""Rules of those that are best in one batch, which play in all."""
RULES = -1
"""In place of a seed: the search among rules."""


def first_weights() -> Array:
    """Return weights that have fewer jobs in flight where an hour costs less."""
    weights = np.zeros((2, len(FACTS)))
    weights[:, FACTS.index("one")] = 0.3, -1.6
    weights[:, FACTS.index("price")] = 1.6, 0.8
    return weights


def mean_costs(tried: Array, batch: Sequence[Batch]) -> Array:
    """Return mean logarithms of costs by some weights, and a little for large ones.

    Args:
        tried: shape (k, 2, facts).
        batch: of each fleet.

    Returns:
        Shape (k,).
    """
    found = [
        own.costs(
            partial(learnt, price=np.tile(own.price, len(tried))), tried, own.price[None]
        ).mean(axis=(0, 2))
        for own in batch
    ]
    return np.asarray(np.mean(found, axis=0) + 0.002 * np.mean(tried**2, axis=(1, 2)))


def search(
    first: Array,
    costs: Sequence[Callable[[Array], Array]],
    generations: int,
    *,
    seed: int = 0,
    population: int = POPULATION,
    told: Callable[[int, Array], None] = lambda generation, weights: None,
) -> Array:
    """Return the weights that a separable CMA-ES with mirrored samples ends with.

    Args:
        first: weights to begin with; any shape.
        costs: of k weights, shape (k, ...), which generations take in turn.
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
        found = costs[generation % len(costs)](tried)
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


def rules(n: int, seed: int = 0) -> Array:
    """Return n rules of two numbers or a ramp: ones that are plain, and others at random.

    Returns:
        Shape (n, 4), as in `ramp`.
    """
    never = 1e9
    found = [(s, never, s, k) for s in (0.0, 1 / 3, 0.5, 1.0) for k in (0.0, 0.25, 0.5)]
    found += [(0.0, every, 1.0, 0.0) for every in (12.0, 25.0, 50.0, 100.0)]
    rng = np.random.default_rng(seed)
    while len(found) < n:
        every = float(log_uniform(rng, (8.0, 200.0), 1)[0])
        found.append(
            (
                rng.choice([0.0, 0.2, 0.4, 0.7]),
                every,
                rng.choice([0.3, 0.6, 1.0]),
                rng.choice([0.0, 0.25, 0.5]),
            )
        )
    return np.array(found[:n])


def costs_of_rules(tried: Array, batch: Sequence[Batch]) -> Array:
    """Return mean logarithms of the costs of k rules at each of `PRICES`; shape (prices, k)."""
    parts = [tried[i : i + POPULATION] for i in range(0, len(tried), POPULATION)]
    found = [
        np.concatenate(
            [
                own.costs(ramp, part, np.outer(PRICES, np.ones_like(own.price))).mean(axis=2)
                for part in parts
            ],
            axis=1,
        )
        for own in batch
    ]
    return np.asarray(np.mean(found, axis=0))


def best_rules(fleets: Fleets, n: int, *, episodes: int, n_batches: int) -> Array:
    """Return the best of n rules at each of `PRICES`: of the best in one batch, in all.

    Args:
        fleets: to learn on.
        n: rules.
        episodes: of a batch in each fleet.
        n_batches: of the first seed.

    Returns:
        Shape (prices, 4).
    """
    tried, best = rules(n), []
    with threadpool_limits(1):
        learning = fleets.batches("training", episodes, range(n_batches), room=POPULATION)
        for i, found in enumerate(costs_of_rules(tried, learning[0])):
            finalists = tried[np.argsort(found)[:FINALISTS]]
            again = [costs_of_rules(finalists, batch)[i] for batch in learning]
            best.append(finalists[np.mean(again, axis=0).argmin()])
    return np.array(best)


def learn(
    fleets: Fleets,
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
        fleets: to learn on.
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
        learning = fleets.batches(
            "training",
            n,
            range(seed * n_batches, (seed + 1) * n_batches),
            room=population,
        )
        costs = [partial(mean_costs, batch=batch) for batch in learning]

        def told(generation: int, weights: Array) -> None:
            write_weights(out, fleets, weights, seed=seed, generation=generation)

        search(first_weights(), costs, generations, seed=seed, population=population, told=told)
    return weights_in(out)


def write_weights(path: Path, fleets: Fleets, weights: Array, **about: int) -> None:
    """Write weights as pace.toml of the agent has them."""
    own = [file.name for file in fleets.traces]
    provenance = {
        "made_by": COMMAND,
        "fedstale": __version__,
        "commit": commit(),
        "learnt_on": own or list(FLEETS),
        **about,
    }
    own = {
        of: {name: round(float(x), 4) for name, x in zip(FACTS, row, strict=True)}
        for of, row in zip(("jobs", "updates"), weights, strict=True)
    }
    path.write_text(tomli_w.dumps({"provenance": provenance, **own}), encoding="utf-8")


def in_words(rule: Sequence[float]) -> str:
    """Describe a rule, see `ramp`."""
    share, every, last, updates = rule
    more = f", one more each {every:.0f} versions up to {last:.0%}" if last > share else ""
    return f"{share:.0%} of the jobs beyond one at first{more}; a step waits for {updates:.0%}"


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
    parser.add_argument("recordings", type=Path, nargs="?", help="folder of the published files")
    parser.add_argument("--traces", type=Path, nargs="+", default=[], help="files of one's own")
    parser.add_argument("--forecaster", default="phones", help="fleet of an embedded forecaster")
    parser.add_argument(
        "--quick", action="store_true", help="two seeds, a generation, few episodes"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--generations", type=int, default=GENERATIONS)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    if (options.recordings is None) == (not options.traces):
        parser.error("expected RECORDINGS, or --traces with files of your own")
    fleets = Fleets(
        recordings=options.recordings, traces=options.traces, forecaster=options.forecaster
    )
    options.out.mkdir(parents=True, exist_ok=True)
    quick = options.quick
    n, n_batches = (6, 1) if quick else (WINDOWS, BATCHES)
    seeds, generations, population = (
        (2, 1, 2) if quick else (options.seeds, options.generations, POPULATION)
    )
    size = {"n": n, "n_batches": n_batches, "population": population}
    tasks: list[tuple[int, Callable[[], Array]]] = [
        (
            seed,
            partial(
                learn,
                fleets,
                seed,
                generations,
                **size,
                out=options.out / f"seed-{seed}.toml",
            ),
        )
        for seed in range(seeds)
    ]
    tried = generations * population
    search_rules = partial(best_rules, fleets, tried, episodes=n, n_batches=n_batches)
    found = dict(played([*tasks, (RULES, search_rules)], options.jobs))
    ruled = found.pop(RULES)
    agents = np.array([found[seed] for seed in range(seeds)])
    mean = agents.mean(axis=0)
    write_weights(options.out / "pace.toml", fleets, mean, seeds=seeds, generation=generations)
    held_out = fleets.batches(
        "validation", n, range(HELD_OUT, HELD_OUT + n_batches), room=seeds + 1
    )
    own = [b for batch in held_out for b in batch]
    everybody = np.concatenate([mean[None], agents])
    rows = []
    for price, rule in zip(PRICES, ruled, strict=True):
        at = np.full((1, n), price)
        tried_at = partial(learnt, price=np.full(len(everybody) * n, price))
        by_rule = np.concatenate([b.costs(ramp, rule[None], at)[0, 0] for b in own])
        by_agents = np.concatenate([b.costs(tried_at, everybody, at)[0] for b in own], axis=1)
        about = {"price": price, "rule": [round(float(x), 3) for x in rule]}
        rows.append(compared(by_agents[0], by_rule, {"about": "rule", **about}))
        rows += [
            compared(each, by_agents[0], {"about": "seed", "price": price, "seed": seed})
            for seed, each in enumerate(by_agents[1:])
        ]
    for row in rows:
        if row["about"] == "rule" and row["ratio"][2] > 1.0:
            print(f"no better than a rule at price {row['price']}: {in_words(row['rule'])}")
    if options.traces:
        return
    print(write_result("agent_pace", rows, command=COMMAND, quick=quick))


if __name__ == "__main__":
    main()
