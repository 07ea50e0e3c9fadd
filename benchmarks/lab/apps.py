"""The built-in apps as benchmarks train them: the apps' own clients, on less data each.

Networks, losses, deals, orders of examples and SGD are the apps' own. Only the amount of arithmetic
is smaller, never the time that it stands for: a job of the mean device has as much work as the
benchmark says, whatever is computed for it, and a device with twice the examples has twice the
work.

| app | what a device trains on | bytes each way | declared work of the mean device of 30, units |
|---|---|---:|---:|
| digits | its share of 1,438 images, less a fifth | 5.0 MB | 173 |
| fashion | its share of 1,800 images, less a fifth | 6.7 MB | 118 |
| shakespeare | the first 16 of its lines of 80 characters | 3.3 MB | 76 |

Bytes of the last two are those that the app declares; digits have stood for a model of 5 MB since
the learning proxy was fitted. The results of 2026-11 and before come from the same training
written in NumPy, which agreed with the apps within rounding (`numpy_digits.py` and others of commit
7cededf), and drew the order of examples by the server's round in place of the message's id.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstale.apps import characters, classification, client
from fedstale.simulation import Costs, Executor, InlineExecutor
from fedstale.simulation.flower_app import FlowerApp
from fedstale.strategies.types import Array
from lab import two_layers

ROOT = Path(__file__).parents[2]
TEXT = Path(os.environ.get("PLAYS", ROOT / "../shared/data/tinyshakespeare.txt.gz")).resolve()
"""The plays; the environment variable PLAYS names another file."""
IMAGES = os.environ.get("FASHION_MNIST", "")
"""Folder of the images of clothes; empty is that of Debian's package dataset-fashion-mnist."""
LINES = 16
"""Lines of a play that a device trains on."""
PLAIN = {"data", "order", "batch_size", "learning_rate"}
"""What a job is made of that takes all steps of plain SGD."""
Config = Mapping[str, Any]
Deal = Sequence[Array]
"""Which examples each device has."""


def folder_of(app: str) -> Path | str:
    """Find an app by its name: one of the examples, or one that comes with fedstale."""
    folder = ROOT / "examples" / app
    return folder if folder.is_dir() else app


class TrainingApp(ABC):
    """An app of which devices train a model together; made once in a process by `opened`."""

    name: ClassVar[str]
    model_bytes: ClassVar[int]
    """Of a message and of a reply."""
    has_skew: ClassVar[bool] = True
    """Whether data are dealt by a Dirichlet distribution."""
    every: ClassVar[int] = 1
    """Versions from one evaluation to the next."""
    settings: ClassVar[Mapping[str, int | float | str]]
    """The run config, without seed and skew."""
    fixed: ClassVar[Mapping[str, float]] = {}
    """What each job has besides."""

    def __init__(self) -> None:
        """Import the app's modules of data and model."""
        # What is trained together is small, and other processes train beside.
        torch.set_num_threads(1)
        self.flower = FlowerApp.find(folder_of(self.name))
        with self.flower.importable():
            self.flower.load_client()
            self.task = import_module(f"{self.name}_app.task")
        self.mean_loss: Callable[..., Tensor] = classification.mean_loss
        # Its first weights are drawn, which takes as long as a short job: one is enough.
        self._network: nn.Module = self.task.Network()

    @abstractmethod
    def data(self, partition: int, n: int, config: Config) -> client.Examples:
        """Return what a device of n trains on."""

    @abstractmethod
    def evaluate(self, arrays: ArrayRecord, seed: int) -> tuple[float, Array]:
        """Return the accuracy on a test set of all devices, and the mean loss on each group."""

    @abstractmethod
    def of_devices(
        self, arrays: ArrayRecord, n_devices: int, alpha: float | None, seed: int
    ) -> Array:
        """Return the accuracy on what each device holds; shape (devices,)."""

    @abstractmethod
    def examples(self, n_devices: int, alpha: float | None, seed: int) -> Array:
        """Return how many examples each device trains on; shape (devices,)."""

    def executor(self, data: Callable[..., client.Examples] | None = None) -> Executor:
        """Return what trains devices.

        Args:
            data: in the place of the method of that name.
        """
        app, data = ClientApp(), data or self.data

        @app.train()
        def train(message: Message, context: Context) -> Message:
            config = context.run_config
            mine = data(*client.place(context), config)
            job = client.job(message, context, mine, stream=(getattr(self.task, "SHUFFLE", 0),))
            mu = float(config.get("proximal-mu", 0.0))
            own = job | self.fixed | ({"proximal_mu": mu} if mu else {})
            return self.trained(message, own)

        return InlineExecutor(app)

    def trained(self, message: Message, job: dict[str, Any]) -> Message:
        """Return the reply to a message of training; see `client.trained`."""
        return client.trained(message, self._network, self.mean_loss, job)

    def initial(self, seed: int) -> ArrayRecord:
        """Return the first model, the app's network."""
        return ArrayRecord(self.task.Network(seed).state_dict())

    def network(self, arrays: ArrayRecord) -> nn.Module:
        """Return the network with some weights, until it is asked for with others."""
        self._network.load_state_dict(arrays.to_torch_state_dict())
        return self._network

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


