"""Compare a trained agent with other policies on held-out windows.

Every contender plays each window from its beginning with the same devices, data, jobs and noise, so
differences are taken within windows. The rule `ExpectedUtility(BALANCED)` is the one to beat: an
agent starts as it.

Windows differ far more from one another than policies do on one window, so the intervals of a
difference between two policies resample only differences within a window. A trained agent is a draw
too: where there are several training seeds, they are resampled along with the windows.

Reference:
    Efron, Tibshirani. An Introduction to the Bootstrap. Chapman & Hall, 1993 (percentile interval).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedstale.agents.env import (
    TERMS,
    Episodes,
    Policy,
    Reward,
    Rollout,
    RoundOutcome,
    Scenario,
    Simulator,
    online_share,
    picks_of,
    rollout,
)
from fedstale.agents.policy import Agent, AgentSelector, by_heuristic
from fedstale.errors import ConfigError
from fedstale.strategies.selection import (
    BALANCED,
    PAPER,
    RELEASED,
    Enough,
    ExpectedUtility,
    Fastest,
    LeastAvailable,
    MostReliable,
    Oort,
    PowerOfChoice,
    Random,
)
from fedstale.traces import Array, Mask, outline, stream

METRICS = (*TERMS, "valid_ratio", "wasted_s", "unique", "gini", "low_share")
"""What is compared; see `episode_metrics`."""
AGENT, HEURISTIC = "agent", "balanced"
LEAST_WINDOWS = 10
_RESAMPLES = 2_000

Watch = Callable[[str, int, int], None]
"""Called with the next contender in words, how many have played, and how many are to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A policy, and what devices report to it."""

    policies: Sequence[Policy]
    """One for each training seed."""
    scenario: Scenario
    """Where it plays; differs from the others' in forecasts alone."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Evaluation:
    """Metrics of all contenders."""

    windows: pd.DataFrame
    """One row for each contender, training seed and window; see `episode_metrics`."""
    table: pd.DataFrame
    """One row for each contender and metric: mean, and the agent's mean minus it with interval."""

    __repr__ = outline


def contenders(
    scenario: Scenario,
    agents: Sequence[Agent],
    *,
    persistence: Scenario | None = None,
) -> dict[str, Contender]:
    """Return the agent and all policies that it is compared with.

    Args:
        scenario: held-out devices and hours; its forecasts are the forecaster's.
        agents: trained agents, one for each training seed.
        persistence: the same scenario in which devices forecast that nothing changes.

    Raises:
        ConfigError: there is no agent.
    """
    if not agents:
        raise ConfigError("evaluate: expected at least one trained agent")
    silent, true = scenario.with_forecasts("none"), scenario.with_forecasts("oracle")
    settings = scenario.settings
    most = max(2, round(settings.devices[1] * settings.concurrency_share[1]))
    trained = [AgentSelector(agent) for agent in agents]
    played: list[tuple[str, Sequence[Policy], Scenario]] = [
        (AGENT, trained, scenario),
        (HEURISTIC, [by_heuristic], scenario),
        (f"{HEURISTIC}, enough", [Enough(ExpectedUtility(BALANCED))], scenario),
        ("p_finish x utility", [ExpectedUtility()], scenario),
        ("p_finish", [MostReliable()], scenario),
        ("random", [Random()], scenario),
        ("FedCS", [Fastest()], scenario),
        ("Oort, paper's constants", [Oort(PAPER)], scenario),
        ("Oort, released constants", [Oort(RELEASED)], scenario),
        ("REFL IPS", [LeastAvailable()], scenario),
        ("power of choice", [PowerOfChoice(2 * most)], scenario),
        (f"{HEURISTIC}, no forecasts", [by_heuristic], silent),
        (f"{HEURISTIC}, true forecasts", [by_heuristic], true),
        ("agent, no forecasts", trained, silent),
        ("agent, persistence", trained if persistence else [], persistence or scenario),
        ("agent, true forecasts", trained, true),
    ]
    return {name: Contender(policies=some, scenario=on) for name, some, on in played if some}


