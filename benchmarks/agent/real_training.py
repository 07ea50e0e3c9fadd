"""Episodes whose models are really trained: a small perceptron on digits, on every device.

    place = TrainedScenario.like(tasks.scenario("fedstale/Selection-phones-v1", "test"))

The learning proxy says in a few numbers what a server step does to a model. Here devices do it:
each has digits of its own, by its mixture of labels, and trains the version that it was sent with
one epoch of SGD, or `epochs`; the server adds the mean of the updates, by their examples and the
weights of their age, as `StaleStrategy` does; and the loss on each label is that of digits that no
device has. Many devices are trained at once, in NumPy alone. A device trains when its update is
aggregated: a job that fails or is discarded costs nothing. Nothing is drawn while episodes are
played, so an episode is the same whatever is played beside it.

The gain is the fall of the log loss of the fleet's data over `STEP`, a constant, where that of the
proxy is measured by what a step could learn at the time. So the gains of an episode add up to the
fall from its first model to its last, what is forgotten is taken back, and at a small loss the
noise of single steps is not blown up.

Not here: the digits of a device are drawn with replacement from those that all share, more than
`LARGEST` of a device are not trained on in one job though they weigh, and the order of its examples
is the same in each job.
"""

import json
from dataclasses import fields
from functools import lru_cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedstale.agents.env.episodes import GROUPS, INFLATION, Episodes
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.simulator import Simulator
from fedstale.traces import Array, Index, Mask, stream

Floats = npt.NDArray[np.float32]

RATE = 0.2
"""Learning rate of the devices."""
BATCH = 10
"""Examples of a local step; the last one of a job may have fewer."""
LARGEST = 400
"""Most examples that a device trains on in a job."""
STEP = 0.2
"""Fall of the log loss that is a gain of 1: about what each of the first ten server steps learns
from five devices of 145 examples with equal shares of all labels (0.07 to 0.28)."""

_PIXELS, _HIDDEN = 64, 32
_ENDS = np.cumsum([_PIXELS * _HIDDEN, _HIDDEN, _HIDDEN * GROUPS, GROUPS])
SIZE = int(_ENDS[-1])
"""Parameters of a model."""
_DATA = "apps/digits/digits_app/digits.json"


class Digits(NamedTuple):
    """Some digits, sorted by label; every label occurs."""

    images: Floats
    """Pixels in [0, 1]; shape (m, 64)."""
    labels: Index
    """Shape (m,)."""
    starts: Index
    """Position of the first digit of each label; shape (GROUPS,)."""
    counts: Index
    """Digits of each label; shape (GROUPS,)."""


@lru_cache(maxsize=1)
def digits() -> tuple[Digits, Digits]:
    """Return the digits that devices are given, and those that models are tested on: 4/5 and 1/5.

    They are those of the built-in app.
    """
    raw = json.loads(files("fedstale").joinpath(_DATA).read_text(encoding="utf-8"))
    pixels = np.array([[int(level, 17) for level in image] for image in raw["images"]])
    images, labels = (pixels / 16).astype(np.float32), np.array([int(x) for x in raw["labels"]])
    order = stream(0, 83).permutation(labels.size)
    n_test = labels.size // 5

    def sort(some: Index) -> Digits:
        some = some[np.argsort(labels[some], kind="stable")]
        counts = np.bincount(labels[some], minlength=GROUPS)
        return Digits(images[some], labels[some], np.cumsum(counts) - counts, counts)

    return sort(order[n_test:]), sort(order[:n_test])


@lru_cache(maxsize=1)
def first_model() -> Floats:
    """Return the model that every episode begins with; shape (SIZE,)."""
    model, rng = np.empty((1, SIZE), dtype=np.float32), stream(0, 84)
    for layer, n_inputs in zip(_layers(model), (_PIXELS, _PIXELS, _HIDDEN, _HIDDEN), strict=True):
        layer[:] = rng.uniform(-(n_inputs**-0.5), n_inputs**-0.5, layer.shape)
    return model[0]


