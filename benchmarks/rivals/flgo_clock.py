"""Drive FLGo's simulator through a scenario.

Servers, clock and states of clients are FLGo's; clients train as the scenario says, and answer
after the seconds that it says. FLGo counts whole seconds, and one of them between an arrival and
the next message to that client, since `BasicServer.run` steps the clock before each iteration: the
latency is shorter by that second.
"""

import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import flgo
import flgo.algorithm.fedasync
import flgo.algorithm.fedavg
import flgo.algorithm.fedbuff
import numpy as np
import torch
from flgo.benchmark.base import BasicTaskCalculator, BasicTaskPipe
from flgo.experiment.logger import BasicLogger
from flgo.simulator.base import BasicSimulator
from flgo.utils.fmodule import FModule
from scenario import Answer, Model, Scenario, answer, clock

BETWEEN_S = 1
"""From an arrival to the next message."""


class Weights(FModule):
    """The model of the scenario."""

    first: ClassVar[Model] = []

    def __init__(self) -> None:
        super().__init__()
        for i, array in enumerate(self.first):
            self.register_parameter(f"p{i}", torch.nn.Parameter(torch.from_numpy(np.array(array))))

    @classmethod
    def init_global_module(cls, party) -> None:
        """Give the server its model."""
        if "Server" in type(party).__name__:
            party.model = cls()

    @classmethod
    def init_local_module(cls, party) -> None:
        """Give a client nothing."""

    def arrays(self) -> Model:
        """Return the values."""
        return [p.detach().numpy() for p in self.parameters()]


class Quiet(BasicLogger):
    """Evaluates and writes nothing."""

    def initialize(self) -> None:
        """Do nothing."""

    def log_once(self, *args, **kwargs) -> None:
        """Do nothing."""

    def early_stop(self) -> bool:
        """Go on."""
        return False

    def save_output_as_json(self, *args, **kwargs) -> None:
        """Do nothing."""


def algorithm(scenario: Scenario, events: list) -> ModuleType:
    """Return FLGo's algorithm with clients of the scenario, and a server that notes arrivals."""
    source = getattr(flgo.algorithm, scenario.rule.lower())

    class Client(source.Client):
        def train(self, model) -> None:
            self.sent_at = self.gv.clock.current_time - BETWEEN_S
            after = scenario.train(self.id, model.arrays())
            with torch.no_grad():
                for parameter, array in zip(model.parameters(), after, strict=True):
                    parameter.copy_(torch.from_numpy(np.array(array)))

    class Server(source.Server):
        def initialize(self) -> None:
            super().initialize()
            is_full = scenario.in_flight == scenario.n
            self.sample_option = "full_available" if is_full else "uniform_available"
            self.aggregation_option = "uniform"

        def _if_exit(self) -> bool:
            return len(events) >= scenario.updates

        def iterate(self):
            began, version = self.gv.clock.current_time, self.current_round - 1
            found = super().iterate()
            if scenario.rule == "FedAvg":
                late = self.gv.simulator.get_variable(self.received_clients, "latency")
                rows = zip(self.received_clients, late, strict=True)
                sent = began - BETWEEN_S
                events.extend(sorted((began + s, int(c), version, sent) for c, s in rows))
            return found

        def package_handler(self, received):
            now = self.gv.clock.current_time
            for client, model in zip(received["__cid"], received.get("model", []), strict=True):
                sent_at = self.clients[client].sent_at
                events.append((now, int(client), model._round - 1, sent_at))
            return super().package_handler(received)

    made = ModuleType(scenario.rule.lower())
    made.Client, made.Server = Client, Server
    return made


def benchmark(scenario: Scenario) -> str:
    """Make a benchmark of FLGo that has the scenario's clients; return its name."""

    class TaskPipe(BasicTaskPipe):
        def load_data(self, option) -> dict:
            one = torch.utils.data.TensorDataset(torch.zeros(1))
            data = {name: {"train": one, "val": None} for name in self.feddata["client_names"]}
            return data | {"server": {"test": None, "val": None}}

    core = ModuleType("scenario_benchmark.core")
    core.TaskPipe, core.TaskCalculator = TaskPipe, BasicTaskCalculator
    package = ModuleType("scenario_benchmark")
    package.core, package.__path__ = core, []
    sys.modules |= {"scenario_benchmark": package, "scenario_benchmark.core": core}
    return package.__name__


def run(scenario: Scenario) -> Answer:
    """Return what FLGo makes of a scenario."""
    began = clock()
    events: list[tuple[float, int, int, float]] = []
    Weights.first = scenario.first()
    late = [max(round(scenario.duration_s(i)) - BETWEEN_S, 0) for i in range(scenario.n)]

    class Latencies(BasicSimulator):
        def __init__(self, objects, option=None) -> None:
            super().__init__(objects)

        def update_client_responsiveness(self, client_ids) -> None:
            self.set_variable(client_ids, "latency", [late[i] for i in client_ids])

    options = {
        "proportion": scenario.in_flight / scenario.n,
        "seed": scenario.seed,
        "num_rounds": 10**9,
        "num_steps": scenario.steps,
        "eval_interval": 10**9,
        "no_log_console": True,
        "no_tqdm": True,
        "algo_para": {
            "FedAsync": [scenario.mix, 0.0, "poly", 10, 6, 0.5],
            "FedBuff": [scenario.buffer_size / scenario.n, 1.0],
            "FedAvg": None,
        }[scenario.rule],
    }
    with tempfile.TemporaryDirectory() as task:
        names = [f"c{i}" for i in range(scenario.n)]
        (Path(task) / "info").write_text(json.dumps({"benchmark": benchmark(scenario)}))
        (Path(task) / "data.json").write_text(json.dumps({"client_names": names}))
        (Path(task) / "record").mkdir()
        sys.argv = sys.argv[:1]
        server = flgo.init(
            *(task, algorithm(scenario, events), options),
            model=Weights,
            Logger=Quiet,
            Simulator=Latencies,
        )
        ready = clock()
        server.run()
        done = clock()
    version = importlib.metadata.version("flgo")
    merged = events[: scenario.updates]
    return Answer(version, merged, server.model.arrays(), done - ready, ready - began)


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer(run)
