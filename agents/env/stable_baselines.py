"""`VectorSelectionEnv` for Stable-Baselines3, whose vectorised environments are of another kind.

Its `DummyVecEnv` would step one episode after another, a hundredth as fast.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from fedstale.agents.env.gym_env import VectorSelectionEnv
from fedstale.errors import ConfigError

Indices: TypeAlias = int | Iterable[int] | None


class SB3VecEnv(VecEnv):
    """The episodes of a `VectorSelectionEnv`, as Stable-Baselines3 has them.

    Where the episodes do not begin anew by themselves (`rollouts`), all are over after as many
    steps as an episode has choices at most, and then begin together.

    Args:
        env: a `VectorSelectionEnv`, as `gymnasium.make_vec` returns it for a task.

    Raises:
        ConfigError: it is something else.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        found = env.unwrapped
        if not isinstance(found, VectorSelectionEnv):
            raise ConfigError(f"env = {env}: expected a VectorSelectionEnv")
        self.env, self.render_mode = found, None
        self._together = found.metadata["autoreset_mode"] is AutoresetMode.DISABLED
        self._step = 0
        self._actions: npt.NDArray[Any] = np.zeros(0)
        super().__init__(found.num_envs, found.single_observation_space, found.single_action_space)

    def reset(self) -> VecEnvObs:
        """Begin an episode everywhere."""
        observation, _ = self.env.reset(seed=self._seeds[0], options=self._options[0])
        self._reset_seeds()
        self._reset_options()
        self._step = 0
        return observation

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        """Keep the actions; shape (b, n_max)."""
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Play one choice in each episode."""
        observation, rewards, done, _, found = self.env.step(self._actions)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for name, values in found.items():
            if not name.startswith(("_", "final")):
                rows = np.flatnonzero(found[f"_{name}"])
                for row, value in zip(rows.tolist(), values[rows].tolist(), strict=True):
                    infos[row][name] = value
        ends: Any = found.get("final_obs")
        self._step += 1
        if self._together:
            done = np.full(self.num_envs, self._step == self.env.choices)
            if done[0]:
                ends = [
                    {name: values[row] for name, values in observation.items()}
                    for row in range(self.num_envs)
                ]
                observation, _ = self.env.reset()
                self._step = 0
        for row in np.flatnonzero(done).tolist():
            infos[row] |= {"terminal_observation": ends[row], "TimeLimit.truncated": False}
        return observation, rewards.astype(np.float32), done, infos

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def env_method(
        self, method_name: str, *args: Any, indices: Indices = None, **kwargs: Any
    ) -> list[Any]:
        """Return the action masks of episodes, the one method that they have.

        Raises:
            ConfigError: another method is asked for.
        """
        del args, kwargs
        if method_name != "action_masks":
            raise ConfigError(f"method {method_name!r}: expected 'action_masks'")
        masks = self.env.action_masks()
        return [masks[row] for row in self._get_indices(indices)]

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Return an attribute, which all episodes share."""
        return [getattr(self.env, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Raise ConfigError: episodes share all attributes."""
        raise ConfigError(f"{attr_name} = {value!r}: expected it when the environment is made")

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """Return that no episode is wrapped."""
        del wrapper_class
        return [False] * len(list(self._get_indices(indices)))
