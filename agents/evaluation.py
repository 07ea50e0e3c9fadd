"""Is a trained agent any better: everybody plays the same windows of devices and hours held out.

Each contender plays every window from its beginning with the same devices, data, jobs and noise,
so differences are taken within windows. The heuristic `p_finish x utility` is the one to beat: an
agent starts as it.

Intervals of a difference between two selectors that played the same windows.

Windows differ far more from one another than selectors do on one window, so only differences within
a window are resampled. A trained agent is a draw too: where there are several training seeds, they
are resampled along with the windows.

Reference:
    Efron, Tibshirani. An Introduction to the Bootstrap. Chapman & Hall, 1993 (percentile interval).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedstale.agents.env.episodes import Episodes
from fedstale.agents.env.forecast_table import NoForecasts, TrueForecasts
from fedstale.agents.env.scenario import Stage
from fedstale.agents.env.simulator import Reward
from fedstale.agents.play import Score, heuristic, play
from fedstale.agents.policy.features import Single
from fedstale.agents.policy.scorer import Weights, score
from fedstale.errors import ConfigError
from fedstale.strategies.selection import (
    PAPER,
    RELEASED,
    Fastest,
    LeastAvailable,
    Oort,
    PowerOfChoice,
    Random,
    Selector,
)
from fedstale.traces.arrays import Mask

Floats = npt.NDArray[np.float64]

_RESAMPLES = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Mean of one minus mean of the other, with its 95 % interval."""

    mean: float
    """Mean difference; NaN where no window has both."""
    low: float
    """2.5 % quantile of the resampled means."""
    high: float
    """97.5 % quantile of the resampled means."""
    windows: int
    """Windows that both have a value for."""


def paired(one: Floats, other: Floats, *, seed: int = 0) -> Difference:
    """Return the mean difference with its bootstrap interval.

    Args:
        one: value of each training seed on each window; shape (seeds, windows), or (windows,).
        other: the same of the other selector; the windows are the same, the seeds need not be.
        seed: of the resampling.

    Example:
        >>> found = paired(np.array([2.0, 5.0, 9.0]), np.array([1.0, 4.0, 8.0]))
        >>> found.mean, round(found.low, 6), round(found.high, 6), found.windows
        (1.0, 1.0, 1.0, 3)
    """
    one, other = np.atleast_2d(one), np.atleast_2d(other)
    known = np.isfinite(one).all(axis=0) & np.isfinite(other).all(axis=0)
    one, other = one[:, known], other[:, known]
    n = one.shape[1]
    if not n:
        return Difference(mean=np.nan, low=np.nan, high=np.nan, windows=0)
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(4,)))
    windows = rng.integers(n, size=(_RESAMPLES, n))
    # Numbers of times that each seed and each window was drawn; a mean is then a product.
    weights = np.stack([np.bincount(row, minlength=n) for row in windows]) / n
    low, high = np.quantile(_means(one, weights, rng) - _means(other, weights, rng), [0.025, 0.975])
    return Difference(
        mean=float(one.mean() - other.mean()), low=float(low), high=float(high), windows=n
    )


def _means(values: Floats, weights: Floats, rng: np.random.Generator) -> Floats:
    seeds = values.shape[0]
    by_seed = weights @ values.T
    if seeds == 1:
        return by_seed[:, 0]
    drawn = rng.integers(seeds, size=(len(weights), seeds))
    return np.take_along_axis(by_seed, drawn, axis=1).mean(axis=1)


METRICS = (
    "reward",
    "gain",
    "time",
    "waste",
    "valid_ratio",
    "wasted_s",
    "unique",
    "gini",
    "low_share",
)
"""What is compared; see `fedstale.agents.play.play`."""
AGENT, HEURISTIC = "agent", "p_finish x utility"
LEAST_WINDOWS = 10

Watch = Callable[[str, int, int], None]
"""Is told who plays next, how many have played, and how many are to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """Who picks, and what devices say to it."""

    policies: Sequence[Selector | Score]
    """One for each training seed."""
    stage: Stage
    """Where it plays; differs from the others' in forecasts alone."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Evaluation:
    """What came of it."""

    windows: pd.DataFrame
    """One row for each contender, training seed and window, as `play` gives it."""
    table: pd.DataFrame
    """One row for each contender and metric: mean, and the agent's mean minus it with interval."""


def scoring(weights: Weights) -> Score:
    """Return an agent as a scoring function."""

    def scores(
        features: Single, context: Single, prior: Single, mask: Mask
    ) -> npt.NDArray[np.floating]:
        return score(weights, features, context, prior, mask)

    return scores


