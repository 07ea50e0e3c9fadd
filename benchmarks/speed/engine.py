"""How fast does a simulation go: messages of an empty app, and clients trained against Flower.

Clients are those of the built-in app digits, the same ClientApp under the same FedAvg, with every
client in every round and no evaluation on clients: in Flower's engine with one Ray actor a core, in
a loop over the ClientApp as one would write it by hand, and in each executor of fedstale. They take
turns, and the first round of each run, which loads data and starts workers, is not counted.

Run it with: python benchmarks/speed/engine.py [--quick]
"""

import argparse
import logging
import os
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedstale.flower import identity
from fedstale.simulation import Costs, TraceGrid
from fedstale.simulation.executors.choice import executor_for
from fedstale.simulation.flower_app import FlowerApp
from fedstale.strategies import FedBuff
from fedstale.traces import TraceSet

sys.path.append(str(Path(__file__).parents[1]))
from lab.results import spread, write_result
from speed.batched import naive_clients_per_s

Clock = Callable[[], float]


def messages_per_second(
    traces: TraceSet, batch: int, total: int, clock: Clock = time.perf_counter
) -> float:
    """Return how many messages an empty ClientApp answers in a second.

    Args:
        traces: the devices.
        batch: messages in flight together, to as many devices that are online, at most all.
        total: messages to send, at least.
        clock: tells the time in s, on the wall or of the processor.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(message.content, reply_to=message)

    grid = TraceGrid(traces, app, costs=Costs(work_per_example=1.0, epochs=1, examples=10))
    arrays, rng = ArrayRecord([np.zeros(1000, np.float32)]), np.random.default_rng(0)
    with grid.running():
        started, number, sent = clock(), 0, 0
        while sent < total:
            config = ConfigRecord({"server-round": number})
            content = RecordDict({"arrays": arrays, "config": config})
            online = list(grid.get_node_ids())
            nodes = rng.choice(online, min(batch, len(online)), replace=False).tolist()
            grid.send_and_receive([Message(content, node, "train") for node in nodes])
            number, sent = number + 1, sent + len(nodes)
        return sent / (clock() - started)


def replies_per_second(
    traces: TraceSet, concurrency: int, total: int, clock: Clock = time.perf_counter
) -> float:
    """Return how many replies of an empty ClientApp FedBuff merges in a second.

    Args:
        traces: the devices.
        concurrency: jobs out at a time; each reply is followed by a new job at once.
        total: replies to merge, a hundred in a version.
        clock: tells the time in s, on the wall or of the processor.
    """
    app, metrics = ClientApp(), MetricRecord({"num-examples": 10})

    @app.train()
    def train(message: Message, context: Context) -> Message:
        content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
        return Message(content, reply_to=message)

    grid = TraceGrid(traces, app, costs=Costs(work_per_example=1.0, epochs=1, examples=10))
    strategy = FedBuff(concurrency=concurrency, buffer_size=100)
    with grid.running():
        started = clock()
        strategy.start(grid, ArrayRecord([np.zeros(1000, np.float32)]), num_rounds=total // 100)
        return total // 100 * 100 / (clock() - started)


class Loop:
    """The part of a Grid that FedAvg needs, as one would write it by hand: a loop over clients."""

    def __init__(self, client: ClientApp, n: int, config: dict) -> None:
        self._client = client
        places = [{"partition-id": i, "num-partitions": n} for i in range(n)]
        self._contexts = {
            i + 1: Context(1, i + 1, place, RecordDict(), config) for i, place in enumerate(places)
        }

    def get_node_ids(self) -> list[int]:
        """Return all clients."""
        return list(self._contexts)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Call the ClientApp with one message after the other."""
        return [self._client(m, self._contexts[m.metadata.dst_node_id]) for m in messages]


@dataclass
class Engines:
    """The same app, federation and number of rounds in several engines."""

    n_clients: int
    n_rounds: int
    local_epochs: int
    clock: Clock = time.perf_counter
    ends: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.app = FlowerApp.find("digits")
        self.client = self.app.load_client()
        defaults = {**self.app.defaults, "local-epochs": self.local_epochs}
        # As good as equal shares, so that no client is alone in the last steps.
        self.config = {**defaults, "alpha": 1000.0}

    def server(self) -> ServerApp:
        """Return a ServerApp that notes when each round has been aggregated."""
        app = ServerApp()

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            self.rounds(grid)

        return app

    def rounds(self, grid: Grid) -> None:
        """Run FedAvg, and note when each round has been aggregated."""
        from digits_app.task import Network

        ends, clock = self.ends, self.clock

        class Timed(FedAvg):
            def aggregate_train(self, server_round, replies):  # noqa: ANN001, ANN202 - as FedAvg
                merged = super().aggregate_train(server_round, replies)
                ends.append(clock())
                return merged

        strategy = Timed(
            fraction_evaluate=0.0,
            min_train_nodes=self.n_clients,
            min_available_nodes=self.n_clients,
        )
        arrays = ArrayRecord(Network(1).state_dict())
        strategy.start(grid=grid, initial_arrays=arrays, num_rounds=self.n_rounds)

    def rate(self, run: Callable[[], None]) -> float:
        """Return the clients trained per second in the rounds after the first."""
        self.ends.clear()
        run()
        return self.n_clients * (self.n_rounds - 1) / (self.ends[-1] - self.ends[0])

    def flower(self) -> None:
        """Run in Flower's own simulation engine."""
        import ray
        from flwr.simulation import run_simulation

        client, config = self.client, self.config

        def with_config(message: Message, context: Context, call_next: Callable) -> Message:
            context.run_config = config
            return call_next(message, context)

        app = ClientApp(mods=[with_config])
        app.train()(client._registered_funcs["train.default"])
        resources = {"client_resources": {"num_cpus": 1}}
        run_simulation(self.server(), app, self.n_clients, backend_config=resources)
        ray.shutdown()

    def loop(self) -> None:
        """Run the ClientApp in a loop."""
        with identity(1):
            self.rounds(cast(Grid, Loop(self.client, self.n_clients, self.config)))

    def fedstale(self, kind: str, workers: int | None = None) -> None:
        """Run under TraceGrid on ideal devices."""
        traces = TraceSet.ideal(self.n_clients)
        with executor_for(self.app, self.client, kind, workers) as executor:
            grid = TraceGrid(traces, executor, costs=self.app.costs, run_config=self.config)
            with grid.running():
                self.rounds(grid)


