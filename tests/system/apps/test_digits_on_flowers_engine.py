"""The digits app as a whole under Flower's own simulation engine, which starts Ray."""

import pytest
from flwr.serverapp.strategy import FedAvg


@pytest.mark.filterwarnings("ignore")
def test_digits_learns_under_flowers_own_simulation_engine(load, monkeypatch):
    pytest.importorskip("ray", reason="needs fedstale[ray]")
    from flwr.app import Context, RecordDict
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    digits = load("digits")
    monkeypatch.setenv("PYTHONPATH", str(digits.directory))  # inherited by the actors
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    server_app = digits.load_server()
    results = []
    start = FedAvg.start

    def kept(self, **settings):
        results.append(start(self, **settings))
        return results[-1]

    monkeypatch.setattr(FedAvg, "start", kept)
    config = digits.run_config(
        {"num-server-rounds": 2, "strategy": "flower.FedAvg(fraction_evaluate=0.0)"}
    )
    server = ServerApp()

    @server.main()
    def main(grid, context):
        server_app(grid, Context(1, 1, {}, RecordDict(), config))

    client = digits.load_client()
    run_simulation(
        server,
        _with_config(client, config),
        num_supernodes=4,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    accuracy = [m["accuracy"] for m in results[0].evaluate_metrics_serverapp.values()]
    assert len(accuracy) == 3
    assert accuracy[-1] > 0.5 > accuracy[0]


def _with_config(client, config):
    """Return a ClientApp with a run config, which run_simulation has no argument for."""
    from flwr.app import Context
    from flwr.clientapp import ClientApp

    # Local, so that it travels to the actors by value: they cannot import this file.
    class Configured(ClientApp):
        def __call__(self, message, context):
            where = context.run_id, context.node_id, context.node_config, context.state
            return client(message, Context(*where, config))

    return Configured()
