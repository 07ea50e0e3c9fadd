"""`VectorSelectionEnv`: many episodes of `SelectionEnv` at once, all in NumPy, for training.

It is a vectorised environment of Stable-Baselines3, which `MaskablePPO` takes as it is; an episode
that ends is followed by the next one in the same step.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from fedstale.agents.env.gym_env import N_MAX, observation_space
from fedstale.agents.env.rounds import Rounds
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.simulator import Reward
from fedstale.errors import ConfigError
from fedstale.strategies.settings import is_count

Indices = None | int | Iterable[int]


class VectorSelectionEnv(VecEnv):
    """Steps b episodes with one call.

    Args:
        scenario: where episodes take place.
        n_envs: b, episodes at a time, >= 1.
        n_max: candidates that are shown in each.
        reward: prices; the defaults if None.
        baseline: whether to subtract what the heuristic earns.
        seed: of everything drawn.
    """

    def __init__(
        self,
        scenario: Scenario,
        n_envs: int,
        *,
        n_max: int = N_MAX,
        reward: Reward | None = None,
        baseline: bool = True,
        seed: int = 0,
    ) -> None:
        for name, value in (("n_envs", n_envs), ("n_max", n_max)):
            if not is_count(value):
                raise ConfigError(f"{name} = {value!r}: expected an integer >= 1")
        self.render_mode = None
        self._rounds = Rounds(
            scenario,
            b=n_envs,
            n_max=n_max,
            reward=reward or Reward(),
            baseline=baseline,
            rng=np.random.default_rng(seed),
        )
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
