"""SecAgg+ as a workflow of the older API: four messages of training a round and client."""

import numpy as np
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerConfig
from flwr.server.compat import LegacyContext
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import ServerApp


class Follower(NumPyClient):
    def __init__(self, target):
        self.target = target

    def fit(self, parameters, config):
        return [parameters[0] + 0.5 * (self.target - parameters[0])], 4, {}


def client_fn(context):
    return Follower(context.node_config["partition-id"]).to_client()


def measured(server_round, parameters, config):
    return float(3 - parameters[0].sum()), {"accuracy": float(parameters[0].max() / 1.5)}


client, server = ClientApp(client_fn=client_fn, mods=[secaggplus_mod]), ServerApp()


@server.main()
def main(grid, context):
    strategy = FedAvg(
        min_fit_clients=4,
        min_available_clients=4,
        fraction_evaluate=0.0,
        initial_parameters=ndarrays_to_parameters([np.zeros(3)]),
        evaluate_fn=measured,
    )
    legacy = LegacyContext(context, config=ServerConfig(num_rounds=2), strategy=strategy)
    DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(3, 2, timeout=600.0))(grid, legacy)
