"""Evolution strategies: the gradient of a fitness, estimated from pairs of mirrored random changes.

A selection is rewarded at the end of a round, and a policy by whole windows, so the fitness is the
reward of whole windows, played as the agent is deployed: the best k, no sampling. All members of a
generation play the same windows, and only the order of their fitness counts.

Reference:
    Salimans, Ho, Chen, Sidor, Sutskever. Evolution Strategies as a Scalable Alternative to
    Reinforcement Learning. 2017.
    Kingma, Ba. Adam: A Method for Stochastic Optimization. ICLR 2015.
"""

import numpy as np

from fedstale.agents.env.rounds import rollout, training_picks_of
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.simulator import Reward
from fedstale.agents.policy.features import N_CONTEXT, N_FEATURES
from fedstale.agents.policy.scorer import Weights, by_population, flat, unflat
from fedstale.agents.training.base import Learner, State, Training
from fedstale.traces.arrays import Array

_BETA1, _BETA2, _EPSILON = 0.9, 0.99, 1e-8


class Evolution:
    """Adam on the estimated gradient.

    Args:
        start: vector to begin with; shape (d,).
        pairs: mirrored pairs in a generation, >= 1.
        sigma: size of the changes.
        scale: of each weight's changes and steps; 0 keeps the weight constant; shape (d,).
        seed: of the changes.
    """

    def __init__(
        self,
        start: Array,
        *,
        pairs: int,
        sigma: float,
        scale: Array,
        seed: int,
    ) -> None:
        self.mean = start.astype(np.float64)
        self.pairs, self.sigma, self.seed = pairs, sigma, seed
        self.scale = scale
        self.generation = 0
        self._first, self._second = np.zeros_like(self.mean), np.zeros_like(self.mean)

    def ask(self) -> Array:
        """Return the members of this generation; shape (2 pairs, d), mirrored ones apart."""
        change = self._changes() * self.sigma * self.scale
        return np.concatenate([self.mean + change, self.mean - change])

    def tell(self, fitness: Array, rate: float) -> None:
        """Move towards the members that did better.

        Args:
            fitness: of the members that `ask` returned, more is better; shape (2 pairs,).
            rate: size of the step.
        """
        shaped = ranks(fitness)
        difference = shaped[: self.pairs] - shaped[self.pairs :]
        gradient = difference @ self._changes() / self.pairs
        self.generation += 1
        self._first = _BETA1 * self._first + (1 - _BETA1) * gradient
        self._second = _BETA2 * self._second + (1 - _BETA2) * np.square(gradient)
        first = self._first / (1 - _BETA1**self.generation)
        second = self._second / (1 - _BETA2**self.generation)
        self.mean = self.mean + rate * self.scale * first / (np.sqrt(second) + _EPSILON)

    def state_dict(self) -> State:
        """Return everything that a later `ask` depends on; windows follow from the generation."""
        return {
            "mean": self.mean,
            "first": self._first,
            "second": self._second,
            "generation": np.array([self.generation]),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from what `state_dict` returned."""
        self.mean, self._first, self._second = (state[k] for k in ("mean", "first", "second"))
        self.generation = int(state["generation"][0])

    def _changes(self) -> Array:
        """Return the changes of this generation, which follow from its number."""
        key = np.random.SeedSequence(self.seed, spawn_key=(2, self.generation))
        return np.random.default_rng(key).standard_normal((self.pairs, self.mean.size))


class EvolutionLearner(Evolution, Learner):
    """Changes agents at random, lets all play the same new windows, and follows the better ones.

    Args:
        scenario: where the windows are.
        training: how.
        reward: prices.
    """

    def __init__(self, scenario: Scenario, training: Training, reward: Reward) -> None:
        start = training.start_weights()
        scale = {name: np.ones_like(value) for name, value in start.items()}
        scale["beta"][:] = float(training.residual)
        super().__init__(
            flat(start).astype(np.float64),
            pairs=training.pairs,
            sigma=training.sigma,
            scale=flat(scale).astype(np.float64),
            seed=training.seed,
        )
        self._scenario, self._training, self._reward = scenario, training, reward
        self._simulator = scenario.simulator(2 * training.pairs * training.windows)

    def update(self) -> dict[str, float]:
        """Play one generation."""
        training = self._training
        key = np.random.SeedSequence(training.seed, spawn_key=(8, self.generation))
        each = training.windows
        episodes = self._scenario.draw(each, np.random.default_rng(key))
        members = self.ask()
        repeated = episodes.take(np.tile(np.arange(each), len(members)))
        pick = training_picks_of(self._simulator, by_population(members, each))
        played = rollout(self._simulator, repeated, pick, self._reward)
        fitness = played.terms["reward"].reshape(-1, each).mean(axis=1)
        self.tell(fitness, training.rate_at(self.generation))
        return {
            "reward": float(fitness.mean()),
            "best_member": float(fitness.max()),
            "beta": float(self.weights()["beta"][0]),
        }

    def weights(self) -> Weights:
        """Return the mean of the population."""
        return unflat(self.mean, N_FEATURES, N_CONTEXT)


def ranks(fitness: Array) -> Array:
    """Return ranks scaled to [-1/2, 1/2]; equal ones share their mean rank, NaN is the worst.

    Example:
        >>> ranks(np.array([3.0, 9.0, 3.0]))
        array([-0.25,  0.5 , -0.25])
    """
    values = np.nan_to_num(fitness, nan=-np.inf, neginf=-np.inf)
    ordered = np.sort(values)
    low, high = (np.searchsorted(ordered, values, side=side) for side in ("left", "right"))
    return (low + high - 1) / 2 / max(fitness.size - 1, 1) - 0.5
