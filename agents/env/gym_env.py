"""The environments: which clients to pick next, on real traces; for Gymnasium, and for training.

A step is a choice, which begins a round or replaces jobs that failed: the action is the set of
clients that get the next jobs, the simulator goes on to the next choice, and the reward is what was
earned until then (`Rounds`). Candidates are shown packed and in random order, so that a place in
the observation means nothing. From each reward `SelectionEnv` subtracts what `ExpectedUtility`
earns after as many choices in the same window, which no choice can change: what is left is due to
the choice and not to the hour.

Importing this module registers `SelectionEnv` as `fedstale/Selection-v1`; Gymnasium imports it by
itself in `gymnasium.make("fedstale.agents.env.gym_env:fedstale/Selection-v1", scenario=traces)`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from fedstale.agents.env.rounds import picks_of, rollout, top
from fedstale.agents.env.scenario import Scenario, as_scenarios
from fedstale.agents.env.simulator import Reward
from fedstale.agents.policy import HEURISTIC_LIMIT, LIMIT, N_CONTEXT, N_FEATURES, by_heuristic
from fedstale.errors import ConfigError
from fedstale.strategies.types import is_count
from fedstale.traces import Array, Index, Mask, TraceSet, stream

Observation: TypeAlias = dict[str, npt.NDArray[np.float32]]
Ranking: TypeAlias = npt.NDArray[np.int64]
Indices: TypeAlias = int | Iterable[int] | None

ID = "fedstale/Selection-v1"
N_MAX = 64
"""Candidates that are shown at a time, by default."""

# Windows without any candidate are drawn anew, so often at most.
_DRAWS = 100


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ClosedRounds:
    """The rounds of one step."""

    rows: Index
    """Their episodes, those that were not over; shape (m,)."""
    terms: dict[str, Array]
    """Terms of their rewards, and counts of their jobs, each of shape (m,)."""
    ended: Mask
    """Whether the episode is over now; shape (m,)."""


class Rounds:
    """The state of b episodes between choices.

    Args:
        scenario: where episodes take place.
        b: episodes at a time.
        rollouts: episodes in a row that play the same window; b is a multiple of it.
        n_max: candidates that are shown; of more, so many are shown at random.
        reward: prices; the defaults if None.
        baseline: whether to subtract what the heuristic earns.

    Raises:
        ConfigError: a number of episodes or candidates is no integer >= 1, or b is no multiple.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        b: int,
        rollouts: int = 1,
        n_max: int,
        reward: Reward | None,
        baseline: bool,
    ) -> None:
        for name, value in (("n_envs", b), ("n_max", n_max), ("rollouts", rollouts)):
            if not is_count(value):
                raise ConfigError(f"{name} = {value!r}: expected an integer >= 1")
        if b % rollouts:
            raise ConfigError(f"n_envs = {b}: expected a multiple of rollouts = {rollouts}")
        self.scenario, self.b, self.rollouts, self.n_max = scenario, b, rollouts, n_max
        self.reward = reward or Reward()
        self.simulator = scenario.simulator(b)
        self._baseline = scenario.simulator(b // rollouts) if baseline else None
        self._rng = np.random.default_rng(0)
        self._expected = np.zeros((b, scenario.settings.choices))
        self._columns = np.zeros((b, n_max), dtype=np.int64)
        self.mask = np.zeros((b, n_max), dtype=bool)
        """Which places may be picked now; shape (b, n_max)."""
        self.slots = np.zeros(b, dtype=np.int64)
        """How many are picked now, 0 when the episode is over; shape (b,)."""
        self.observation: Observation = {
            "features": np.zeros((b, n_max, N_FEATURES), dtype=np.float32),
            "context": np.zeros((b, N_CONTEXT), dtype=np.float32),
            "heuristic": np.zeros((b, n_max), dtype=np.float32),
            "mask": np.zeros((b, n_max), dtype=np.float32),
            "slots": np.zeros((b, 1), dtype=np.float32),
        }
        """The current observation; the same arrays are written again at the next choice."""

    def begin(self, rng: np.random.Generator) -> None:
        """Begin new episodes everywhere.

        Args:
            rng: of the windows, and of the order in which candidates are shown.
        """
        self._rng = rng
        rows = np.arange(self.b)
        # An episode without any candidate has no choice in it.
        for _ in range(_DRAWS):
            episodes = self.scenario.draw(rows.size // self.rollouts, rng)
            each = np.repeat(np.arange(len(episodes)), self.rollouts)
            self.simulator.reset(episodes.take(each), rows)
            if self._baseline is not None:
                pick = picks_of(
                    self._baseline, by_heuristic, len(episodes), np.random.SeedSequence(0)
                )
                played = rollout(self._baseline, episodes, pick, self.reward)
                self._expected[rows] = played.by_choice[each]
            rows = rows[self.simulator.done[rows]]
            if not rows.size:
                break
        self._show(np.arange(self.b))

    def _show(self, rows: Index) -> None:
        """Show the next choice of some episodes."""
        mask = self.simulator.mask[rows]
        # Most devices are offline or busy at most times: only candidates are looked at.
        width = min(max(int(mask.sum(axis=1).max(initial=0)), 1), self.n_max)
        keys = np.where(mask, self._rng.random(mask.shape), 2.0)
        columns = np.argsort(keys, axis=1)[:, :width]
        shown = np.take_along_axis(mask, columns, axis=1)
        slots = np.minimum(self.simulator.slots[rows], shown.sum(axis=1))
        features, context, heuristic = self.simulator.observation(rows, columns)
        for values in (self._columns, self.mask, *self.observation.values()):
            values[rows] = 0
        self._columns[rows, :width], self.mask[rows, :width] = columns, shown
        self.slots[rows] = slots
        self.observation["features"][rows, :width] = features * shown[..., None]
        self.observation["context"][rows] = context
        self.observation["heuristic"][rows, :width] = heuristic * shown
        self.observation["mask"][rows, :width] = shown
        self.observation["slots"][rows, 0] = slots

    def play(self, rankings: Ranking) -> ClosedRounds:
        """Play one choice of each episode that is not over.

        Args:
            rankings: places in falling order of preference; shape (b, m). The first `slots` that
                may be picked are; other places and repeated ones are ignored.
        """
        rows = np.flatnonzero(~self.simulator.done)
        if not rows.size:
            return ClosedRounds(rows=rows, terms={}, ended=np.zeros(0, dtype=bool))
        simulator = self.simulator
        turn = simulator.n_choices[rows].copy()
        simulator.dispatch(rows, self._picked(rows, rankings[rows]))
        outcome = simulator.advance(rows)
        terms = simulator.reward_terms(rows, outcome, self.reward)
        ended = simulator.done[rows]
        # The heuristic may have had more choices in its window.
        later = np.arange(self._expected.shape[1]) > turn[:, None]
        rest = (self._expected[rows] * later).sum(axis=1)
        terms["baseline"] = -(self._expected[rows, turn] + np.where(ended, rest, 0.0))
        terms["reward"] += terms["baseline"]
        for name in ("progress", "time_s", "wasted_s", "sent", "aggregated", "failed", "discarded"):
            terms[name] = getattr(outcome, name)
        self._show(rows)
        return ClosedRounds(rows=rows, terms=terms, ended=ended)

    def _picked(self, rows: Index, rankings: Ranking) -> Mask:
        """Return the devices that rankings pick; shape (m, n)."""
        worst = rankings.shape[1]
        rank = np.full((rows.size, self.n_max), worst)
        # Of equal indices the last one written holds: the best rank.
        each = np.broadcast_to(np.arange(worst)[::-1], rankings.shape)
        np.put_along_axis(rank, rankings[:, ::-1], each, axis=1)
        best = top(-rank.astype(np.float64), self.mask[rows] & (rank < worst), self.slots[rows])
        picked = np.zeros((rows.size, self.simulator.n), dtype=bool)
        row, place = np.nonzero(best)
        picked[row, self._columns[rows[row], place]] = True
        return picked


class SelectionEnv(gymnasium.Env[Observation, Ranking]):
    """Pick the devices of each round, in a window of recorded behaviour.

    ## Description

    A server of federated learning picks the devices that get the next jobs, in a window of some
    hours. One step is one choice: the jobs are sent, and the next choice is due when the server has
    aggregated, when a job has failed that another device can replace, or when there are devices to
    pick again.

    ## Action Space

    `MultiDiscrete([n_max] * n_max)`: a ranking, places of candidates in falling order of
    preference. The first k places that may be picked get a job, with k the number of `slots`; what
    follows, places without a candidate, and places named again are ignored. A ranking without any
    place that may be picked sends no job.

    ## Observation Space

    A dictionary of float32 arrays; rows of candidates are in random order, and 0 where there is
    none. A device that is offline, busy or in its cooldown is no candidate. See
    `fedstale.agents.policy.features.SCHEMA` for each number.

    | Key       | Observation                            | Shape       | Min | Max   |
    |-----------|----------------------------------------|-------------|-----|-------|
    | features  | each candidate, as the server knows it | (n_max, 23) | -8  | 8     |
    | context   | the choice                             | (7,)        | -8  | 8     |
    | heuristic | log(p_finish x utility)                | (n_max,)    | -20 | 20    |
    | mask      | which places may be picked             | (n_max,)    | 0   | 1     |
    | slots     | k, how many are picked                 | (1,)        | 0   | n_max |

    ## Rewards

    `gain + time + waste + baseline` until the next choice, each in `info`:

    - gain: fall of the learning proxy's log loss until the next choice, in units of what a server
      step with the fleet's own mixture of data learns; stale updates at the weight of their age.
    - time: -0.1 for each median duration of a job that passed.
    - waste: -0.3 for each server step's worth of median device-seconds spent on jobs that failed or
      were not waited for.
    - baseline: minus what `ExpectedUtility` earns after as many choices in the same window.

    ## Starting State

    A random instant, random devices of those that appear in the window, a random job, schedule and
    mixture of data, and a server without any history; see `EpisodeSettings`.

    ## Episode End

    1. Termination: none.
    2. Truncation: the end of the window, or the last round or choice.

    ## Arguments

    | Parameter  | Type     | Default    | Description                                  |
    |------------|----------|------------|----------------------------------------------|
    | `scenario` | Scenario | required   | where; of a `TraceSet`, `Scenario.of` it     |
    | `n_max`    | int      | `64`       | candidates shown; of more, so many at random |
    | `reward`   | Reward   | `Reward()` | prices of time and waste                     |
    | `baseline` | bool     | `True`     | whether to subtract the heuristic's reward   |

    ## Vectorized Environment

    `VectorSelectionEnv` plays many episodes at once, for Stable-Baselines3.

    ## Version History

    * v1: a step is a choice of clients, an action a ranking; `slots` is observed.
    * v0: a step was one pick of a round.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(
        self,
        scenario: Scenario | TraceSet,
        *,
        n_max: int = N_MAX,
        reward: Reward | None = None,
        baseline: bool = True,
        render_mode: str | None = None,
    ) -> None:
        """Prepare; see the class."""
        del render_mode
        scenario = scenario if isinstance(scenario, Scenario) else Scenario.of(scenario)
        self._rounds = Rounds(scenario, b=1, n_max=n_max, reward=reward, baseline=baseline)
        self.observation_space = observation_space(n_max)  # type: ignore[assignment]
        self.action_space = action_space(n_max)
        self._over = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode."""
        del options
        super().reset(seed=seed)
        self._rounds.begin(self.np_random)
        self._over = False
        return self._observation(), {}

    def step(self, action: Ranking) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Play one choice."""
        if self._over:
            raise ConfigError("step: the episode is over; call reset() first")
        closed = self._rounds.play(np.asarray(action, dtype=np.int64)[None])
        info = {name: float(values[0]) for name, values in closed.terms.items()}
        self._over = bool(closed.ended[0])
        return self._observation(), info["reward"], False, self._over, info

    def _observation(self) -> Observation:
        return {name: values[0].copy() for name, values in self._rounds.observation.items()}


def observation_space(n_max: int) -> spaces.Dict:
    """Return the space of observations of at most n_max candidates."""

    def box(limit: float, *shape: int) -> spaces.Box:
        return spaces.Box(-limit, limit, shape, dtype=np.float32)

    return spaces.Dict(
        {
            "features": box(LIMIT, n_max, N_FEATURES),
            "context": box(LIMIT, N_CONTEXT),
            "heuristic": box(HEURISTIC_LIMIT, n_max),
            "mask": spaces.Box(0.0, 1.0, (n_max,), dtype=np.float32),
            "slots": spaces.Box(0.0, n_max, (1,), dtype=np.float32),
        }
    )


def action_space(n_max: int) -> spaces.MultiDiscrete:
    """Return the space of rankings of n_max places."""
    return spaces.MultiDiscrete(np.full(n_max, n_max))


class VectorSelectionEnv(VecEnv):
    """Many episodes of `SelectionEnv` at once, all in NumPy: b are stepped with one call.

    It is a vectorised environment of Stable-Baselines3. All episodes begin together and take as
    many steps as a window has choices at most: where a window is over before, nothing can be picked
    any more and the reward is 0. The last step begins new windows everywhere.

    Args:
        scenarios: where episodes take place; of s scenarios, b / s episodes in a row are in each.
        n_envs: b, episodes at a time, >= 1; a multiple of s.
        rollouts: episodes in a row that play the same window; b / s is a multiple of it.
        n_max: candidates that are shown in each.
        reward: prices; the defaults if None.
        baseline: whether to subtract what the heuristic earns.
        seed: of everything drawn.

    Raises:
        ConfigError: a number is no integer >= 1 or no multiple, or scenarios differ in choices.
    """

    def __init__(
        self,
        scenarios: Scenario | Sequence[Scenario],
        n_envs: int,
        *,
        rollouts: int = 1,
        n_max: int = N_MAX,
        reward: Reward | None = None,
        baseline: bool = True,
        seed: int = 0,
    ) -> None:
        self.render_mode = None
        places = as_scenarios(scenarios)
        lengths = {scenario.settings.choices for scenario in places}
        if len(lengths) != 1 or n_envs % len(places):
            raise ConfigError(
                f"n_envs = {n_envs}, scenarios with {sorted(lengths)} choices: expected scenarios "
                "with as many choices, and a multiple of their number"
            )
        (self._length,) = lengths
        b = n_envs // len(places)
        self._parts = [
            Rounds(each, b=b, rollouts=rollouts, n_max=n_max, reward=reward, baseline=baseline)
            for each in places
        ]
        self._seed, self._step = seed, 0
        self.next_windows = 0
        """Number of the windows that begin next; they follow from it and the seed."""
        self._actions = np.zeros((n_envs, n_max), dtype=np.int64)
        super().__init__(n_envs, observation_space(n_max), action_space(n_max))

    def reset(self) -> VecEnvObs:
        """Begin an episode everywhere."""
        seeds = self._seeds
        if seeds and seeds[0] is not None:
            self._seed, self.next_windows = seeds[0], 0
        self._reset_seeds()
        self._begin()
        return self._observation()

    def _begin(self) -> None:
        for i, part in enumerate(self._parts):
            part.begin(stream(self._seed, 8, self.next_windows, i))
        self.next_windows += 1
        self._step = 0

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        """Keep the rankings; shape (b, n_max)."""
        self._actions = np.asarray(actions, dtype=np.int64)

    def step_wait(self) -> VecEnvStepReturn:
        """Play one choice in each episode."""
        rewards = np.zeros(self.num_envs, dtype=np.float32)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for part, first in zip(self._parts, self._firsts, strict=True):
            closed = part.play(self._actions[first : first + part.b])
            if not closed.rows.size:
                continue
            rows = first + closed.rows
            rewards[rows] = closed.terms["reward"]
            columns = {name: values.tolist() for name, values in closed.terms.items()}
            for i, row in enumerate(rows.tolist()):
                infos[row] = {name: values[i] for name, values in columns.items()}
        self._step += 1
        over = self._step == self._length
        if over:
            last = self._observation()
            for row, info in enumerate(infos):
                ended = {name: values[row].copy() for name, values in last.items()}
                info |= {"terminal_observation": ended, "TimeLimit.truncated": True}
            self._begin()
        return self._observation(), rewards, np.full(self.num_envs, over), infos

    def close(self) -> None:
        """Do nothing: no resource is open."""

    def env_method(
        self,
        method_name: str,
        *args: Any,  # noqa: ANN401 - as Stable-Baselines3 declares it
        indices: Indices = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> list[Any]:
        """Raise ConfigError: single episodes have no methods."""
        del args, indices, kwargs
        raise ConfigError(f"method {method_name!r}: expected none, episodes have no methods")

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Return an attribute, which all episodes share."""
        return [getattr(self, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(
        self,
        attr_name: str,
        value: Any,  # noqa: ANN401 - as Stable-Baselines3 declares it
        indices: Indices = None,
    ) -> None:
        """Raise ConfigError: episodes share all attributes."""
        raise ConfigError(f"{attr_name} = {value!r}: expected it when the environment is made")

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """Return that no episode is wrapped."""
        del wrapper_class
        return [False] * len(list(self._get_indices(indices)))

    @property
    def _firsts(self) -> range:
        """First row of each scenario."""
        return range(0, self.num_envs, self._parts[0].b)

    def _observation(self) -> dict[str, npt.NDArray[np.float32]]:
        names = self._parts[0].observation
        return {
            name: np.concatenate([part.observation[name] for part in self._parts]) for name in names
        }


gymnasium.register(id=ID, entry_point="fedstale.agents.env.gym_env:SelectionEnv")