def evaluate(
    playing: Mapping[str, Contender],
    *,
    windows: int = 200,
    seed: int = 0,
    at_a_time: int = 128,
    watch: Watch | None = None,
) -> Evaluation:
    """Play the same windows by every contender, and compare them.

    Args:
        playing: contenders by name.
        windows: how many, at least 10.
        seed: of the windows, and of chance within selectors.
        at_a_time: windows that are played together.
        watch: is told how it goes.

    Raises:
        ConfigError: there are too few windows, or the agent does not play.
    """
    if windows < LEAST_WINDOWS:
        raise ConfigError(f"windows = {windows}: expected at least {LEAST_WINDOWS}")
    if AGENT not in playing:
        raise ConfigError(f"contenders = {', '.join(playing)}: expected {AGENT!r} among them")
    scenario = playing[AGENT].scenario
    for name, contender in playing.items():
        if contender.scenario.settings != scenario.settings:
            raise ConfigError(
                f"contenders: {name!r} has windows with other settings than {AGENT!r}: expected "
                "the same, since the learning proxy compares selectors and ranks no schedules "
                "(docs/train-agent.md)"
            )
    episodes = next(iter(playing.values())).scenario.draw(windows, stream(seed, 9))
    played = []
    for i, (name, contender) in enumerate(playing.items()):
        if watch is not None:
            watch(f"playing: {name}", i, len(playing))
        simulator = contender.scenario.simulator(min(at_a_time, windows))
        for number, policy in enumerate(contender.policies):
            table = episode_metrics(simulator, episodes, policy, seed=seed)
            window = np.arange(windows)
            played.append(table.assign(contender=name, training_seed=number, window=window))
    table = pd.concat(played, ignore_index=True)
    return Evaluation(windows=table, table=compared(table, seed=seed))


def episode_metrics(
    simulator: Simulator,
    episodes: Episodes,
    policy: Policy,
    *,
    seed: int = 0,
    reward: Reward | None = None,
) -> pd.DataFrame:
    """Play every episode to its end, and return metrics of each.

    Args:
        simulator: with room for the episodes; as many of them at a time as it holds.
        episodes: to play.
        policy: picks the devices.
        seed: of the selector's choices, and of ties between scores.
        reward: prices of time and waste; the defaults if None.

    Returns:
        One row for each episode: the terms of the reward; progress (fall of the log loss),
        valid_ratio (updates aggregated over jobs ended), wasted_s and spent_s (device-seconds),
        sent, aggregated, failed, discarded, rounds, time_s; unique (devices with an aggregated
        update over devices), gini (of the number of jobs sent to each device), low_share (share of
        the aggregated updates from the third of the devices that is online least), staleness (mean
        of the aggregated).
    """
    starts = range(0, len(episodes), simulator.b)
    seeds = np.random.SeedSequence(seed, spawn_key=(43,)).spawn(len(starts))
    tables = []
    for start, part_seed in zip(starts, seeds, strict=True):
        part = episodes.take(np.arange(start, min(start + simulator.b, len(episodes))))
        pick = picks_of(simulator, policy, len(part), part_seed)
        tables.append(_metrics(simulator, part, rollout(simulator, part, pick, reward or Reward())))
    return pd.concat(tables, ignore_index=True)


def _metrics(simulator: Simulator, episodes: Episodes, played: Rollout) -> pd.DataFrame:
    rows, present, outcome = np.arange(len(episodes)), episodes.present, played.outcome
    sent = simulator.known["times_picked"][rows] * present
    finished = simulator.known["times_finished"][rows] * present
    n = present.sum(axis=1)
    online = online_share(
        simulator.traces,
        episodes.devices,
        episodes.start,
        episodes.end - episodes.start,
        looks=100,
    )
    order = np.argsort(np.where(present, online, np.inf), axis=1, kind="stable")
    low = present & (np.argsort(order, axis=1, kind="stable") < n[:, None] / 3.0)
    ended = outcome.aggregated + outcome.failed + outcome.discarded
    sums = [f.name for f in fields(RoundOutcome) if f.name not in {*TERMS, "staleness"}]
    with np.errstate(divide="ignore", invalid="ignore"):
        columns = {
            **played.terms,
            **{name: getattr(outcome, name) for name in sums},
            "rounds": simulator.n_rounds[rows],
            "valid_ratio": outcome.aggregated / ended,
            "unique": (finished > 0).sum(axis=1) / n,
            "gini": gini(sent, present),
            "low_share": np.where(low, finished, 0).sum(axis=1) / finished.sum(axis=1),
            "staleness": outcome.staleness / outcome.aggregated,
            "devices": n,
            "concurrency": episodes.concurrency,
            "keeps_stragglers": episodes.keeps_stragglers,
            "requests_forecasts": episodes.requests_forecasts,
        }
    return pd.DataFrame(columns)


