"""The built-in apps as a benchmark of selectors trains them: data, arithmetic and costs.

Deals, networks, orders of examples and optimizers are the apps' own. Only the amount of arithmetic
is smaller, never the time that it stands for: a job of the mean device has as much work as
`selection_training` says, whatever is computed for it, and a device with twice the examples has
twice the work.

| app | what a device trains on | bytes each way | declared work of the mean device of 30, units |
|---|---|---:|---:|
| digits | its share of 1,438 images, less a fifth | 5.0 MB | 173 |
| fashion | its share of 1,800 images, less a fifth | 6.7 MB | 118 |
| shakespeare | the first 16 of its lines of 80 characters | 3.3 MB | 76 |

Bytes of the last two are those that the app declares; digits have stood for a model of 5 MB since
the learning proxy was fitted. Work is scaled to one duration on the median device of each fleet, so
that desktops, three times as fast, do not play another benchmark.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from numpy_digits import NumpyDigits, forward, read_model
from numpy_fashion import patches, scores
from numpy_fashion import train as train_images
from numpy_shakespeare import NumpyShakespeare
from numpy_shakespeare import evaluate as evaluate_lines

from fedstale.apps import classification, client
from fedstale.simulation import Costs, Executor
from fedstale.simulation.executors import ClientCall, ClientReply
from fedstale.simulation.flower_app import FlowerApp
from fedstale.strategies.types import Array

TEXT = Path(__file__).parents[1] / ".." / "shared" / "data" / "tinyshakespeare.txt.gz"
LINES = 16
"""Lines of a play that a device trains on."""


class TrainingApp(ABC):
    """An app of which devices train a model together; made once in a process by `opened`."""

    name: ClassVar[str]
    model_bytes: ClassVar[int]
    """Of a message and of a reply."""
    has_skew: ClassVar[bool] = True
    """Whether data are dealt by a Dirichlet distribution."""
    every: ClassVar[int] = 1
    """Versions from one evaluation to the next."""
    settings: Mapping[str, int | float | str]
    """The run config, without seed and skew."""

    @abstractmethod
    def executor(self) -> Executor:
        """Return what trains devices."""

    @abstractmethod
    def initial(self, seed: int) -> ArrayRecord:
        """Return the first model."""

    @abstractmethod
    def evaluate(self, arrays: ArrayRecord, seed: int) -> tuple[float, Array]:
        """Return the accuracy on a test set of all devices, and the mean loss on each group."""

    @abstractmethod
    def examples(self, n_devices: int, alpha: float | None, seed: int) -> Array:
        """Return how many examples each device trains on; shape (devices,)."""

    def config(self, alpha: float | None, seed: int) -> dict[str, int | float | str | bool]:
        """Return the run config."""
        skew = {} if alpha is None else {"alpha": alpha}
        return {**self.settings, **skew, "seed": seed, "forecasts": False}

    def costs(self, work: float, n_devices: int, alpha: float | None, seed: int) -> Costs:
        """Return what jobs cost: as much work on the device with the mean number of examples."""
        epochs = int(self.settings["local-epochs"])
        mean = float(self.examples(n_devices, alpha, seed).mean())
        return Costs(
            work_per_example=work / (epochs * mean),
            epochs=epochs,
            examples=mean,
            model_bytes=self.model_bytes,
            constant_replies=True,
        )


class Digits(TrainingApp):
    """The app `digits`."""

    name, model_bytes = "digits", 5_000_000

    def __init__(self) -> None:
        """Import the app's module."""
        app = FlowerApp.find(self.name)
        with app.importable():
            app.load_client()
            from digits_app import task  # only now, while the app is open
        self.settings = {"local-epochs": 5, "batch-size": 8, "learning-rate": 0.1}
        self.task, self._executor = task, NumpyDigits(task)

    def executor(self) -> Executor:
        """Train in NumPy."""
        return self._executor

    def initial(self, seed: int) -> ArrayRecord:
        """Return the app's network."""
        return ArrayRecord(self.task.Network(seed).state_dict())

    def evaluate(self, arrays: ArrayRecord, seed: int) -> tuple[float, Array]:
        """Evaluate on the 359 test images; groups are digits."""
        images, labels = (part.numpy() for part in self.task.load_data(seed)[1])
        return _classified(forward(read_model(arrays), images)[1], labels)

    def labels(self, n_devices: int, alpha: float | None, seed: int) -> list[Array]:
        """Return the digits of the examples that each device trains on."""
        return [self._executor.data(i, n_devices, alpha, seed)[1] for i in range(n_devices)]

    def examples(self, n_devices: int, alpha: float | None, seed: int) -> Array:
        """Count the deal of the app."""
        return np.array([len(y) for y in self.labels(n_devices, alpha, seed)], dtype=np.float64)


