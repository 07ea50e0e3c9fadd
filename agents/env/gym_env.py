"""The environments of Gymnasium: which clients to pick next, on real traces; one episode, or many.

A step is a choice, which begins a round or replaces jobs that failed: the action says which clients
get the next jobs, the simulator goes on to the next choice, and the reward is what was earned until
then (`Simulator.reward_terms`). From each reward what `ExpectedUtility` earns after as many choices
in the same window may be subtracted, which no choice can change: what is left is due to the choice
and not to the hour.

`fedstale.agents.tasks` registers them with devices, windows and reward that do not change.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from fedstale.agents.env.scenario import Scenario, as_scenarios
from fedstale.agents.env.simulator import Reward
from fedstale.agents.env.windows import Action, Rounds
from fedstale.agents.policy import HEURISTIC_LIMIT, LIMIT, N_CONTEXT, N_FEATURES, N_MAX, Observation
from fedstale.errors import ConfigError
from fedstale.traces import Array, Mask, TraceSet

Actions: TypeAlias = npt.NDArray[Any]

SCORE_LIMIT = 10.0
"""No score of an action is larger than this, or smaller than its negative."""
# Positions of a ranking that may name a candidate, over the slots: some name one again.
_POSITIONS = 2


class SelectionEnv(gymnasium.Env[Observation, Actions]):
    """Pick the devices of each round, in a window of recorded behaviour.

    ## Description

    A server of federated learning picks the devices that get the next jobs, in a window of some
    hours. One step is one choice: the jobs are sent, and the next choice is due when the server has
    aggregated, when a job has failed that another device can replace, or when there are devices to
    pick again.

    ## Action Space

    `action="scores"` is `Box(-10, 10, (n_max,))`: a score of each place. The k candidates with the
    highest get a job, with k the number of `slots`; scores of places without a candidate count for
    nothing.

    `action="ranking"` is `MultiDiscrete([n_max] * n_max)`: places in falling order of preference.
    The first k that may be picked get a job; what follows, places without a candidate, and places
    named again are ignored, and a ranking without any place that may be picked sends no job.
    `action_masks()` says which places each position may name, for the MaskablePPO of sb3-contrib.

    ## Observation Space

    A dictionary of float32 arrays; rows of candidates are in random order, and 0 where there is
    none. A device that is offline or busy is no candidate. See
    `fedstale.agents.policy.features.SCHEMA` for each number.

    | Key       | Observation                            | Shape       | Min | Max   |
    |-----------|----------------------------------------|-------------|-----|-------|
    | features  | each candidate, as the server knows it | (n_max, 23) | -8  | 8     |
    | context   | the choice                             | (9,)        | -8  | 8     |
    | heuristic | log score by `BALANCED`                | (n_max,)    | -20 | 20    |
    | mask      | which places may be picked             | (n_max,)    | 0   | 1     |
    | slots     | k, how many are picked                 | (1,)        | 0   | n_max |
    | clock     | share of the episode that is over      | (1,)        | 0   | 1     |

    After the last choice everything but the clock is 0.

    ## Rewards

    `gain + time + waste + baseline` until the next choice, each in `info`:

    - gain: fall of the learning proxy's log loss until the next choice, in units of what a server
      step with the fleet's own mixture of data learns; stale updates at the weight of their age.
    - time: minus `Reward.time` for each median duration of a job that passed; 0 by default.
    - waste: minus `Reward.waste` for each server step's worth of median device-seconds spent on
      jobs that failed or were not waited for; 0 by default.
    - baseline: minus what the highest scores of `BALANCED` earn after as many choices in the same
      window.

    ## Starting State

    The next window of the list that the seed names: an instant, devices of those that appear in the
    window, a job, a schedule and a mixture of data, and a server without any history; see
    `EpisodeSettings`. `reset(seed=s)` begins the list of seed s with window 0, `reset()` goes on to
    the next, and `reset(seed=s, options={"window": i})` begins with window i. `info["window"]` is
    the number of the window.

    ## Episode End

    1. Termination: the end of the window, or the last round or choice. What is learnt afterwards
       counts for nothing.
    2. Truncation: none.

    ## Arguments

    | Parameter  | Type     | Default    | Description                                  |
    |------------|----------|------------|----------------------------------------------|
    | `scenario` | Scenario | required   | where; of a `TraceSet`, `Scenario.of` it     |
    | `action`   | str      | `"scores"` | or `"ranking"`                               |
    | `n_max`    | int      | `64`       | candidates shown; of more, so many at random |
    | `reward`   | Reward   | `Reward()` | prices of time and waste                     |
    | `baseline` | bool     | `True`     | whether to subtract the heuristic's reward   |

    ## Vectorized Environment

    `VectorSelectionEnv` plays many episodes at once.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(
        self,
        scenario: Scenario | TraceSet,
        *,
        action: Action = "scores",
        n_max: int = N_MAX,
        reward: Reward | None = None,
        baseline: bool = True,
        render_mode: str | None = None,
    ) -> None:
        """Prepare; see the class."""
        del render_mode
        self._envs = VectorSelectionEnv(
            scenario, action=action, n_max=n_max, reward=reward, baseline=baseline, rollouts=1
        )
        self.observation_space = self._envs.single_observation_space
        self.action_space = self._envs.single_action_space
        self._over = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin the next window; see the class."""
        super().reset(seed=seed)
        observation, infos = self._envs.reset(seed=seed, options=options)
        self._over = False
        return {name: values[0] for name, values in observation.items()}, _of_one(infos)

    def step(self, action: Actions) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Play one choice."""
        if self._over:
            raise ConfigError("step: the episode is over; call reset() first")
        observation, rewards, over, _, infos = self._envs.step(np.asarray(action)[None])
        self._over = over.item()
        seen = {name: values[0] for name, values in observation.items()}
        return seen, rewards.item(), self._over, False, _of_one(infos)

    def action_masks(self) -> Mask:
        """Mark the places that the positions of a ranking may name; shape (n_max * n_max,)."""
        masks: Mask = self._envs.action_masks()[0]
        return masks


