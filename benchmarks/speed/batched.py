"""How fast are small clients trained: one by one, by each executor, and as fast as can be.

Three models: a network of 64-32-10 units on digits (20 of them, two epochs in steps of 8), a small
convolutional network on the same, and the recurrent network of the app shakespeare (8
examples of 80 characters, one epoch in steps of 4). Everything runs in one thread, and what is
counted is the processor time of this process, so that other work on the machine disturbs less; the
ways take turns, and ratios are medians over the turns. Executors answer whole messages, the other
ways train and no more.

What is possible at best is shown by two rows. "products by hand" (for the first model) trains by
products of stacks of matrices, with the gradient written out. "one model for all" takes the steps
of all clients as one large batch through one model: the same number of multiplications for each
example, but with weights that are read once, which no training of different models can reach.

Where CUDA knows a GPU, `--gpu` compares `batched` on it with `batched` on the processor, with one
thread and with all cores, in seconds of the clock.

Run it with: python benchmarks/speed/batched.py [--quick] [--gpu]
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from fedstale.apps import characters, classification
from fedstale.flower import identity, own_copy, quick_arrays
from fedstale.simulation import InlineExecutor
from fedstale.simulation.executors import ClientCall
from fedstale.simulation.executors.batched import BatchedExecutor
from fedstale.simulation.executors.many_sgd import ManySGD, TrainingTask
from fedstale.simulation.flower_app import BatchedFunctions, FlowerApp

sys.path.append(str(Path(__file__).parents[1]))
from lab.apps import folder_of
from lab.results import spread, write_result

RATE = 0.1
SETTLED = 50
"""Runs before the first that counts."""
SIZES = {"64-32-10": (32, 128, 512), "convolutions": (32, 128), "recurrent": (32,)}
"""Clients trained together, by workload."""
GPU_SIZES = {"64-32-10": (32, 512, 2048), "convolutions": (32, 512), "recurrent": (32, 128)}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, and what a client trains it on."""

    name: str
    network: Callable[[], nn.Module]
    """The model as an app would write it."""
    stackable: Callable[[], nn.Module]
    """The same model as declared for `batched`."""
    losses: Callable[..., Tensor]
    data: tuple[Tensor, ...]
    """From which each client's examples are drawn."""
    examples: int
    epochs: int
    batch_size: int


class SmallCNN(nn.Module):
    """Two convolutions of 8 and 16 channels and one linear layer, for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            super().__init__()
            self.first = nn.Conv2d(1, 8, 3, padding=1)
            self.second = nn.Conv2d(8, 16, 3, padding=1)
            self.last = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (n, 10) for images of shape (n, 64)."""
        hidden = max_pool2d(relu(self.first(images.reshape(-1, 1, 8, 8))), 2)
        hidden = max_pool2d(relu(self.second(hidden)), 2)
        return self.last(hidden.flatten(1))  # type: ignore[no-any-return]


def workloads() -> list[Workload]:
    """Return what is trained."""
    for app in ("digits", "shakespeare"):
        FlowerApp.find(folder_of(app)).load_client()
    from digits_app import task as digits
    from shakespeare_app import task as shakespeare

    # What is written does not matter to the time.
    codes = torch.randint(96, (2000, shakespeare.LENGTH + 1), generator=torch.Generator())
    dense = Workload(
        name="64-32-10",
        network=digits.Network,
        stackable=digits.Network,
        losses=classification.losses,
        data=digits.load_data(1)[0],
        examples=20,
        epochs=2,
        batch_size=8,
    )
    return [
        dense,
        replace(dense, name="convolutions", network=SmallCNN, stackable=SmallCNN),
        Workload(
            name="recurrent",
            network=shakespeare.Network,
            stackable=shakespeare.UnrolledNetwork,
            losses=characters.losses,
            data=(codes,),
            examples=8,
            epochs=1,
            batch_size=4,
        ),
    ]


