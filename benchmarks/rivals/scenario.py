"""What all simulators have alike: a scenario from a file, the training of its clients, an answer.

A network of two layers is trained by plain SGD in NumPy, so that the same model and the same
batches give the same update in every environment. Nothing here knows a simulator.
"""

import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Model = list[np.ndarray]


def trained(model: Model, images: np.ndarray, labels: np.ndarray, rate: float) -> Model:
    """Return a model after one step of SGD on the mean cross-entropy of a batch."""
    inner, inner_bias, outer, outer_bias = model
    hidden = np.maximum(images @ inner + inner_bias, 0)
    scores = hidden @ outer + outer_bias
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    chances[np.arange(len(labels)), labels] -= 1
    chances /= len(labels)
    back = (chances @ outer.T) * (hidden > 0)
    slopes = [images.T @ back, back.sum(axis=0), hidden.T @ chances, chances.sum(axis=0)]
    return [(w - rate * s).astype(np.float32) for w, s in zip(model, slopes, strict=True)]


def accuracy(model: Model, images: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of images that a model labels rightly."""
    hidden = np.maximum(images @ model[0] + model[1], 0)
    return float(np.mean((hidden @ model[2] + model[3]).argmax(axis=1) == labels))


@dataclass
class Scenario:
    """Clients that are always online, each with its own slowdown and bandwidth.

    `arrays` is a file of NumPy beside the scenario's, with the first model and the clients' data.
    Without it a model of `n_parameters` comes back as it is.
    """

    rule: str
    """FedAsync, FedBuff or FedAvg."""
    slowdown: list[float]
    """Of each client: times the seconds of a step."""
    mbit_per_s: list[float]
    """Of each client, both ways."""
    step_s: float
    steps: int
    in_flight: int
    buffer_size: int
    updates: int
    """Jobs that the server merges until the end."""
    mix: float = 0.6
    batch_size: int = 8
    rate: float = 0.1
    seed: int = 0
    n_parameters: int = 10
    arrays: str | None = None
    is_fast: bool = True
    """Whether a simulator leaves out what it does by default to save memory."""
    options: dict[str, Any] = field(default_factory=dict)
    """For fedstale: where a rule of the same name is another one elsewhere."""
    data: dict[str, np.ndarray] = field(default_factory=dict)
    jobs: Counter = field(default_factory=Counter)

    @classmethod
    def read(cls, path: Path) -> "Scenario":
        """Return the scenario of a file, with its arrays."""
        made = cls(**json.loads(path.read_text()))
        if made.arrays:
            with np.load(path.parent / made.arrays) as data:
                made.data = dict(data)
        return made

    @property
    def n(self) -> int:
        """Number of clients."""
        return len(self.slowdown)

    def first(self) -> Model:
        """Return the model of version 0."""
        if not self.data:
            return [np.zeros(self.n_parameters, np.float32)]
        return [self.data[f"model{i}"] for i in range(4)]

    @property
    def model_bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(array.nbytes for array in self.first())

    def duration_s(self, client: int) -> float:
        """Return the seconds of a job: work, download and upload."""
        link = 2 * self.model_bytes * 8 / (self.mbit_per_s[client] * 1e6)
        return self.step_s * self.steps * self.slowdown[client] + link

    def train(self, client: int, model: Model, number: int | None = None) -> Model:
        """Return a client's model after its next job, or one by number, whose batches it gets."""
        if number is None:
            number = self.jobs[client]
            self.jobs[client] += 1
        if not self.data:
            return model
        images, labels = self.data[f"images{client}"], self.data[f"labels{client}"]
        rng = np.random.default_rng((self.seed, client, number))
        for _ in range(self.steps):
            picked = rng.integers(len(labels), size=self.batch_size)
            model = trained(model, images[picked], labels[picked], self.rate)
        return model


@dataclass
class Answer:
    """What a simulator says of a scenario."""

    version: str
    """Of the simulator."""
    events: list[tuple[float, int, int, float]]
    """By merged job: when it arrived at the server, its client, the version that it began from,
    and when it was sent; in s."""
    model: Model
    run_s: float
    """Without reading and setting up; of the processor where all is in one process."""
    set_up_s: float
    other_mib: float = 0.0
    """Peak of the memory of other processes that took part."""


def answer(run: Callable[[Scenario], Answer]) -> None:
    """Run the scenarios that the command line names, each followed by where its answer goes."""
    paths = list(map(Path, sys.argv[1:]))
    for source, target in zip(paths[::2], paths[1::2], strict=True):
        found = run(Scenario.read(source))
        peak: float = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        np.savez(target.with_suffix(".npz"), *found.model)
        said = {**vars(found), "model": target.with_suffix(".npz").name}
        target.write_text(json.dumps({**said, "peak_mib": round(peak + found.other_mib, 1)}))


clock = time.process_time
