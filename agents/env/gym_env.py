"""The environments: which client to pick next, on real traces; for Gymnasium, and for training.

A round is as many picks as the server has free slots, and an environment makes them one by one
(`Rounds`): candidates are shown packed and in random order, so that a place in the observation
means nothing; after the last pick jobs are sent, and the simulator goes on to the next choice. From
each round's reward is subtracted what `ExpectedUtility` earns in the same round of the same window,
which no choice can change: what is left is due to the choice and not to the hour.

Importing this module registers `SelectionEnv` as `fedstale/Selection-v0`; Gymnasium imports it by
itself in `gymnasium.make("fedstale.agents.env.gym_env:fedstale/Selection-v0", scenario=traces)`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from fedstale.agents.env.episodes import Episodes
from fedstale.agents.env.rounds import picks_of, rollout
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.simulator import Reward
from fedstale.agents.policy.features import (
    CONTEXT,
    HEURISTIC_LIMIT,
    LIMIT,
    N_CONTEXT,
    N_FEATURES,
)
from fedstale.agents.policy.scorer import by_heuristic
from fedstale.errors import ConfigError
from fedstale.strategies.settings import is_count
from fedstale.traces import TraceSet
from fedstale.traces.arrays import Array, Index, Mask

Observation: TypeAlias = dict[str, npt.NDArray[np.float32]]
Action: TypeAlias = np.int64
Indices: TypeAlias = int | Iterable[int] | None

ID = "fedstale/Selection-v0"
N_MAX = 64
"""Candidates that are shown at a time, by default."""

_PICKED = CONTEXT.index("picked_share")
# Episodes that are drawn, and played by the heuristic, at a time; and how often each is then used,
# in a new order every time: choices differ, so nothing repeats.
_DRAWN, _USES = 256, 4


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ClosedRounds:
    """Rounds that a pick has closed."""

    rows: Index
    """Their episodes; shape (m,)."""
    terms: dict[str, Array]
    """Terms of their rewards, each of shape (m,)."""
    ended: Mask
    """Whether the episode is over; shape (m,)."""


class Rounds:
    """The state of b episodes between picks.

    Args:
        scenario: where episodes take place.
        b: episodes at a time.
        n_max: candidates that are shown; of more, so many are shown at random.
        reward: prices; the defaults if None.
        baseline: whether to subtract what the heuristic earns.
        seed: of everything drawn.

    Raises:
        ConfigError: a number of episodes or candidates is no integer >= 1.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        b: int,
        n_max: int,
        reward: Reward | None,
        baseline: bool = True,
        seed: int = 0,
    ) -> None:
        for name, value in (("n_envs", b), ("n_max", n_max)):
            if not is_count(value):
                raise ConfigError(f"{name} = {value!r}: expected an integer >= 1")
        self.scenario, self.b, self.n_max = scenario, b, n_max
        self.reward = reward or Reward()
        self.simulator = scenario.simulator(b)
        self._baseline = scenario.simulator(min(_DRAWN, b)) if baseline else None
        self.rng = np.random.default_rng(seed)
        rounds = scenario.settings.rounds
        # Episodes drawn, what the heuristic earns in their rounds, and those still to be used.
        self._pool: Episodes
        self._pool_rewards, self._unused = np.zeros((0, rounds)), np.zeros(0, dtype=np.int64)
        self._expected = np.zeros((b, rounds))
        self.columns = np.zeros((b, n_max), dtype=np.int64)
        self.left = np.zeros(b, dtype=np.int64)
        self._slots = np.ones(b, dtype=np.int64)
        self._picked = np.zeros((b, self.simulator.n), dtype=bool)
        self.mask = np.zeros((b, n_max), dtype=bool)
        """Which places may be picked now; shape (b, n_max)."""
        self.observation: Observation = {
            "features": np.zeros((b, n_max, N_FEATURES), dtype=np.float32),
            "context": np.zeros((b, N_CONTEXT), dtype=np.float32),
            "heuristic": np.zeros((b, n_max), dtype=np.float32),
            "mask": np.zeros((b, n_max), dtype=np.float32),
        }
        """The current observation; the same arrays are written again at the next pick."""

    def reseed(self, rng: np.random.Generator) -> None:
        """Draw everything that follows anew."""
        self.rng, self._unused = rng, self._unused[:0]

    def begin(self, rows: Index) -> None:
        """Begin new episodes."""
        # An episode without any candidate has no choice in it.
        waiting = rows
        for _ in range(100):
            self._begin(waiting)
            waiting = waiting[self.simulator.done[waiting]]
            if not waiting.size:
                break
        self._show(rows)

    def _begin(self, rows: Index) -> None:
        while rows.size:
            if not self._unused.size:
                self._refill()
            used, self._unused = self._unused[: rows.size], self._unused[rows.size :]
            some, rows = rows[: used.size], rows[used.size :]
            self.simulator.reset(self._pool.take(used), some)
            self._expected[some] = self._pool_rewards[used]

    def _refill(self) -> None:
        n = min(_DRAWN, self.b)
        self._pool = self.scenario.draw(n, self.rng)
        self._unused = np.concatenate([self.rng.permutation(n) for _ in range(_USES)])
        self._pool_rewards = np.zeros((n, self.scenario.settings.rounds))
        if self._baseline is not None:
            seed = np.random.SeedSequence(0)
            pick = picks_of(self._baseline, by_heuristic, n, seed)
            self._pool_rewards = rollout(self._baseline, self._pool, pick, self.reward).by_round

    def _show(self, rows: Index) -> None:
        """Show the next choice of some episodes."""
        mask = self.simulator.mask[rows]
        keys = np.where(mask, self.rng.random(mask.shape), 2.0)
        if mask.shape[1] > self.n_max:
            order = np.argpartition(keys, self.n_max, axis=1)[:, : self.n_max]
        else:
            order = np.argsort(keys, axis=1)
        columns = np.zeros((rows.size, self.n_max), dtype=np.int64)
        columns[:, : order.shape[1]] = order
        shown = np.zeros(columns.shape, dtype=bool)
        shown[:, : order.shape[1]] = np.take_along_axis(mask, order, axis=1)
        self.columns[rows], self.mask[rows] = columns, shown
        self._picked[rows] = False
        self.left[rows] = np.minimum(self.simulator.slots[rows], shown.sum(axis=1))
        self._slots[rows] = np.maximum(self.left[rows], 1)
        features, context, heuristic = self.simulator.observation(rows, columns)
        self.observation["features"][rows] = features * shown[..., None]
        self.observation["context"][rows] = context
        self.observation["heuristic"][rows] = heuristic * shown
        self.observation["mask"][rows] = shown

    def pick(self, actions: npt.NDArray[np.int64]) -> ClosedRounds:
        """Make one pick in each episode; a place that may not be picked uses up the pick.

        Args:
            actions: places in the observation; shape (b,).

        Returns:
            The rounds that are closed by it; their next choices are shown already.
        """
        every = np.arange(self.b)
        legal = self.mask[every, actions]
        row, place = every[legal], actions[legal]
        self._picked[row, self.columns[row, place]] = True
        self.mask[row, place] = False
        self.observation["mask"][row, place] = 0.0
        self.left -= 1
        rows = every[(self.left <= 0) | ~self.mask.any(axis=1)]
        self.observation["context"][:, _PICKED] = 1.0 - self.left / self._slots
        if not rows.size:
            return ClosedRounds(rows=rows, terms={}, ended=np.zeros(0, dtype=bool))
        simulator = self.simulator
        turn = simulator.n_rounds[rows].copy()
        simulator.dispatch(rows, self._picked[rows])
        outcome = simulator.advance(rows)
        terms = simulator.reward_terms(rows, outcome, self.reward)
        ended = simulator.done[rows]
        expected = self._expected[rows, turn]
        # The heuristic may have had more rounds in its window.
        later = np.arange(self._expected.shape[1]) > turn[:, None]
        rest = (self._expected[rows] * later).sum(axis=1)
        terms["baseline"] = -(expected + np.where(ended, rest, 0.0))
        terms["reward"] += terms["baseline"]
        for name in ("progress", "time_s", "wasted_s", "sent", "aggregated", "failed", "discarded"):
            terms[name] = getattr(outcome, name)
        self._show(rows)
        return ClosedRounds(rows=rows, terms=terms, ended=ended)