def measure_messages(*, quick: bool) -> list[dict[str, object]]:
    """Return how fast messages go, by how many are in flight together and how many may be asked.

    The cases take turns, so that a machine which is slower for a while is so for all of them.
    """
    total, n_replies = (1000, 2000) if quick else (5000, 20_000)
    many = TraceSet.synthetic(100_000 if quick else 1_000_000, days=2, seed=0)
    phones = TraceSet.synthetic(2000, days=2, seed=0)
    rounds = [*((alike(n), n) for n in (1, 10, 100, 1000)), (many, 10_000)]
    as_they_come = [(phones, 100), (alike(20_000), 10_000), (many, 10_000)]
    cases: list[tuple[str, int, int, Callable[[], float]]] = []
    for traces, n in rounds:
        run = partial(messages_per_second, traces, n, max(total, 2 * n))
        cases.append(("messages per second", traces.n_devices, n, run))
    for traces, n in as_they_come:
        run = partial(replies_per_second, traces, n, n_replies)
        cases.append(("replies per second, FedBuff", traces.n_devices, n, run))
    rates: list[list[float]] = [[] for _ in cases]
    for _ in range(2 if quick else 5):
        for (*_, run), found in zip(cases, rates, strict=True):
            found.append(run())
    peak = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return [
        {"what": what, "devices": n, "in flight": m, **spread(found), "peak MiB of all": peak}
        for (what, n, m, _), found in zip(cases, rates, strict=True)
    ]


def alike(n: int) -> TraceSet:
    """Return devices that are always there and all the same."""
    return TraceSet.constant(n, compute=1.0, downlink_bit_per_s=1e7, uplink_bit_per_s=1e7)


def measure_clients(*, quick: bool) -> list[dict[str, object]]:
    """Return how fast clients are trained in each engine, the engines taking turns."""
    rows: list[dict[str, object]] = []
    cores = os.cpu_count() or 1
    # Some six steps each, as the set of 1,438 images is dealt out.
    sizes = [(64, 2, 3)] if quick else [(64, 2, 6), (256, 6, 4), (1024, 6, 2)]
    for n_clients, epochs, n_rounds in sizes:
        engines = Engines(n_clients, n_rounds, local_epochs=epochs)
        runs: dict[str, Callable[[], None]] = {
            "Flower, Ray": engines.flower,
            "ClientApp in a loop": engines.loop,
            "inline": partial(engines.fedstale, "inline"),
            f"{cores} processes": partial(engines.fedstale, "processes", cores),
            "1 Ray actor": partial(engines.fedstale, "ray", 1),
            f"{cores} Ray actors": partial(engines.fedstale, "ray", cores),
            "batched": partial(engines.fedstale, "batched"),
        }
        rates: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(2 if quick else 5):
            for name, run in runs.items():
                rates[name].append(engines.rate(run))
        flower, loop = (statistics.median(rates[n]) for n in ("Flower, Ray", "ClientApp in a loop"))
        for name, values in rates.items():
            median = statistics.median(values)
            row = {"what": f"clients per second, {name}", "a round": n_clients, "epochs": epochs}
            ratios = {
                "to Flower": round(median / flower, 2),
                "to the loop": round(median / loop, 2),
            }
            rows.append({**row, **spread(values), **ratios})
            print(rows[-1], flush=True)
    return rows


PARTS = {"messages": measure_messages, "clients": measure_clients}


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller repeats")
    parser.add_argument("--part", choices=PARTS, help="measure only this")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    for part in [options.part] if options.part else PARTS:
        rows = PARTS[part](quick=options.quick)
        command = f"python benchmarks/speed/engine.py --part {part}"
        speed = naive_clients_per_s()
        write_result(part, rows, command=command, speed=speed, quick=options.quick)


if __name__ == "__main__":
    main()
