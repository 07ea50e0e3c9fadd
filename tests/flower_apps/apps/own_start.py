"""A strategy with a `start` of its own: it evaluates itself, prints, logs and saves its best."""

import logging
from logging import INFO

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import log
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg, Result

client, server = ClientApp(), ServerApp()
AGGREGATES_OTHERWISE = False


@client.train()
def train(message, context):
    print(f"training {context.node_config['partition-id']}")
    (w,) = message.content["arrays"].to_numpy_ndarrays()
    w = w + message.content["config"]["lr"] * (context.node_config["partition-id"] - w)
    metrics = MetricRecord({"train_loss": float(np.abs(w).sum()), "num-examples": 4})
    return Message(RecordDict({"arrays": ArrayRecord([w]), "metrics": metrics}), reply_to=message)


class Saving(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        config["lr"] = 0.5 if server_round < 3 else 0.25
        return super().configure_train(server_round, arrays, config, grid)

    def mean(self, replies):
        found = [r.content["arrays"].to_numpy_ndarrays()[0] for r in replies if r.has_content()]
        return ArrayRecord([sum(found) / len(found)])

    def start(self, grid, initial_arrays, num_rounds=3, timeout=3600, folder=None):
        log(INFO, "starting %s", type(self).__name__)
        logging.getLogger("own").warning("a warning of the app")
        result, arrays, best = Result(), initial_arrays, -1.0
        for number in range(1, num_rounds + 1):
            log(INFO, "round %d of the app", number)
            messages = self.configure_train(number, arrays, ConfigRecord(), grid)
            replies = list(grid.send_and_receive(messages, timeout=timeout))
            if AGGREGATES_OTHERWISE:
                arrays = self.mean(replies)
            else:
                arrays, metrics = self.aggregate_train(number, replies)
                result.train_metrics_clientapp[number] = metrics
            accuracy = float(arrays.to_numpy_ndarrays()[0].max() / 1.5)
            result.evaluate_metrics_serverapp[number] = MetricRecord({"accuracy": accuracy})
            if accuracy > best:
                best = accuracy
                print(f"best so far: {accuracy:.4f} in round {number}")
        result.arrays = arrays
        return result


@server.main()
def main(grid, context):
    strategy = Saving(min_train_nodes=4, min_available_nodes=4, fraction_evaluate=0.0)
    strategy.start(grid=grid, initial_arrays=ArrayRecord([np.zeros(3)]), num_rounds=4)