def gini(counts: npt.NDArray[np.int64], present: Mask) -> Array:
    """Return the Gini coefficient of counts: 0 if all are equal, near 1 if one has them all.

    Args:
        counts: >= 0; shape (m, n).
        present: which counts are counted; shape (m, n).

    Returns:
        Shape (m,); NaN where all counts are 0.

    Example:
        >>> gini(np.array([[1, 1, 0], [3, 0, 9]]), np.array([[True, True, False], [True] * 3]))
        array([0. , 0.5])
    """
    x = np.sort(np.where(present, counts, np.inf), axis=1)
    n = present.sum(axis=1)
    rank = np.arange(1, x.shape[1] + 1)
    inside = rank <= n[:, None]
    x = np.where(inside, x, 0.0)
    weights = np.where(inside, 2 * rank - n[:, None] - 1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray((weights * x).sum(axis=1) / (n * x.sum(axis=1)))


class Difference(NamedTuple):
    """Mean of one minus mean of the other, with its 95 % interval."""

    difference: float
    """Mean difference; NaN where no window has both."""
    low: float
    """2.5 % quantile of the resampled means."""
    high: float
    """97.5 % quantile of the resampled means."""
    windows: int
    """Windows that both have a value for."""


def paired(one: Array, other: Array, *, seed: int = 0) -> Difference:
    """Return the mean difference with its bootstrap interval.

    Args:
        one: value of each training seed on each window; shape (seeds, windows), or (windows,).
        other: the same of the other policy; the windows are the same, the seeds need not be.
        seed: of the resampling.

    Example:
        >>> found = paired(np.array([2.0, 5.0, 9.0]), np.array([1.0, 4.0, 8.0]))
        >>> found.difference, round(found.low, 6), round(found.high, 6), found.windows
        (1.0, 1.0, 1.0, 3)
    """
    one, other = np.atleast_2d(one), np.atleast_2d(other)
    known = np.isfinite(one).all(axis=0) & np.isfinite(other).all(axis=0)
    one, other = one[:, known], other[:, known]
    n = one.shape[1]
    if not n:
        return Difference(np.nan, np.nan, np.nan, windows=0)
    rng = stream(seed, 4)
    windows = rng.integers(n, size=(_RESAMPLES, n))
    # Numbers of times that each seed and each window was drawn; a mean is then a product.
    weights = np.stack([np.bincount(row, minlength=n) for row in windows]) / n
    low, high = np.quantile(_means(one, weights, rng) - _means(other, weights, rng), [0.025, 0.975])
    return Difference(float(one.mean() - other.mean()), float(low), float(high), windows=n)


def _means(values: Array, weights: Array, rng: np.random.Generator) -> Array:
    seeds = values.shape[0]
    by_seed = weights @ values.T
    if seeds == 1:
        return by_seed[:, 0]
    drawn = rng.integers(seeds, size=(len(weights), seeds))
    return np.take_along_axis(by_seed, drawn, axis=1).mean(axis=1)


def compared(windows: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """Return means, and differences of the agent to each contender.

    Args:
        windows: as in `Evaluation`.
        seed: of the resampling.

    Returns:
        Columns contender, metric, mean, difference (of the agent to it), low, high, windows.
    """
    rows = []
    for metric in METRICS:
        values = {
            str(name): part.pivot(index="training_seed", columns="window", values=metric)
            for name, part in windows.groupby("contender", sort=False)
        }
        reference = values[AGENT].to_numpy(dtype=np.float64)
        for name, part in values.items():
            numbers = part.to_numpy(dtype=np.float64)
            mean = float(np.nanmean(numbers)) if np.isfinite(numbers).any() else np.nan
            found = paired(reference, numbers, seed=seed)
            if name == AGENT:
                found = found._replace(difference=np.nan, low=np.nan, high=np.nan)
            rows.append((name, metric, mean, *found))
    return pd.DataFrame(rows, columns=["contender", "metric", "mean", *Difference._fields])


def wide(table: pd.DataFrame) -> pd.DataFrame:
    """Return the comparison with a row for each contender, best reward first."""
    means = table.pivot(index="contender", columns="metric", values="mean")[list(METRICS)]
    reward = table[table["metric"].eq("reward")].set_index("contender")
    means = means.loc[means["reward"].sort_values(ascending=False).index]
    found = reward.loc[means.index, ["difference", "low", "high"]].to_numpy(dtype=np.float64)
    interval = [
        "" if np.isnan(difference) else f"{difference:+.2f} [{low:+.2f}, {high:+.2f}]"
        for difference, low, high in found
    ]
    means.insert(1, "agent's advantage", interval)
    return means.rename_axis(columns=None)


def tie_sentence(table: pd.DataFrame) -> str:
    """Return why a comparison decides nothing, in a sentence; nothing if it decides something.

    Args:
        table: as in `Evaluation`.
    """
    rewards = table[table["metric"].eq("reward") & table["contender"].ne(AGENT)]
    if len(rewards) and rewards[["difference", "low", "high"]].eq(0.0).all(axis=None):
        return (
            "All contenders did the same in every window, so the windows decide nothing: there was "
            "no choice where no more devices were online than jobs to send. Test on more devices."
        )
    return ""