def contenders(
    stage: Stage,
    agents: Sequence[Weights],
    *,
    persistence: Stage | None = None,
    reactive: Sequence[Weights] = (),
    scratch: Sequence[Weights] = (),
) -> dict[str, Contender]:
    """Return the agent and everybody that it is compared with.

    Args:
        stage: held-out devices and hours; its forecasts are the forecaster's.
        agents: trained weights, one for each training seed.
        persistence: the same stage on which devices say that all stays as it is.
        reactive: weights that were trained without forecasts.
        scratch: weights that were trained without the heuristic's score.

    Raises:
        ConfigError: there is no agent.
    """
    if not agents:
        raise ConfigError("evaluate: expected at least one trained agent")
    silent = stage.with_forecasts(NoForecasts())
    true = stage.with_forecasts(TrueForecasts(stage.traces, stage.kinds))
    most = max(2, round(stage.settings.devices[1] * stage.settings.asked_share[1]))
    alone: dict[str, tuple[Selector | Score, Stage]] = {
        HEURISTIC: (heuristic, stage),
        "random": (Random(), stage),
        "FedCS": (Fastest(), stage),
        "Oort, paper's constants": (Oort(PAPER), stage),
        "Oort, released constants": (Oort(RELEASED), stage),
        "REFL IPS": (LeastAvailable(), stage),
        "power of choice": (PowerOfChoice(2 * most), stage),
        f"{HEURISTIC}, no forecasts": (heuristic, silent),
        f"{HEURISTIC}, true forecasts": (heuristic, true),
    }
    made = {AGENT: Contender(policies=[scoring(w) for w in agents], stage=stage)}
    made |= {k: Contender(policies=[policy], stage=on) for k, (policy, on) in alone.items()}
    variants: list[tuple[str, Sequence[Weights], Stage | None]] = [
        ("agent, no forecasts", agents, silent),
        ("agent, persistence", agents, persistence),
        ("agent, true forecasts", agents, true),
        ("agent trained without forecasts", reactive, silent),
        ("agent from scratch", scratch, stage),
    ]
    for name, weights, on in variants:
        if weights and on is not None:
            made[name] = Contender(policies=[scoring(w) for w in weights], stage=on)
    return made


def evaluate(
    playing: Mapping[str, Contender],
    *,
    windows: int = 200,
    seed: int = 0,
    reward: Reward | None = None,
    against: str = AGENT,
    at_a_time: int = 128,
    watch: Watch | None = None,
) -> Evaluation:
    """Let everybody play the same windows, and compare.

    Args:
        playing: contenders by name.
        windows: how many, at least 10.
        seed: of the windows, and of chance within selectors.
        reward: prices; the defaults if None.
        against: the contender from which the others' means are subtracted.
        at_a_time: windows that are played together.
        watch: is told how it goes.

    Raises:
        ConfigError: there are too few windows, or `against` does not play.
    """
    if windows < LEAST_WINDOWS:
        raise ConfigError(f"windows = {windows}: expected at least {LEAST_WINDOWS}")
    if against not in playing:
        raise ConfigError(f"against = {against!r}: expected one of {', '.join(playing)}")
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(9,)))
    episodes = next(iter(playing.values())).stage.draw(windows, rng)
    played = []
    for i, (name, contender) in enumerate(playing.items()):
        if watch is not None:
            watch(name, i, len(playing))
        played += _played(name, contender, episodes, seed=seed, reward=reward, at_a_time=at_a_time)
    table = pd.concat(played, ignore_index=True)
    return Evaluation(windows=table, table=compared(table, against, seed=seed))


def _played(
    name: str,
    contender: Contender,
    episodes: Episodes,
    *,
    seed: int,
    reward: Reward | None,
    at_a_time: int,
) -> list[pd.DataFrame]:
    world = contender.stage.world(min(at_a_time, len(episodes)))
    rows = []
    for number, policy in enumerate(contender.policies):
        table = play(world, episodes, policy, seed=seed, reward=reward)
        window = np.arange(len(table))
        rows.append(table.assign(contender=name, training_seed=number, window=window))
    return rows


def compared(windows: pd.DataFrame, against: str, *, seed: int = 0) -> pd.DataFrame:
    """Return means, and differences to one contender.

    Args:
        windows: as in `Evaluation`.
        against: the contender from which the others' means are subtracted.
        seed: of the resampling.

    Returns:
        Columns contender, metric, mean, difference (of `against` to it), low, high, windows.
    """
    rows = []
    for metric in METRICS:
        values = {
            str(name): part.pivot(index="training_seed", columns="window", values=metric)
            for name, part in windows.groupby("contender", sort=False)
        }
        reference = values[against].to_numpy(dtype=np.float64)
        for name, part in values.items():
            numbers = part.to_numpy(dtype=np.float64)
            found = paired(reference, numbers, seed=seed)
            same = name == against
            rows.append(
                {
                    "contender": name,
                    "metric": metric,
                    "mean": float(np.nanmean(numbers)) if np.isfinite(numbers).any() else np.nan,
                    "difference": np.nan if same else found.mean,
                    "low": np.nan if same else found.low,
                    "high": np.nan if same else found.high,
                    "windows": found.windows,
                }
            )
    return pd.DataFrame(rows)


def of_size(stage: Stage, n: int) -> Stage:
    """Return the same stage whose windows have n devices, or as many as appear in them."""
    return replace(stage, settings=replace(stage.settings, devices=(n, n)))


def wide(table: pd.DataFrame) -> pd.DataFrame:
    """Return the comparison as people read it: a row for each contender, best reward first."""
    means = table.pivot(index="contender", columns="metric", values="mean")[list(METRICS)]
    reward = table[table["metric"].eq("reward")].set_index("contender")
    means = means.loc[means["reward"].sort_values(ascending=False).index]
    found = reward.loc[means.index, ["difference", "low", "high"]].to_numpy(dtype=np.float64)
    interval = [
        "" if np.isnan(difference) else f"{difference:+.2f} [{low:+.2f}, {high:+.2f}]"
        for difference, low, high in found
    ]
    means.insert(1, "agent's advantage", interval)
    means["wasted_s"] = means["wasted_s"].round(0)
    return means.rename_axis(columns=None)
