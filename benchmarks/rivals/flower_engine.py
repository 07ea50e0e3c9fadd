"""Drive Flower's own simulation engine through a scenario: rounds without a clock."""

import importlib.metadata
import logging
import os
import time
from pathlib import Path

import ray
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from ours import client
from scenario import Answer, Model, Scenario, answer

HERE = str(Path(__file__).parent)
MARK = "RIVAL_OF"
"""Environment variable of the processes that this one starts."""
clock = time.perf_counter


def peak_of_others_mib() -> float:
    """Return the sum of the peaks of other processes with this one's mark, as Linux has them."""
    peaks = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = f"{MARK}={os.getpid()}".encode() in (folder / "environ").read_bytes()
            lines = (folder / "status").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        if is_ours and int(folder.name) != os.getpid():
            peaks += [int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")]
    return sum(peaks)


def run(scenario: Scenario) -> Answer:
    """Return what Flower's engine makes of a scenario; events have no instants."""
    if scenario.rule != "FedAvg":
        raise ValueError(f"rule = {scenario.rule!r}: expected FedAvg; the engine has no clock")
    began, ends, others = clock(), [], []
    found: list[Model] = []
    rounds = scenario.updates // scenario.n

    class Timed(FedAvg):
        def aggregate_train(self, server_round, replies):
            merged = super().aggregate_train(server_round, replies)
            ends.append(clock())
            if server_round == rounds:
                others.append(peak_of_others_mib())
            return merged

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        every = {"min_train_nodes": scenario.n, "min_available_nodes": scenario.n}
        rule = Timed(fraction_evaluate=0.0, **every)
        result = rule.start(grid, ArrayRecord(scenario.first()), num_rounds=rounds)
        found.append(result.arrays.to_numpy_ndarrays())

    def train(number: int, model: Model, server_round: int) -> Model:
        # Each actor has a scenario of its own, which does not count the jobs of others.
        return scenario.train(number, model, server_round - 1)

    resources = {
        "client_resources": {"num_cpus": 1},
        "init_args": {"include_dashboard": False, "log_to_driver": False},
    }
    run_simulation(app, client(train), scenario.n, backend_config=resources)
    ray.shutdown()
    nothing = float("nan")
    events = [(nothing, i, v, nothing) for v in range(rounds) for i in range(scenario.n)]
    # The first round starts the workers.
    per_round = (ends[-1] - ends[0]) / max(rounds - 1, 1)
    run_s = per_round * rounds
    version = importlib.metadata.version("flwr")
    return Answer(version, events, found[0], run_s, ends[0] - began - per_round, others[0])


if __name__ == "__main__":
    # Actors import these modules, too.
    os.environ |= {"PYTHONPATH": HERE, MARK: str(os.getpid())}
    logging.getLogger("flwr").setLevel(logging.ERROR)
    answer(run)