class SelectionEnv(gymnasium.Env[Observation, Action]):
    """Pick devices for training, one at a time, in a window of recorded behaviour.

    ## Action space

    `Discrete(n_max)`: the place of a candidate in the observation. `action_masks()` says which
    places may be picked; another one picks no device and uses up the pick. A device that is
    offline, busy, in its cooldown or picked already is not a candidate.

    ## Observation space

    A dictionary of float32 arrays; rows of candidates are in random order, and 0 where there is
    none. See `fedstale.agents.policy.features.SCHEMA` for each number.

    | key | shape | range | what |
    |---|---|---|---|
    | features | (n_max, 23) | [-8, 8] | of each candidate, as the server knows it |
    | context | (8,) | [-8, 8] | of the choice |
    | heuristic | (n_max,) | [-20, 20] | log(p_finish x utility), the score of `ExpectedUtility` |
    | mask | (n_max,) | 0 or 1 | which places may be picked |

    ## Rewards

    0, until the last pick of a round. Then `gain + time + waste + baseline`, each in `info`:

    - gain: fall of the learning proxy's log loss until the next choice, in units of what a server
      step with the fleet's own mixture of data learns; stale updates at the weight of their age.
    - time: -0.1 for each median duration of a job that passed.
    - waste: -0.3 for each server step's worth of median device-seconds spent on jobs that failed or
      were not waited for.
    - baseline: minus what `ExpectedUtility` earns in the same round of the same window.

    ## Starting state

    A random instant, random devices of those that appear in the window, a random job, schedule and
    mixture of data, and a server without any history; see `EpisodeSettings`.

    ## Episode end

    Truncated at the end of the window or after the last round. There is no termination.

    ## Arguments

    `scenario`: a `Scenario`, or traces, whose scenario is then `Scenario.of(traces)`; `n_max`,
    `reward`, `baseline`.

    ## Version history

    v0: the first.
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
        self.action_space = spaces.Discrete(n_max)
        self._over = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode."""
        del options
        super().reset(seed=seed)
        if seed is not None or self._rounds.rng is not self.np_random:
            self._rounds.reseed(self.np_random)
        self._rounds.begin(np.zeros(1, dtype=np.int64))
        self._over = False
        return self._observation(), {}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Pick one candidate."""
        if self._over:
            raise ConfigError("step: the episode is over; call reset() first")
        closed = self._rounds.pick(np.array([action], dtype=np.int64))
        if not closed.rows.size:
            return self._observation(), 0.0, False, False, {}
        info = {name: float(values[0]) for name, values in closed.terms.items()}
        self._over = bool(closed.ended[0])
        return self._observation(), info["reward"], False, self._over, info

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """Return which places may be picked; shape (n_max,)."""
        return self._rounds.mask[0].copy()

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
        }
    )


class VectorSelectionEnv(VecEnv):
    """Many episodes of `SelectionEnv` at once, all in NumPy: b are stepped with one call.

    It is a vectorised environment of Stable-Baselines3, which `MaskablePPO` takes as it is; an
    episode that ends is followed by the next one in the same step.

    Args:
        scenario: where episodes take place.
        n_envs: b, episodes at a time, >= 1.
        n_max: candidates that are shown in each.
        reward: prices; the defaults if None.
        seed: of everything drawn.
    """

    def __init__(
        self,
        scenario: Scenario,
        n_envs: int,
        *,
        n_max: int = N_MAX,
        reward: Reward | None = None,
        seed: int = 0,
    ) -> None:
        self.render_mode = None
        self._rounds = Rounds(scenario, b=n_envs, n_max=n_max, reward=reward, seed=seed)
        self._actions = np.zeros(n_envs, dtype=np.int64)
        super().__init__(n_envs, observation_space(n_max), spaces.Discrete(n_max))

    def reset(self) -> VecEnvObs:
        """Begin an episode everywhere."""
        seeds = self._seeds
        if seeds and seeds[0] is not None:
            self._rounds.reseed(np.random.default_rng(seeds[0]))
        self._reset_seeds()
        self._rounds.begin(np.arange(self.num_envs))
        return self._observation()

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        """Keep the actions; shape (b,)."""
        self._actions = np.asarray(actions, dtype=np.int64).reshape(self.num_envs)

    def step_wait(self) -> VecEnvStepReturn:
        """Make one pick in each episode."""
        closed = self._rounds.pick(self._actions)
        rewards = np.zeros(self.num_envs, dtype=np.float32)
        dones = np.zeros(self.num_envs, dtype=bool)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if closed.rows.size:
            rewards[closed.rows] = closed.terms["reward"]
            columns = {name: values.tolist() for name, values in closed.terms.items()}
            for i, row in enumerate(closed.rows.tolist()):
                infos[row] = {name: values[i] for name, values in columns.items()}
            ended = closed.rows[closed.ended]
            if ended.size:
                dones[ended] = True
                for row in ended.tolist():
                    last = {k: v[row].copy() for k, v in self._rounds.observation.items()}
                    infos[row] |= {"terminal_observation": last, "TimeLimit.truncated": True}
                self._rounds.begin(ended)
        return self._observation(), rewards, dones, infos

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """Return which places may be picked; shape (b, n_max)."""
        return self._rounds.mask.copy()

    def close(self) -> None:
        """Do nothing: no resource is open."""

    def env_method(
        self,
        method_name: str,
        *args: Any,  # noqa: ANN401 - as Stable-Baselines3 declares it
        indices: Indices = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> list[Any]:
        """Return `action_masks` of each episode; there is no other method of single ones."""
        del args, kwargs
        if method_name != "action_masks":
            raise ConfigError(f"method {method_name!r}: expected 'action_masks'")
        return list(self.action_masks()[list(self._get_indices(indices))])

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

    def _observation(self) -> VecEnvObs:
        return {name: values.copy() for name, values in self._rounds.observation.items()}


gymnasium.register(id=ID, entry_point="fedstale.agents.env.gym_env:SelectionEnv")
