"""client_fn and server_fn: a NumPyClient under FedAvg of the older API."""

import numpy as np
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp


class Follower(NumPyClient):
    def __init__(self, target):
        self.target = target

    def fit(self, parameters, config):
        return [parameters[0] + 0.5 * (self.target - parameters[0])], 4, {"round": config["round"]}

    def evaluate(self, parameters, config):
        return float(np.abs(self.target - parameters[0]).max()), 4, {}


def client_fn(context):
    return Follower(context.node_config["partition-id"]).to_client()


def measured(server_round, parameters, config):
    return float(3 - parameters[0].sum()), {"accuracy": float(parameters[0].max() / 1.5)}


def server_fn(context):
    strategy = FedAvg(
        min_fit_clients=4,
        min_evaluate_clients=4,
        min_available_clients=4,
        initial_parameters=ndarrays_to_parameters([np.zeros(3)]),
        evaluate_fn=measured,
        on_fit_config_fn=lambda server_round: {"round": server_round},
        fit_metrics_aggregation_fn=lambda results: {"round": results[0][1]["round"]},
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=3))


client, server = ClientApp(client_fn=client_fn), ServerApp(server_fn=server_fn)