def examples_of(seeds: Array, mixtures: Array, n: int) -> Index:
    """Return which training digits devices have: each label with its share, of it any digit.

    Args:
        seeds: any numbers, each with digits of its own; shape (j,).
        mixtures: share of each label; shape (j, GROUPS).
        n: how many of each device; fewer are the first of more.

    Returns:
        Positions; shape (j, n).
    """
    # SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): random numbers of a device without a generator.
    x = np.ascontiguousarray(seeds, dtype=np.float64).view(np.uint64)[:, None]
    x = x + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    of_label, of_digit = (x >> np.uint64(32)) / 2.0**32, (x & np.uint64(0xFFFFFFFF)) / 2.0**32
    ends = np.cumsum(mixtures, axis=1)[:, None, :-1]
    label = (of_label[..., None] >= ends).sum(axis=2)
    training, _ = digits()
    return np.asarray(training.starts[label] + (of_digit * training.counts[label]).astype(np.int64))


def train(
    models: Floats, chosen: Index, counts: Index, rates: npt.ArrayLike = RATE
) -> tuple[Floats, Array, Array]:
    """Train models with SGD, each on its examples one after another, all at once.

    Args:
        models: to begin with; shape (j, SIZE).
        chosen: positions of the training digits of each; shape (j, m).
        counts: of how many of them, from the first, in [1, m]; shape (j,).
        rates: learning rates; one, or shape (j,).

    Returns:
        By how much each model changed, shape (j, SIZE), and the mean and the mean square of its
        cross-entropy on each example when the example was trained on, in nats; shape (j,) each.
    """
    training, _ = digits()
    # The largest first, so that those with steps to go are the first ones.
    order = np.argsort(-counts, kind="stable")
    ordered, chosen, left = models[order], chosen[order], counts[order]
    rates = np.broadcast_to(np.asarray(rates, dtype=np.float32), counts.shape)[order, None]
    sums = np.zeros((2, counts.size))
    for first in range(0, int(counts.max()), BATCH):
        k = int((left > first).sum())
        batch = chosen[:k, first : first + BATCH]
        inside = first + np.arange(batch.shape[1]) < left[:k, None]
        w1, b1, w2, b2 = _layers(ordered[:k])
        images, labels = training.images[batch], training.labels[batch][..., None]
        hidden, logs = _forward(ordered[:k], images)
        losses = np.where(inside, -np.take_along_axis(logs, labels, axis=2)[..., 0], 0.0)
        sums[:, order[:k]] += losses.sum(axis=1), (losses**2).sum(axis=1)
        error = np.exp(logs) - (labels == np.arange(GROUPS))
        error *= (inside * (rates[:k] / inside.sum(axis=1, keepdims=True)))[..., None]
        inner = (error @ w2.swapaxes(1, 2)) * (hidden > 0)
        w1 -= images.swapaxes(1, 2) @ inner
        b1 -= inner.sum(axis=1)
        w2 -= hidden.swapaxes(1, 2) @ error
        b2 -= error.sum(axis=1)
    updates = np.empty_like(models)
    updates[order] = ordered
    mean, square = sums / counts
    return updates - models, mean, square


def label_losses(models: Floats) -> Array:
    """Return the mean cross-entropy of models on the test digits of each label, in nats.

    Args:
        models: shape (m, SIZE).

    Returns:
        Shape (m, GROUPS).
    """
    _, test = digits()
    _, logs = _forward(models, test.images)
    each = -logs[:, np.arange(test.labels.size), test.labels].astype(np.float64)
    return np.add.reduceat(each, test.starts, axis=1) / test.counts


def accuracy_of(models: Floats) -> Array:
    """Return the shares of every second test digit that models name rightly; shape (m,)."""
    _, test = digits()
    _, logs = _forward(models, test.images[::2])
    return np.asarray((logs.argmax(axis=2) == test.labels[::2]).mean(axis=1))


