"""The settings of `agent_training` as episodes, and how long selectors need in many worlds.

A case is one app, fleet and schedule of the comparison in real training: the same devices, hours,
jobs and forecasts. Accuracy has no place in the learning proxy, which
knows losses; the mean over groups of exp(-loss), the chance that a model gives the right answer,
stands for it. The target is set as it was there: 0.9 of what random selection has at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from selection_proxy import late_progress
from selection_training import HOURS_S, Window, training_kinds
from training_apps import APPS

from fedstale.agents import Agent, EpisodeSettings, Scenario
from fedstale.agents.env.episodes import AGES, GROUPS, NOISES, Episodes
from fedstale.agents.env.forecast_table import Forecasts, Reported
from fedstale.agents.env.learning_proxy import LearningProxy, deal
from fedstale.agents.env.rounds import Policy, picks_of, rollout
from fedstale.agents.env.simulator import Reward
from fedstale.agents.env.worlds import Worlds, WorldSimulator
from fedstale.agents.policy.scorer import by_agent, by_heuristic
from fedstale.strategies.selection import (
    Fastest,
    LeastAvailable,
    MostReliable,
    PowerOfChoice,
    Random,
)
from fedstale.strategies.weighting.base import polynomial
from fedstale.traces import TraceSet
from fedstale.traces.arrays import Array, Index

RULES: dict[str, Policy] = {
    "p_finish x utility": by_heuristic,
    "p_finish": MostReliable(),
    "random": Random(),
    "FedCS": Fastest(),
    "REFL IPS": LeastAvailable(),
    "power of choice": PowerOfChoice(8),
}
"""Rules of one line, by their names in `agent_training`."""
BY_LOSS = ("p_finish x utility", "power of choice")
SHARE = 0.9
"""Of what random selection has at the end, as the target of `agent_training`."""
_LUCK, _AT_A_TIME, _ROUNDS = 4, 300, 800


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """Windows with a job and a schedule."""

    windows: Sequence[Window]
    alphas: Sequence[float]
    """Skews of the data; each window is played with each."""
    kind: int
    """Of the job: the place of the app in `APPS`."""
    concurrency: int
    buffer_size: int
    keeps_stragglers: bool

    def episodes(self) -> Episodes:
        """Return an episode for each window and skew."""
        both = [(window, alpha) for window in self.windows for alpha in self.alphas]
        b, n = len(both), max(window.n_devices for window in self.windows)
        devices = np.zeros((b, n), dtype=np.int64)
        present = np.zeros((b, n), dtype=bool)
        mixtures, examples = np.full((b, n, GROUPS), 1.0 / GROUPS), np.ones((b, n))
        noise = np.zeros((b, n, NOISES))
        for row, (window, alpha) in enumerate(both):
            size = window.n_devices
            devices[row, :size], present[row, :size] = window.devices, True
            rng = np.random.default_rng((window.seed, round(100 * alpha), 63))
            dealt = deal(rng, (1, size), GROUPS, np.array([alpha]), np.array([0.5]))
            mixtures[row, :size], examples[row, :size] = dealt[0][0], dealt[1][0]
            noise[row, :size] = rng.standard_normal((size, NOISES))
        start = np.array([window.start for window, _ in both])
        curve = polynomial(0.5)
        ages = [curve(age) if self.keeps_stragglers else 1.0 for age in range(AGES)]
        return Episodes(
            devices=devices,
            present=present,
            start=start,
            end=start + HOURS_S,
            rounds=np.full(b, _ROUNDS),
            kind=np.full(b, self.kind),
            concurrency=np.full(b, self.concurrency),
            buffer_size=np.full(b, self.buffer_size),
            keeps_stragglers=np.full(b, self.keeps_stragglers),
            deadline_s=np.full(b, np.inf),
            age_weights=np.tile(ages, (b, 1)),
            cooldown_s=np.zeros(b),
            requests_forecasts=np.ones(b, dtype=bool),
            over_reports=np.zeros((b, n), dtype=bool),
            inflates=np.zeros((b, n), dtype=bool),
            mixtures=mixtures,
            examples=examples,
            noise=noise,
        )

    def scenario(self, traces: TraceSet, forecasts: Forecasts) -> Scenario:
        """Return where the windows are."""
        n = max(window.n_devices for window in self.windows)
        return Scenario(
            traces=traces,
            kinds=training_kinds(traces, [app.model_bytes for app in APPS.values()]),
            forecasts=forecasts,
            devices=np.arange(traces.n_devices),
            start=0.0,
            end=max(window.start for window in self.windows) + HOURS_S,
            settings=EpisodeSettings(devices=(1, n), rounds=_ROUNDS),
        )

    def progress(
        self, traces: TraceSet, forecasts: Forecasts, policy: Policy, proxy: LearningProxy
    ) -> float:
        """Return the mean fall of the log loss, as `late_progress` has it."""
        played = _Played(
            self, self.scenario(traces, forecasts), policy, Worlds.of(proxy), follows=False
        )
        found = [
            late_progress(at, losses) for at, losses in (played.curve(row) for row in played.rows)
        ]
        return float(np.mean(found))


class OneOf:
    """Forecasts of several windows, each with a table of its own."""

    def __init__(self, windows: Sequence[Window], tables: Sequence[Forecasts]) -> None:
        self._parts = [
            (w.start, w.start + HOURS_S, table) for w, table in zip(windows, tables, strict=True)
        ]

    def at(self, devices: Index, kind: Index, now: Array) -> Reported:
        """Return the forecasts of the window that an instant is in."""
        found = tuple(np.full(devices.shape, np.nan) for _ in range(3))
        for start, end, table in self._parts:
            inside = (now >= start) & (now <= end)
            if inside.any():
                told = table.at(devices[inside], kind[inside], now[inside])
                for column, values in zip(found, told, strict=True):
                    # Windows that touch hold other devices; a table knows its own.
                    column[inside] = np.where(np.isnan(values), column[inside], values)
        return found[0], found[1], found[2]


class _Timed(WorldSimulator):
    """Notes after each server step when it was and what the models of all worlds are like."""

    def __init__(
        self, scenario: Scenario, b: int, worlds: Worlds, following: Worlds | None
    ) -> None:
        super().__init__(scenario, b, worlds, following)
        self.steps: list[tuple[Index, Array, Array, Array]] = []

    def _learn(self, rows: Index, ratios: Array, sizes: Array) -> tuple[Array, Array]:
        found = super()._learn(rows, ratios, sizes)
        losses = self.losses[rows, None] if self.following is None else self._others[rows]
        right = np.exp(-losses).mean(axis=2)
        at = self.now[rows] - self.episodes.start[rows]
        self.steps.append((rows.copy(), at, losses.mean(axis=2), right))
        return found


class _Played:
    """A policy's plays of a case; rows are episodes, columns worlds."""

    def __init__(
        self, case: Case, scenario: Scenario, policy: Policy, worlds: Worlds, *, follows: bool,
        luck: int = 1,
    ) -> None:  # fmt: skip
        episodes = case.episodes()
        each = len(episodes)
        if follows:
            # Every world learns from the same updates; some draws of the picks, in turn.
            row, world = np.tile(np.arange(each), luck), np.zeros(each * luck, dtype=np.int64)
        else:
            row, world = (
                np.tile(np.arange(each), len(worlds)),
                np.repeat(np.arange(len(worlds)), each),
            )
        self.first = float(worlds.constants["first_loss"][0])
        self.rows = np.arange(row.size)
        self._steps: list[list[tuple[float, Array, Array]]] = [[] for _ in row]
        for start in range(0, row.size, _AT_A_TIME):
            part = np.arange(start, min(start + _AT_A_TIME, row.size))
            base = Worlds.of(worlds[0]) if follows else worlds
            simulator = _Timed(scenario, part.size, base, worlds if follows else None)
            simulator.world[:] = world[part]
            seed = np.random.SeedSequence(start, spawn_key=(64,))
            pick = picks_of(simulator, policy, part.size, seed)
            rollout(simulator, episodes.take(row[part]), pick, Reward())
            for rows, at, losses, right in simulator.steps:
                for i, r in enumerate(rows):
                    self._steps[start + r].append((float(at[i]), losses[i], right[i]))

    def curve(self, row: int) -> tuple[Array, Array]:
        """Return instants in s and mean losses of the only world; (m,) and (m, 1)."""
        steps = self._steps[row]
        at = np.array([0.0, *(step[0] for step in steps)])
        return at, np.array([[self.first], *(step[1] for step in steps)])

    def final(self, row: int) -> Array:
        """Return what stands for accuracy, in the mean over the last tenth of the hours; (w,)."""
        looks = np.linspace(0.9, 1.0, 25) * HOURS_S
        at = np.array([step[0] for step in self._steps[row]])
        right = np.array([step[2] for step in self._steps[row]])
        place = np.maximum(np.searchsorted(at, looks, side="right") - 1, 0)
        return np.asarray(right[place].mean(axis=0))

    def hours(self, row: int, target: Array) -> Array:
        """Return when each world reaches its target, in s; all of the hours if never; (w,)."""
        at = np.array([step[0] for step in self._steps[row]])
        there = np.array([step[2] for step in self._steps[row]]) >= target
        first = there.argmax(axis=0)
        return np.where(there.any(axis=0), at[first], HOURS_S)


