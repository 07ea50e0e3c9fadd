"""Drive APPFL's virtual-time simulation, `appfl.vsim`, through a scenario.

The drivers, the client profiles, the schedulers and the aggregators are APPFL's. What stands around
them here is small, since APPFL's own agents import cloud libraries: a server that passes calls on,
as `ServerAgent` does, and clients that train.
"""

import logging

import numpy as np
import torch
from appfl import __version__
from appfl.algorithm.aggregator import FedAsyncAggregator, FedAvgAggregator, FedBuffAggregator
from appfl.algorithm.scheduler import AsyncScheduler, SyncScheduler
from appfl.vsim import AsyncSimDriver, ClientProfile, SyncSimDriver
from omegaconf import OmegaConf
from scenario import Answer, Model, Scenario, answer, clock


def to_state(model: Model) -> dict[str, torch.Tensor]:
    """Return a model as a state of torch."""
    return {str(i): torch.from_numpy(np.array(array)) for i, array in enumerate(model)}


def to_model(state: dict[str, torch.Tensor]) -> Model:
    """Return the arrays of a state."""
    return [state[str(i)].numpy() for i in range(len(state))]


class Weights(torch.nn.Module):
    """Holds the model for the aggregators."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        for name, value in to_state(model).items():
            self.register_parameter(name, torch.nn.Parameter(value))


class Server:
    """Passes the driver's calls on to a scheduler."""

    def __init__(self, scheduler, updates: int) -> None:
        self.scheduler, self._updates = scheduler, updates
        self.base: dict[str, int] = {}
        """By client, the version that it was sent."""

    def version(self) -> int:
        """Return the number of server steps."""
        return getattr(self.scheduler.aggregator, "global_step", self.scheduler._num_global_epochs)

    def get_parameters(self, client_id=None, **kwargs):
        """Return the model."""
        if client_id is not None:
            self.base[client_id] = self.version()
        return self.scheduler.get_parameters(client_id=client_id, **kwargs)

    def global_update(self, client_id, local_model, blocking=False, **kwargs):
        """Merge an update, or keep it for a merge."""
        found = self.scheduler.schedule(client_id, local_model, **kwargs)
        return found.result() if blocking and hasattr(found, "result") else found

    def training_finished(self) -> bool:
        """Return whether enough updates were merged."""
        return self.scheduler.get_num_global_epochs() >= self._updates


class Client:
    """Trains as the scenario says."""

    def __init__(self, scenario: Scenario, number: int) -> None:
        self._scenario, self._number, self._state = scenario, number, {}

    def get_id(self) -> str:
        """Return its name."""
        return str(self._number)

    def load_parameters(self, state) -> None:
        """Take the server's model."""
        self._state = state

    def train(self) -> None:
        """Train."""
        self._state = to_state(self._scenario.train(self._number, to_model(self._state)))

    def get_parameters(self):
        """Return the trained model, and the number of steps."""
        return self._state, {"current_local_steps": self._scenario.steps}


class Rounds(SyncSimDriver):
    """Notes when each client of a round has arrived."""

    def _aggregate_round(self, accepted) -> None:
        version = len([row for row in self.history if not row["skipped"]])
        for row in accepted:
            sent_at = row["completion_time"] - row["duration"]
            self.arrived.append((row["completion_time"], int(row["cid"]), version, sent_at))
        super()._aggregate_round(accepted)


class Stream(AsyncSimDriver):
    """Notes when each update has arrived, and from which version it began."""

    def _handle_train_complete(self, cid, completion_time) -> None:
        sent_at = self._pending[cid]["dispatch_time"]
        self.arrived.append((completion_time, int(cid), self.server.base[cid], sent_at))
        super()._handle_train_complete(cid, completion_time)


def run(scenario: Scenario) -> Answer:
    """Return what APPFL makes of a scenario."""
    began, logger = clock(), logging.getLogger("quiet")
    is_sync = scenario.rule == "FedAvg"
    weights = Weights(scenario.first())
    # Weights of clients are the inverse of `num_clients`: the updates of one server step.
    settings = {
        "FedAsync": {"alpha": scenario.mix, "num_clients": 1},
        "FedBuff": {"alpha": 1.0, "num_clients": scenario.buffer_size, "K": scenario.buffer_size},
        "FedAvg": {"client_weights_mode": "equal"},
    }[scenario.rule]
    if not is_sync:
        settings |= {"staleness_fn": "polynomial", "staleness_fn_kwargs": {"a": 0.5}}
    kinds = {
        "FedAsync": FedAsyncAggregator,
        "FedBuff": FedBuffAggregator,
        "FedAvg": FedAvgAggregator,
    }
    # On by default: the collector of garbage is called several times an update.
    memory = {"optimize_memory": not scenario.is_fast}
    aggregator = kinds[scenario.rule](weights, OmegaConf.create(settings | memory), logger)
    scheduler = (SyncScheduler if is_sync else AsyncScheduler)(
        OmegaConf.create({"num_clients": scenario.n} | memory), aggregator, logger
    )
    server = Server(scheduler, scenario.updates // (scenario.n if is_sync else 1))
    rates = zip(scenario.slowdown, scenario.mbit_per_s, strict=True)
    profiles = {str(i): ClientProfile(*each) for i, each in enumerate(rates)}
    clients = [Client(scenario, i) for i in range(scenario.n)]
    common = {"seed": scenario.seed, "base_step_time": scenario.step_s}
    if is_sync:
        driver = Rounds(
            *(server, clients, profiles, scenario.n, logger),
            target_rounds=scenario.updates // scenario.n,
            **common,
        )
    else:
        driver = Stream(server, clients, profiles, scenario.in_flight, logger, **common)
    driver.arrived = []
    ready = clock()
    driver.run()
    done = clock()
    model = to_model(scheduler.get_parameters(serial_run=True))
    return Answer(__version__, driver.arrived, model, done - ready, ready - began)


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer(run)