def _layers(models: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the weights and biases of models as views; shape (m, ...) each."""
    w1, b1, w2, b2 = np.split(models, _ENDS[:-1], axis=1)
    return w1.reshape(-1, _PIXELS, _HIDDEN), b1, w2.reshape(-1, _HIDDEN, GROUPS), b2


def _forward(models: Floats, images: Floats) -> tuple[Floats, Floats]:
    """Return hidden values, and the log probability of each label; shape (m, n, ...) each."""
    w1, b1, w2, b2 = _layers(models)
    hidden = np.maximum(images @ w1 + b1[:, None], 0.0)
    logits = hidden @ w2 + b2[:, None]
    logits -= logits.max(axis=2, keepdims=True)
    return hidden, logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))


class TrainingSimulator(Simulator):
    """Episodes whose models are really trained; see the module.

    Args:
        scenario: where they take place; of its proxy nothing is used.
        b: number of episodes at a time.
    """

    def __init__(self, scenario: Scenario, b: int) -> None:
        super().__init__(scenario, b)
        self.models = np.tile(first_model(), (b, 1))
        """The current version of each episode; shape (b, SIZE)."""
        # Versions that jobs in flight were sent, and the place of that of each device.
        self._versions = np.empty((b, SIZE), dtype=np.float32)
        self._place = np.zeros((b, self.n), dtype=np.int64)
        self._updates = np.empty((0, SIZE), dtype=np.float32)
        self.epochs, self.rates = np.ones(b, dtype=np.int64), np.full(b, RATE)
        """Of the devices of each episode; shape (b,)."""

    def reset(self, episodes: Episodes, rows: npt.ArrayLike | None = None) -> None:
        """Begin episodes; see `Simulator.reset`."""
        super().reset(episodes, rows)
        places = np.arange(self.b) if rows is None else np.asarray(rows, dtype=np.int64)
        self.models[places] = first_model()
        self.losses[places] = label_losses(first_model()[None])

    def _train(self, at: tuple[Index, Index]) -> None:
        """Keep the versions that devices are sent, until they are needed."""
        others = self.in_flight & ~self.done[:, None]
        others[at] = False
        used = self._place[others]
        free = np.setdiff1d(np.arange(used.size + at[0].size), used)[: at[0].size]
        if (lacking := int(free.max(initial=0)) + 1 - len(self._versions)) > 0:
            room = np.empty((max(lacking, len(self._versions)), SIZE), dtype=np.float32)
            self._versions = np.concatenate([self._versions, room])
        self._place[at], self._versions[free] = free, self.models[at[0]]

    def _accept(self, rows: Index, accepted: Mask) -> None:
        """Train the devices whose updates are aggregated, and go on as ever."""
        which, column = np.nonzero(accepted)
        at = rows[which], column
        counts = np.clip(self.episodes.examples[at], 1, LARGEST).astype(np.int64)
        seeds, mixtures = self.episodes.noise[at][:, 0], self.episodes.mixtures[at]
        chosen = examples_of(seeds, mixtures, int(counts.max()))
        steps = counts * self.epochs[at[0]]
        turns = np.arange(int(steps.max())) % counts[:, None]
        self._updates, mean, square = train(
            self._versions[self._place[at]],
            np.take_along_axis(chosen, turns, axis=1),
            steps,
            self.rates[at[0]],
        )
        times = np.where(self.episodes.inflates[at], INFLATION, 1.0)
        self.job_loss[at], self.job_square_loss[at] = times * mean, times**2 * square
        super()._accept(rows, accepted)

    def _merge(self, rows: Index, accepted: Mask, weights: Array) -> tuple[Array, Array]:
        """Add the mean of the updates to the models; see `Simulator._merge`."""
        which, column = np.nonzero(accepted)
        n_examples = np.where(accepted, self.episodes.examples[rows], 0.0).sum(axis=1)
        shares = (weights / n_examples[:, None])[which, column].astype(np.float32)[:, None]
        starts = np.searchsorted(which, np.arange(rows.size))
        self.models[rows] += np.add.reduceat(shares * self._updates, starts, axis=0)
        return self._measure(rows)

    def _measure(self, rows: Index) -> tuple[Array, Array]:
        """Evaluate the models of some episodes; see `Simulator._learn`."""
        before, fleet = self.losses[rows], self.fleet_share[rows]
        self.losses[rows] = after = label_losses(self.models[rows])
        progress = np.log((fleet * before).sum(axis=1) / (fleet * after).sum(axis=1))
        return progress, progress / STEP


class TrainedScenario(Scenario):
    """A scenario whose simulators train models instead of asking the proxy."""

    @classmethod
    def like(cls, scenario: Scenario) -> "TrainedScenario":
        """Copy a scenario."""
        return cls(**{field.name: getattr(scenario, field.name) for field in fields(scenario)})

    def simulator(self, b: int) -> TrainingSimulator:
        """Make a simulator with room for b of this scenario's episodes at a time."""
        return TrainingSimulator(self, b)