def advantages(
    case: Case,
    traces: TraceSet,
    tables: Sequence[Forecasts],
    worlds: Worlds,
    *,
    agent: Agent,
    rules: Sequence[str],
) -> dict[str, Array]:
    """Return the hours that rules need to the target over the agent's, in each world; (w,) each.

    Args:
        case: windows, job and schedule.
        traces: the fleet.
        tables: what the devices of each window forecast.
        worlds: w of them.
        agent: that is compared.
        rules: names in `RULES`; others are left out.
    """
    scenario = case.scenario(traces, OneOf(case.windows, tables))
    n, w = len(case.windows) * len(case.alphas), len(worlds)
    skew = np.tile(np.arange(len(case.alphas)), len(case.windows))
    chance = _Played(case, scenario, Random(), worlds, follows=True, luck=_LUCK)
    ends = np.array([chance.final(row) for row in range(n * _LUCK)])
    of_skew = np.tile(skew, _LUCK)
    targets = SHARE * np.stack([ends[of_skew == s].mean(axis=0) for s in range(len(case.alphas))])

    def hours(policy: Policy, *, follows: bool) -> Array:
        """Return the seconds of each episode in each world; shape (n, w)."""
        if policy is RULES["random"]:
            played = chance
        else:
            played = _Played(case, scenario, policy, worlds, follows=follows, luck=_LUCK)
        found = np.empty((n, w))
        for row in range(n):
            target = targets[skew[row]]
            if follows:
                for turn in range(_LUCK):
                    mine = slice(turn, None, _LUCK)
                    found[row, mine] = played.hours(n * turn + row, target)[mine]
            else:
                found[row] = [played.hours(n * v + row, target[[v]])[0] for v in range(w)]
        return found

    own = hours(by_agent(agent.weights), follows=False)
    found = {}
    for name in (name for name in RULES if name in rules):
        other = hours(RULES[name], follows=name not in BY_LOSS)
        counts = (own < HOURS_S) | (other < HOURS_S)
        logs = np.where(counts, np.log(other / own), 0.0)
        found[name] = np.exp(logs.sum(axis=0) / np.maximum(counts.sum(axis=0), 1))
    return found