class Clients:
    """The same clients, trained in every way. Each way returns what shows that all do the same."""

    def __init__(self, work: Workload, n: int, device: str = "cpu") -> None:
        self.work, self.n = work, n
        generator = torch.Generator().manual_seed(1)
        pool = len(work.data[0])
        self.examples = torch.randint(pool, (n, work.examples), generator=generator)
        self.data = [tuple(x[own] for x in work.data) for own in self.examples]
        self.order = torch.stack([self._order(generator) for _ in range(n)])
        self.start = work.network()
        self.calls = self._calls()
        self.client = self._client()
        parts = BatchedFunctions(job=self.job, network=work.stackable, losses=work.losses)
        self.inline = InlineExecutor(self.client)
        self.batched = BatchedExecutor(self.client, parts, device=device, batch=n)
        self.program = ManySGD(work.stackable, work.losses, device)
        self.jobs = [TrainingTask.of(self.job(call.message, call.context)) for call in self.calls]

    def _order(self, generator: torch.Generator) -> Tensor:
        epochs, n = self.work.epochs, self.work.examples
        return torch.stack([torch.randperm(n, generator=generator) for _ in range(epochs)])

    def _calls(self) -> list[ClientCall]:
        """Return one message to each client."""
        arrays = ArrayRecord(self.start.state_dict())
        content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})})
        calls = []
        for i in range(self.n):
            context = Context(1, 1000 + i, {"partition-id": i}, RecordDict(), {})
            calls.append(ClientCall(Message(own_copy(content), 1000 + i, "train"), context, seed=i))
        return calls

    def _client(self) -> ClientApp:
        app = ClientApp()

        @app.train()
        def train(message: Message, context: Context) -> Message:
            network = self.work.network()
            network.load_state_dict(message.content["arrays"].to_torch_state_dict())
            loss = self._train(network, int(context.node_config["partition-id"]))
            metrics = MetricRecord({"train_loss": loss, "num-examples": self.work.examples})
            content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics})
            return Message(content, reply_to=message)

        return app

    def _train(self, network: nn.Module, i: int) -> float:
        """Train as the tutorials do; return the loss of the last step."""
        sgd, loss = torch.optim.SGD(network.parameters(), lr=RATE), torch.zeros(())
        for epoch in self.order[i]:
            for batch in epoch.split(self.work.batch_size):
                sgd.zero_grad()
                loss = self.work.losses(network, *(x[batch] for x in self.data[i])).mean()
                loss.backward()
                sgd.step()
        return loss.item()

    def job(self, message: Message, context: Context) -> dict[str, object]:
        """Return what the client of a message trains on."""
        i = int(context.node_config["partition-id"])
        return {
            "data": self.data[i],
            "order": self.order[i].numpy(),
            "batch_size": self.work.batch_size,
            "learning_rate": RATE,
        }

    def settle(self) -> None:
        """Train a few times, so that what is learnt about a shape has been learnt."""
        for _ in range(SETTLED):
            self.in_batches()
            self.one_program()

    def naive(self) -> list[Tensor]:
        """Train one client after the other in plain torch."""
        trained = []
        for i in range(self.n):
            network = self.work.network()
            network.load_state_dict(self.start.state_dict())
            self._train(network, i)
            trained.append(next(network.parameters()).detach())
        return trained

    def loop(self) -> list[Message]:
        """ClientCall the ClientApp in a loop, as one would by hand."""
        return [self.client(call.message, call.context) for call in self.calls]

    def in_line(self) -> list[Message]:
        """Let the executor `inline` answer."""
        return [answer.reply for answer in self.inline.run(self.calls)]

    def in_batches(self) -> list[Message]:
        """Let the executor `batched` answer."""
        return [answer.reply for answer in self.batched.run(self.calls)]

    def one_program(self) -> Tensor:
        """Train by the program of `batched` alone, without messages."""
        models = {k: v.expand(self.n, *v.shape) for k, v in self.start.state_dict().items()}
        return self.program(models, self.jobs)[0][next(iter(models))]

    def one_model(self) -> None:
        """Take every step of all clients as one batch through one model."""
        network = self.work.network()
        sgd = torch.optim.SGD(network.parameters(), lr=RATE)
        data = [torch.stack(x) for x in zip(*self.data, strict=True)]
        rows = torch.arange(self.n)[:, None]
        for epoch in self.order.unbind(1):
            for batch in epoch.split(self.work.batch_size, 1):
                sgd.zero_grad()
                self.work.losses(
                    network, *(x[rows, batch].flatten(0, 1) for x in data)
                ).mean().backward()
                sgd.step()

    def by_hand(self) -> Tensor:
        """Train the dense network by products of stacks of matrices, its gradient written out."""
        images, labels = (torch.stack(x) for x in zip(*self.data, strict=True))
        start = self.start.state_dict().values()
        w1, b1, w2, b2 = (v.expand(self.n, *v.shape).clone() for v in start)
        rows = torch.arange(self.n)[:, None]
        for epoch in self.order.unbind(1):
            for batch in epoch.split(self.work.batch_size, 1):
                x, y = images[rows, batch], labels[rows, batch]
                hidden = torch.baddbmm(b1[:, None], x, w1.mT).relu_()
                p = torch.baddbmm(b2[:, None], hidden, w2.mT).softmax(2)
                p.scatter_add_(2, y[..., None], torch.full((*y.shape, 1), -1.0))
                p.mul_(RATE / y.shape[1])
                back = (p @ w2).mul_(hidden > 0)
                w2.baddbmm_(p.mT, hidden, alpha=-1)
                b2.sub_(p.sum(1))
                w1.baddbmm_(back.mT, x, alpha=-1)
                b1.sub_(back.sum(1))
        return w1