class Fashion(TrainingApp):
    """The app `fashion`, of whose images each run deals some."""

    name, model_bytes, every = "fashion", 6_700_000, 2
    most, tested = 1_800, 1_000
    """Images that are dealt, and that are tested on."""

    def __init__(self) -> None:
        """Import the app's module, and read the images."""
        app = FlowerApp.find(self.name)
        with app.importable():
            app.load_client()
            from fashion_app import task  # only now, while the app is open
        self.task = task
        self.settings = {"local-epochs": 2, "batch-size": 10, "learning-rate": 0.1}
        self.data, test = task.load_data("")
        self.test = patches(test[0][: self.tested].numpy()), test[1][: self.tested].numpy()
        self.own = lru_cache(maxsize=8)(self._own)

    def executor(self) -> Executor:
        """Train in NumPy."""
        return _FashionExecutor(self)

    def initial(self, seed: int) -> ArrayRecord:
        """Return the app's network."""
        return ArrayRecord(self.task.Network(seed).state_dict())

    def evaluate(self, arrays: ArrayRecord, seed: int) -> tuple[float, Array]:
        """Evaluate on the first thousand test images; groups are kinds of clothes."""
        return _classified(scores(read_model(arrays), self.test[0]), self.test[1])

    def examples(self, n_devices: int, alpha: float | None, seed: int) -> Array:
        """Count the deal."""
        return np.array([len(y) for y in self.labels(n_devices, alpha, seed)], dtype=np.float64)

    def labels(self, n_devices: int, alpha: float, seed: int) -> list[Array]:
        """Return the kinds of clothes that each device trains on."""
        return [labels for _, labels in self.own(n_devices, alpha, seed)]

    def _own(self, n_devices: int, alpha: float, seed: int) -> list[tuple[Array, Array]]:
        """Return what each device trains on: some of the images, dealt as the app deals all."""
        rng = np.random.default_rng((seed, self.task.DEAL))
        chosen = rng.permutation(len(self.data[1]))[: self.most]
        some = self.data[0][chosen], self.data[1][chosen]
        dealt = classification.deal(some[1].numpy(), n_devices, alpha, rng)
        own = (classification.held_out(some, mine)[0] for mine in dealt)
        return [(patches(images.numpy()), labels.numpy()) for images, labels in own]


class _FashionExecutor(Executor):
    def __init__(self, app: Fashion) -> None:
        self._app = app

    def run(self, calls: Sequence[ClientCall]) -> list[ClientReply]:
        """Train one device after the other."""
        return [ClientReply(self._reply(call), call.context) for call in calls]

    def _reply(self, call: ClientCall) -> Message:
        app, message, config = self._app, call.message, call.context.run_config
        partition, n = client.place(call.context)
        data = app.own(n, float(config["alpha"]), int(config["seed"]))[partition]
        model = read_model(message.content.array_records["arrays"])
        job = client.job(message, call.context, data, stream=(app.task.SHUFFLE,))
        loss = train_images(
            model, data, job["order"], batch_size=job["batch_size"], rate=job["learning_rate"]
        )
        arrays = ArrayRecord({name: FlowerArray(array) for name, array in model.items()})
        metrics = MetricRecord({"train_loss": loss, "num-examples": len(data[1])})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


class Shakespeare(TrainingApp):
    """The app `shakespeare`, of whose lines each device trains on the first."""

    name, model_bytes, has_skew, every = "shakespeare", 3_300_000, False, 4
    test_every = 12
    """Every so many of the held-out lines is tested on."""

    def __init__(self) -> None:
        """Import the app's modules, and read the play.

        Raises:
            FileNotFoundError: the play is not there.
        """
        if not TEXT.is_file():
            raise FileNotFoundError(f"{TEXT}: expected the play that the app is trained on")
        app = FlowerApp.find(self.name)
        with app.importable():
            app.load_client()
            from shakespeare_app import play, task  # only now, while the app is open
        self.task, self._executor = task, NumpyShakespeare(task, play, LINES)
        self.settings = {
            "local-epochs": 1,
            "batch-size": 8,
            "learning-rate": 1.0,
            "text": str(TEXT.resolve()),
        }
        self.test = task.encode(play.held_out(str(TEXT.resolve()))).numpy()[:: self.test_every]

    def executor(self) -> Executor:
        """Train in NumPy."""
        return self._executor

    def initial(self, seed: int) -> ArrayRecord:
        """Return the app's network."""
        return ArrayRecord(self.task.Network(seed).state_dict())

    def evaluate(self, arrays: ArrayRecord, seed: int) -> tuple[float, Array]:
        """Return the share of the next characters that are guessed; all lines are one group."""
        loss, accuracy = evaluate_lines(read_model(arrays), self.test)
        return accuracy, np.array([loss])

    def examples(self, n_devices: int, alpha: float | None, seed: int) -> Array:
        """Return as many for each: the longest lines of all roles are cut."""
        return np.full(n_devices, float(LINES))


APPS: dict[str, type[TrainingApp]] = {app.name: app for app in (Digits, Fashion, Shakespeare)}


@cache
def opened(name: str) -> TrainingApp:
    """Return an app by its name; a process reads its data once."""
    return APPS[name]()


def _classified(logits: Array, labels: Array) -> tuple[float, Array]:
    """Return the accuracy, and the mean cross-entropy of each label."""
    logits = logits - logits.max(axis=1, keepdims=True)
    chances = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(logits)), labels]
    count = np.bincount(labels, minlength=10)
    losses = np.bincount(labels, weights=chances, minlength=10) / count
    return float((logits.argmax(axis=1) == labels).mean()), losses