class _Labelled(TrainingApp):
    """An app whose examples have labels, which are the groups of its losses."""

    @abstractmethod
    def labels(self, n_devices: int, alpha: float, seed: int) -> list[Array]:
        """Return the labels of the examples that each device trains on."""

    @abstractmethod
    def test(self, seed: int) -> classification.Data:
        """Return what the model is evaluated on."""

    def examples(self, n_devices: int, alpha: float | None, seed: int) -> Array:
        """Count the deal."""
        assert alpha is not None
        return np.array([len(y) for y in self.labels(n_devices, alpha, seed)], dtype=np.float64)

    @torch.no_grad()
    def answers(self, arrays: ArrayRecord, seed: int) -> tuple[Array, Array, Array]:
        """Return whether each answer is right, its loss, and the labels; shape (n,) each."""
        inputs, labels = self.test(seed)
        logits = self.network(arrays)(inputs)
        losses = cross_entropy(logits, labels, reduction="none").double()
        return (logits.argmax(1) == labels).numpy(), losses.numpy(), labels.numpy()

    def of_devices(
        self, arrays: ArrayRecord, n_devices: int, alpha: float | None, seed: int
    ) -> Array:
        """Weigh the accuracy on each label of the test set by a device's share of that label.

        A device's own held-out examples are too few: of forty devices it would be seven each.
        """
        assert alpha is not None
        right, _, labels = self.answers(arrays, seed)
        of_label = np.bincount(labels, weights=right, minlength=10)
        accuracy = of_label / np.bincount(labels, minlength=10)
        held = np.array([np.bincount(y, minlength=10) for y in self.labels(n_devices, alpha, seed)])
        return np.asarray(held @ accuracy / held.sum(axis=1))

    def evaluate(self, arrays: ArrayRecord, seed: int) -> tuple[float, Array]:
        """Evaluate on the test set; groups are labels."""
        right, losses, labels = self.answers(arrays, seed)
        of_label = np.bincount(labels, weights=losses, minlength=10)
        return float(right.mean()), of_label / np.bincount(labels, minlength=10)


class Digits(_Labelled):
    """The app `digits`, tested on its 359 images."""

    name, model_bytes = "digits", 5_000_000
    settings: ClassVar = {"local-epochs": 5, "batch-size": 8, "learning-rate": 0.1}

    def data(self, partition: int, n: int, config: Config) -> client.Examples:
        """Return the app's own deal."""
        mine: client.Examples = self.task.client_data(
            partition, n, float(config["alpha"]), int(config["seed"])
        )[0]
        return mine

    def trained(self, message: Message, job: dict[str, Any]) -> Message:
        """Train without autograd, to the same bytes, where the job is a plain one."""
        if set(job) != PLAIN:
            return super().trained(message, job)
        network = client.received(message, self._network)
        mean = two_layers.train(network, **job)
        metrics = MetricRecord({"train_loss": mean, "num-examples": len(job["data"][0])})
        content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    def of(self, deal: Deal, seed: int, partition: int) -> client.Examples:
        """Return what a device trains on by another deal: as in the app, all but each fifth."""
        mine = deal[partition]
        images, labels = self.task.load_data(seed)[0]
        kept = torch.from_numpy(mine[np.arange(len(mine)) % 5 != 4])
        return images[kept], labels[kept]

    def labels(self, n_devices: int, alpha: float, seed: int) -> list[Array]:
        """Return the digits."""
        about = {"alpha": alpha, "seed": seed}
        return [self.data(i, n_devices, about)[1].numpy() for i in range(n_devices)]

    def test(self, seed: int) -> classification.Data:
        """Return the app's test set."""
        test: classification.Data = self.task.load_data(seed)[1]
        return test


