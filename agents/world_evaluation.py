"""Will the agent help: its advantage over rules of one line in many worlds of learning constants.

The constants of the learning proxy are not known of a new app. So the agent and the rules play the
same windows in many worlds (`Worlds`), and what is reported is a band instead of a number.

Every contender plays all windows once in the world of the given constants, and the models of all
worlds learn from the same updates beside it. For a rule that does not look at losses that is what
it would do in each world. The agent and the other rules would pick others there. So each world
also plays some windows in full, and what that changes is added, as a linear function of the
logarithms of the constants, which is fitted over the plays of all worlds. Plays in full differ by
the luck of draws; the fit averages it, and shrinks towards no change what luck alone would explain.

Reference:
    Efron, Morris. Stein's Estimation Rule and Its Competitors - An Empirical Bayes Approach.
    JASA 68, 1973.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedstale.agents.env import (
    VARIED,
    Episodes,
    Policy,
    Reward,
    Scenario,
    Spread,
    Worlds,
    WorldSimulator,
    picks_of,
    read_spread,
    rollout,
)
from fedstale.agents.evaluation import AGENT, HEURISTIC, LEAST_WINDOWS, Watch
from fedstale.agents.policy import Agent, by_agent, by_heuristic
from fedstale.errors import ConfigError
from fedstale.strategies.selection import (
    Fastest,
    LeastAvailable,
    MostReliable,
    PowerOfChoice,
    Random,
)
from fedstale.strategies.types import is_count
from fedstale.traces import Array, Index, stream

LEAST_WORLDS = 20
"""Fewer worlds have no 5 % and 95 % quantile."""
SURE = 0.9
"""Share of the worlds in which the agent has to be ahead of a rule to be preferred to it."""
PLAYS = 1600
"""Plays in full of a contender that looks at losses: so many windows, divided among all worlds."""
LOW, HIGH = 0.05, 0.95

RULES: dict[str, Callable[[int], Policy]] = {
    HEURISTIC: lambda most: by_heuristic,
    "p_finish": lambda most: MostReliable(),
    "random": lambda most: Random(),
    "FedCS": lambda most: Fastest(),
    "REFL IPS": lambda most: LeastAvailable(),
    "power of choice": lambda most: PowerOfChoice(2 * most),
}
"""Rules of one line, each made for the most jobs in flight."""
BY_LOSS = (AGENT, HEURISTIC, "power of choice")
"""Contenders whose picks depend on what devices report of their losses."""
_AT_A_TIME = 256


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class WorldEvaluation:
    """What the agent earns more than each rule, world by world."""

    worlds: Worlds
    """The constants of each."""
    advantages: pd.DataFrame
    """Mean reward of the agent minus that of each rule; a row a world, a column a rule."""
    table: pd.DataFrame
    """A row for each rule; columns rule, median, low (5 %), high (95 %), ahead (worlds), share (of
    the worlds), reward (of the rule, median), and matters, correlation: the constant with the
    strongest rank correlation with the advantage, and that."""

    @property
    def prefer(self) -> str:
        """The contender to prefer: the agent, or the best rule that it is not surely ahead of."""
        doubtful = self.table[self.table["share"] < SURE]
        if doubtful.empty:
            return AGENT
        return str(doubtful.sort_values("reward")["rule"].iloc[-1])


def evaluate_worlds(
    scenario: Scenario,
    agents: Sequence[Agent],
    *,
    worlds: int = 200,
    windows: int = 50,
    seed: int = 0,
    spread: Spread | None = None,
    watch: Watch | None = None,
) -> WorldEvaluation:
    """Let the agent and rules of one line play the same windows in many worlds.

    Args:
        scenario: held-out devices and hours; its proxy is the median world.
        agents: trained agents; with several, worlds take them in turn.
        worlds: how many, at least 20.
        windows: how many, at least 10.
        seed: of worlds and windows, and of chance within selectors.
        spread: of the constants; that which comes with the package if None.
        watch: is told how it goes.

    Raises:
        ConfigError: there are too few worlds or windows, no agent, or no such spread.
    """
    if not agents:
        raise ConfigError("evaluate_worlds: expected at least one trained agent")
    if not is_count(worlds) or worlds < LEAST_WORLDS:
        raise ConfigError(f"worlds = {worlds!r}: expected an integer >= {LEAST_WORLDS}")
    if not is_count(windows) or windows < LEAST_WINDOWS:
        raise ConfigError(f"windows = {windows!r}: expected an integer >= {LEAST_WINDOWS}")
    spread = read_spread() if spread is None else spread
    drawn = Worlds.around(scenario.proxy, spread, worlds, seed=seed)
    episodes = scenario.draw(windows, stream(seed, 9))
    settings = scenario.settings
    most = max(2, round(settings.devices[1] * settings.concurrency_share[1]))
    contenders: list[tuple[str, Policy]] = [(AGENT, by_agent(agent.weights)) for agent in agents]
    contenders += [(name, made(most)) for name, made in RULES.items()]
    rewards: dict[str, list[Array]] = {}
    for i, (name, policy) in enumerate(contenders):
        if watch is not None:
            watch(name, i, len(contenders))
        play = _Play(scenario, episodes, drawn, spread, seed)
        rewards.setdefault(name, []).append(play.rewards(policy, by_loss=name in BY_LOSS))
    turn = np.arange(worlds) % len(agents)
    own = np.array(rewards.pop(AGENT))[turn, np.arange(worlds)]
    return compared(drawn, own, {name: values[0] for name, values in rewards.items()})


def compared(worlds: Worlds, agent: Array, rules: dict[str, Array]) -> WorldEvaluation:
    """Return how the agent compares with rules.

    Args:
        worlds: w of them.
        agent: mean reward of the agent in each world; shape (w,).
        rules: the same of each rule.
    """
    advantages = pd.DataFrame({name: agent - values for name, values in rules.items()})
    constants = pd.DataFrame({name: worlds.constants[name] for name in VARIED})
    rows = []
    for rule, advantage in advantages.items():
        each = {name: _rank_correlation(constants[name], advantage) for name in VARIED}
        known = {name: value for name, value in each.items() if not np.isnan(value)}
        matters = max(known, key=lambda name: abs(known[name])) if known else ""
        rows.append(
            {
                "rule": rule,
                "median": float(advantage.median()),
                "low": float(advantage.quantile(LOW)),
                "high": float(advantage.quantile(HIGH)),
                "ahead": int((advantage > 0).sum()),
                "share": float((advantage > 0).mean()),
                "reward": float(np.median(rules[str(rule)])),
                "matters": matters,
                "correlation": float(known.get(matters, np.nan)),
            }
        )
    return WorldEvaluation(worlds=worlds, advantages=advantages, table=pd.DataFrame(rows))


def _rank_correlation(one: pd.Series, other: pd.Series) -> float:
    from scipy.stats import spearmanr  # noqa: PLC0415 - takes a second, in every simulation

    if one.nunique() < 2 or other.nunique() < 2:
        return np.nan
    return float(spearmanr(one, other)[0])


class _Play:
    """Plays the windows of one contender in all worlds."""

    def __init__(
        self, scenario: Scenario, episodes: Episodes, worlds: Worlds, spread: Spread, seed: int
    ) -> None:
        self._scenario, self._episodes = scenario, episodes
        self._worlds, self._spread, self._seed = worlds, spread, seed

    def rewards(self, policy: Policy, *, by_loss: bool) -> Array:
        """Return the mean reward over the windows in each world; shape (w,)."""
        shared = self._shared(policy)
        if by_loss:
            window, world = self._own()
            changed = self._in_full(policy, window, world) - shared[window, world]
            return shared.mean(axis=0) + self._fitted(changed, world)
        return shared.mean(axis=0)

    def _shared(self, policy: Policy) -> Array:
        """Return rewards if the picks of every world were the median one's; (windows, w)."""
        n, median = len(self._episodes), Worlds.of(self._scenario.proxy)
        simulator = WorldSimulator(self._scenario, n, median, following=self._worlds)
        pick = picks_of(simulator, policy, n, np.random.SeedSequence(self._seed))
        terms = rollout(simulator, self._episodes, pick, Reward()).terms
        costs = (terms["time"] + terms["waste"])[:, None]
        return simulator.gains + costs

    def _own(self) -> tuple[Index, Index]:
        """Return which windows are played in full, and in which world each."""
        n, w = len(self._episodes), len(self._worlds)
        rng, each = stream(self._seed, 72), min(-(-PLAYS // w), n)
        played = [rng.permutation(n)[:each] for _ in range(w)]
        return np.concatenate(played), np.repeat(np.arange(w), each)

    def _in_full(self, policy: Policy, window: Index, world: Index) -> Array:
        """Return the rewards of windows, each played in a world of its own; shape (plays,)."""
        found = np.zeros(window.size)
        simulator = WorldSimulator(self._scenario, _AT_A_TIME, self._worlds)
        seeds = np.random.SeedSequence(self._seed, spawn_key=(73,))
        for start in range(0, window.size, _AT_A_TIME):
            part = slice(start, start + _AT_A_TIME)
            episodes = self._episodes.take(window[part])
            n = len(episodes)
            simulator.world[:n] = world[part]
            pick = picks_of(simulator, policy, n, seeds.spawn(1)[0])
            found[part] = rollout(simulator, episodes, pick, Reward()).terms["reward"]
        return found

    def _fitted(self, changed: Array, world: Index) -> Array:
        """Return what own picks change in each world; shape (w,)."""
        names = [name for name in VARIED if self._spread[name] > 0]
        if not names:
            return np.full(len(self._worlds), changed.mean())
        logs = np.log(np.stack([self._worlds.constants[name] for name in names], axis=1))
        known = (logs - logs.mean(axis=0)) / np.maximum(logs.std(axis=0), 1e-12)
        x, y = known[world], changed - changed.mean()
        slopes, *_ = np.linalg.lstsq(x, y, rcond=None)
        luck = ((y - x @ slopes) ** 2).sum() / max(y.size - len(names) - 1, 1) / y.size
        # Empirical Bayes: what slopes scatter beyond the luck of draws is what constants change.
        effect = max(float((slopes**2).mean()) - luck, 0.0)
        return np.asarray(changed.mean() + known @ slopes * (effect / (effect + luck + 1e-300)))