def measure(work: Workload, n: int, repeats: int) -> list[dict[str, object]]:
    """Return the clients per second of processor time in each way."""
    clients = Clients(work, n)
    ways: dict[str, Callable[[], object]] = {
        "naive torch loop": clients.naive,
        "ClientApp in a loop": clients.loop,
        "inline": clients.in_line,
        "batched": clients.in_batches,
        "batched, the program alone": clients.one_program,
        "one model for all": clients.one_model,
    }
    if work.name == "64-32-10":
        ways["products by hand"] = clients.by_hand
    expected = first_arrays(clients.naive())
    for name, way in ways.items():
        if name != "one model for all":
            check(f"{work.name}: {name}", way(), expected, "the naive loop")
    clients.settle()
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            started = time.process_time()
            way()
            rates[name].append(n / (time.process_time() - started))
    limit = "products by hand" if "products by hand" in rates else "one model for all"
    return [
        {
            "what": f"clients per processor second, {name}",
            "model": work.name,
            "together": n,
            **spread(values),
            "ratio to the loop": _ratio(values, rates["naive torch loop"]),
            "ratio to the limit": _ratio(values, rates[limit]),
        }
        for name, values in rates.items()
    ]


def measure_gpu(work: Workload, n: int, repeats: int) -> list[dict[str, object]]:
    """Return the clients per second of the clock of `batched`, on a processor and on a GPU."""
    cores = torch.get_num_threads()
    places = {"one thread": ("cpu", 1), f"{cores} cores": ("cpu", cores), "GPU": ("cuda", 1)}
    clients = {device: Clients(work, n, device) for device in ("cpu", "cuda")}
    expected = first_arrays(clients["cpu"].in_batches())
    check(f"{work.name}: a GPU", clients["cuda"].in_batches(), expected, "the processor")
    for each in clients.values():
        each.settle()
    rates: dict[tuple[str, str], list[float]] = {}
    for _ in range(repeats):
        for place, (device, threads) in places.items():
            torch.set_num_threads(threads)
            ways = {
                "with messages": clients[device].in_batches,
                "alone": clients[device].one_program,
            }
            for name, way in ways.items():
                torch.cuda.synchronize()
                started = time.perf_counter()
                way()
                torch.cuda.synchronize()
                rates.setdefault((name, place), []).append(n / (time.perf_counter() - started))
    torch.set_num_threads(cores)
    return [
        {
            "what": f"clients per second, batched {name}, {place}",
            "model": work.name,
            "together": n,
            **spread(values),
            "ratio to one thread": _ratio(values, rates[name, "one thread"]),
        }
        for (name, place), values in rates.items()
    ]


def _ratio(values: list[float], others: list[float]) -> float:
    """Return the median ratio of two ways in the same turn, when the machine was as fast."""
    return round(statistics.median(a / b for a, b in zip(values, others, strict=True)), 2)


def check(name: str, trained: object, expected: Tensor, other: str) -> None:
    """End if what was trained is not what another way has trained, but for rounding."""
    off = (first_arrays(trained) - expected).abs().max() / expected.abs().max()
    if off > 1e-5:
        raise SystemExit(f"{name} differs from {other} by {off:.1e}")


def first_arrays(trained: object) -> Tensor:
    """Return the first array of every client's model."""
    if isinstance(trained, Tensor):
        return trained
    assert isinstance(trained, list)
    if isinstance(trained[0], Message):
        arrays = [next(iter(reply.content["arrays"].values())) for reply in trained]
        trained = [torch.from_numpy(array.numpy()) for array in arrays]
    return torch.stack(trained)


def naive_clients_per_s() -> float:
    """Return how many of 32 dense clients a plain torch loop trains in a second, one thread.

    Figures of different machines can be held against one another by it.
    """
    with identity(1), quick_arrays():
        clients = Clients(workloads()[0], 32)
        rates = []
        for _ in range(8):
            started = time.perf_counter()
            clients.naive()
            rates.append(clients.n / (time.perf_counter() - started))
    return statistics.median(rates[1:])


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller repeats")
    parser.add_argument("--gpu", action="store_true", help="a GPU beside the processor")
    options = parser.parse_args()
    if not options.gpu:
        torch.set_num_threads(1)
    sizes, measured_by = (GPU_SIZES, measure_gpu) if options.gpu else (SIZES, measure)
    rows = []
    with identity(1), quick_arrays():
        for work in workloads():
            for n in (32,) if options.quick else sizes[work.name]:
                measured = measured_by(work, n, 3 if options.quick else 5 if options.gpu else 9)
                print(*measured, sep="\n", flush=True)
                rows += measured
    if options.gpu:
        rows = [{"gpu": torch.cuda.get_device_name(), **row} for row in rows]
    name, command = "batched" + "_gpu" * options.gpu, "python benchmarks/speed/batched.py"
    write_result(name, rows, command=command + " --gpu" * options.gpu, quick=options.quick)


if __name__ == "__main__":
    main()