class Fashion(_Labelled):
    """The app `fashion`, of whose images each run deals some, tested on the first thousand."""

    name, model_bytes, every = "fashion", 6_700_000, 2
    settings: ClassVar = {"local-epochs": 2, "batch-size": 10, "learning-rate": 0.1}
    most, tested = 1_800, 1_000
    """Images that are dealt, and that are tested on."""

    def __init__(self) -> None:
        """Read the images.

        Raises:
            ConfigError: a file is not there; it says which.
        """
        super().__init__()
        self._images, test = self.task.load_data(IMAGES)
        self._test = test[0][: self.tested], test[1][: self.tested]
        self._own = lru_cache(maxsize=8)(self._dealt)

    def data(self, partition: int, n: int, config: Config) -> client.Examples:
        """Return some of the images, dealt as the app deals all."""
        return self._own(n, float(config["alpha"]), int(config["seed"]))[partition]

    def labels(self, n_devices: int, alpha: float, seed: int) -> list[Array]:
        """Return the kinds of clothes."""
        return [labels.numpy() for _, labels in self._own(n_devices, alpha, seed)]

    def test(self, seed: int) -> classification.Data:
        """Return the first of the app's test set."""
        return self._test

    def _dealt(self, n_devices: int, alpha: float, seed: int) -> list[classification.Data]:
        rng = np.random.default_rng((seed, self.task.DEAL))
        chosen = rng.permutation(len(self._images[1]))[: self.most]
        some = self._images[0][chosen], self._images[1][chosen]
        dealt = classification.assign(some[1].numpy(), n_devices, alpha, rng)
        return [classification.held_out(some, mine)[0] for mine in dealt]


class Shakespeare(TrainingApp):
    """The app `shakespeare`, of whose lines each device trains on the first."""

    name, model_bytes, has_skew, every = "shakespeare", 3_300_000, False, 4
    settings: ClassVar = {
        "local-epochs": 1,
        "batch-size": 8,
        "learning-rate": 1.0,
        "text": str(TEXT),
    }
    test_every = 12
    """Every so many of the held-out lines is tested on."""

    def __init__(self) -> None:
        """Read the play.

        Raises:
            FileNotFoundError: the play is not there.
        """
        if not TEXT.is_file():
            raise FileNotFoundError(f"{TEXT}: expected the play that the app is trained on")
        super().__init__()
        self.mean_loss, self.fixed = characters.mean_loss, {"max_norm": self.task.MAX_NORM}
        self.held_out = characters.encode(characters.held_out(str(TEXT)), self.task.LENGTH)

    def own_lines(self, partition: int, n: int) -> tuple[Tensor, Tensor]:
        """Return the lines of a device of n to train on, and those to evaluate on."""
        return characters.of_device(str(TEXT), partition, n, length=self.task.LENGTH)

    def data(self, partition: int, n: int, config: Config) -> client.Examples:
        """Return the first lines."""
        return (self.own_lines(partition, n)[0][:LINES],)

    def right(self, arrays: ArrayRecord, lines: Tensor) -> float:
        """Return the share of the next characters that are guessed."""
        return float(characters.evaluate(self.network(arrays), lines)[1])

    def evaluate(self, arrays: ArrayRecord, seed: int) -> tuple[float, Array]:
        """Return the share of the next characters that are guessed; all lines are one group."""
        loss, right = characters.evaluate(self.network(arrays), self.held_out[:: self.test_every])
        return right, np.array([loss])

    @torch.no_grad()
    def of_devices(
        self, arrays: ArrayRecord, n_devices: int, alpha: float | None, seed: int
    ) -> Array:
        """Evaluate on the first of the lines that each device holds back."""
        network = self.network(arrays)
        lines = [self.own_lines(i, n_devices)[1][:LINES] for i in range(n_devices)]
        right = torch.cat(
            [
                (network(some[:, :-1]).argmax(2) == some[:, 1:]).double().mean(1)
                for some in torch.cat(lines).split(256)
            ]
        )
        return np.array([each.mean().item() for each in right.split([len(x) for x in lines])])

    def examples(self, n_devices: int, alpha: float | None, seed: int) -> Array:
        """Return as many for each: the longest lines of all roles are cut."""
        return np.full(n_devices, float(LINES))


APPS: dict[str, type[TrainingApp]] = {app.name: app for app in (Digits, Fashion, Shakespeare)}


@cache
def opened(name: str) -> TrainingApp:
    """Return an app by its name; a process reads its data once."""
    return APPS[name]()
