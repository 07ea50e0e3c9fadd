"""`SelectionEnv`: which client to pick next, as a Gymnasium environment on real traces.

Importing this module registers it as `fedstale/Selection-v0`; Gymnasium imports it by itself in
`gymnasium.make("fedstale.agents.env.gym_env:fedstale/Selection-v0", scenario=traces)`.
"""

from typing import Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from fedstale.agents.env.rounds import Observation, Rounds
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.simulator import Reward
from fedstale.agents.policy.features import HEURISTIC_LIMIT, LIMIT, N_CONTEXT, N_FEATURES
from fedstale.errors import ConfigError
from fedstale.strategies.settings import is_count
from fedstale.traces import TraceSet

Action: TypeAlias = np.int64

ID = "fedstale/Selection-v0"
N_MAX = 64
"""Candidates that are shown at a time, by default."""


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
        if not is_count(n_max):
            raise ConfigError(f"n_max = {n_max!r}: expected an integer >= 1")
        self.observation_space = observation_space(n_max)  # type: ignore[assignment]
        self.action_space = spaces.Discrete(n_max)
        self._rounds = Rounds(
            scenario if isinstance(scenario, Scenario) else Scenario.of(scenario),
            b=1,
            n_max=n_max,
            reward=reward or Reward(),
            baseline=baseline,
            rng=np.random.default_rng(0),
        )
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


gymnasium.register(id=ID, entry_point="fedstale.agents.env.gym_env:SelectionEnv")