def _of_one(infos: dict[str, Any]) -> dict[str, Any]:
    return {name: values.item() for name, values in infos.items() if not name.startswith("_")}


def _action_masks(rounds: Rounds) -> Mask:
    """Mark the places that the positions of rankings may name; shape (b, n_max * n_max).

    Positions after twice the slots may name the first place alone: what they say counts for
    nothing, and has one probability.
    """
    n, seen = rounds.n_max, rounds.observation
    counts = np.arange(n) < _POSITIONS * seen["slots"]
    found = counts[:, :, None] & (seen["mask"] > 0)[:, None, :]
    found[:, :, 0] |= ~counts
    return found.reshape(rounds.b, n * n)


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
            "clock": spaces.Box(0.0, 1.0, (1,), dtype=np.float32),
        }
    )


def action_space(n_max: int, action: Action) -> spaces.Box | spaces.MultiDiscrete:
    """Return the space of scores, or of rankings, of n_max places."""
    if action == "scores":
        return spaces.Box(-SCORE_LIMIT, SCORE_LIMIT, (n_max,), dtype=np.float32)
    return spaces.MultiDiscrete(np.full(n_max, n_max))


class VectorSelectionEnv(VectorEnv[Observation, Actions, npt.NDArray[Any]]):
    """Many episodes of `SelectionEnv` at once, all in NumPy: b are stepped with one call.

    An episode that is over begins the next window of the seed's list in the same step
    (`AutoresetMode.SAME_STEP`), so that every row is a choice; `infos["final_obs"]` has what its
    end looked like, which is 0 but for the clock.

    With `rollouts`, so many episodes in a row play the same window, and nothing begins by itself
    (`AutoresetMode.DISABLED`): rows that are over earn 0 until `reset()` begins the next windows
    everywhere.

    Args:
        scenario: where episodes take place; of s scenarios, b / s episodes in a row are in each.
        num_envs: b, episodes at a time, >= 1; a multiple of s.
        action: as in `SelectionEnv`, as what follows but the last.
        n_max: candidates that are shown in each.
        reward: prices; the defaults if None.
        baseline: whether to subtract what the heuristic earns.
        rollouts: episodes in a row that play the same window; b / s is a multiple of it.

    Raises:
        ConfigError: a number is no integer >= 1 or no multiple, or scenarios differ in choices.
    """

    def __init__(
        self,
        scenario: Scenario | TraceSet | Sequence[Scenario],
        num_envs: int = 1,
        *,
        action: Action = "scores",
        n_max: int = N_MAX,
        reward: Reward | None = None,
        baseline: bool = True,
        rollouts: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Prepare; see the class."""
        del render_mode
        if isinstance(scenario, TraceSet):
            scenario = Scenario.of(scenario)
        places = as_scenarios(scenario)
        lengths = {each.settings.choices for each in places}
        if len(lengths) != 1 or num_envs % len(places):
            raise ConfigError(
                f"num_envs = {num_envs}, scenarios with {sorted(lengths)} choices: expected "
                "scenarios with as many choices, and a multiple of their number"
            )
        (self.choices,) = lengths
        """Most choices of an episode."""
        self.num_envs, self._together = num_envs, rollouts is not None
        mode = AutoresetMode.DISABLED if self._together else AutoresetMode.SAME_STEP
        self.metadata = {"render_modes": [], "autoreset_mode": mode}
        self._parts = [
            Rounds(
                each,
                b=num_envs // len(places),
                rollouts=rollouts or 1,
                n_max=n_max,
                reward=reward,
                baseline=baseline,
                action=action,
            )
            for each in places
        ]
        self.single_observation_space = observation_space(n_max)
        self.single_action_space = action_space(n_max, action)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._end = {
            name: np.zeros(space.shape or (), dtype=np.float32)
            for name, space in self.single_observation_space.items()
        }
        self._end["clock"][:] = 1.0
        self._begun = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin the next windows everywhere: the first ones of the list of a seed, if it is given.

        Args:
            seed: of the list.
            options: "window" is the number of the first window, 0 if it is not given.

        Raises:
            ConfigError: the number of a window comes without a seed.
        """
        super().reset(seed=seed)
        if seed is None and not self._begun:
            seed = int(self.np_random.integers(2**31))
        first = (options or {}).get("window")
        if first is not None and seed is None:
            raise ConfigError(f'options["window"] = {first!r}: expected the seed of the list, too')
        for i, part in enumerate(self._parts):
            if seed is not None:
                part.windows.begin(seed, i, first or 0)
            every = np.arange(part.b)
            part.renew(every)
            part.show(every)
        self._begun = True
        return self._observation(), self._with_masks({"window": self._window()})

    def step(self, actions: Actions) -> tuple[Observation, Array, Mask, Mask, dict[str, Any]]:
        """Play one choice in each episode.

        Args:
            actions: shape (b, n_max).

        Raises:
            ConfigError: no episode has begun, or a number is not finite.
        """
        if not self._begun:
            raise ConfigError("step: no episode has begun; call reset() first")
        actions, b = np.asarray(actions), self._parts[0].b
        if not (finite := np.isfinite(actions)).all():
            raise ConfigError(
                f"step: an action holds {actions[~finite][0]}: expected finite scores, or places "
                "of a ranking; see whether the policy's weights are finite"
            )
        infos: dict[str, Any] = {"window": self._window()}
        played, over = np.zeros(self.num_envs, dtype=bool), np.zeros(self.num_envs, dtype=bool)
        for i, part in enumerate(self._parts):
            closed = part.play(actions[i * b : (i + 1) * b])
            rows, ended = closed.rows, closed.rows[closed.ended]
            for name, values in closed.terms.items():
                infos.setdefault(name, np.zeros(self.num_envs))[i * b + rows] = values
            played[i * b + rows], over[i * b + ended] = True, True
            if ended.size and not self._together:
                part.renew(ended)
            part.show(rows)
        rewards = infos.get("reward", np.zeros(self.num_envs)).copy()
        infos = self._with_masks(infos, played)
        if over.any() and not self._together:
            infos["final_obs"] = np.full(self.num_envs, None, dtype=object)
            infos["final_obs"][over] = [self._end] * int(over.sum())
            infos["final_info"] = {name: values for name, values in infos.items()}
            infos["_final_obs"] = infos["_final_info"] = over
        return self._observation(), rewards, over, np.zeros_like(over), infos

    def action_masks(self) -> Mask:
        """Mark the places that the positions of rankings may name; shape (b, n_max * n_max)."""
        return np.concatenate([_action_masks(part) for part in self._parts])

    def _window(self) -> npt.NDArray[np.int64]:
        return np.concatenate([part.window for part in self._parts])

    def _with_masks(self, infos: dict[str, Any], which: Mask | None = None) -> dict[str, Any]:
        """Return infos with a mask of the rows that have each, as Gymnasium declares them."""
        which = np.ones(self.num_envs, dtype=bool) if which is None else which
        return infos | {f"_{name}": which for name in infos}

    def _observation(self) -> Observation:
        names = self._parts[0].observation
        return {
            name: np.concatenate([part.observation[name] for part in self._parts]) for name in names
        }
