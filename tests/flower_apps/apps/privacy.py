"""Differential privacy by Flower's wrappers and mods; the kind is one of those below."""

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)

KIND, NOISE = "server-fixed", 0.0

WRAPPERS = {
    "server-fixed": lambda s: DifferentialPrivacyServerSideFixedClipping(s, NOISE, 0.5, 4),
    "server-adaptive": lambda s: DifferentialPrivacyServerSideAdaptiveClipping(s, NOISE, 4, 0.5),
    "client-fixed": lambda s: DifferentialPrivacyClientSideFixedClipping(s, NOISE, 0.5, 4),
    "client-adaptive": lambda s: DifferentialPrivacyClientSideAdaptiveClipping(s, NOISE, 4, 0.5),
    "local": lambda s: s,
}
MODS = {
    "client-fixed": [fixedclipping_mod],
    "client-adaptive": [adaptiveclipping_mod],
    "local": [LocalDpMod(clipping_norm=0.5, sensitivity=0.01, epsilon=1.0, delta=1e-5)],
}

client, server = ClientApp(mods=MODS.get(KIND, [])), ServerApp()


@client.train()
def train(message, context):
    (w,) = message.content["arrays"].to_numpy_ndarrays()
    metrics = MetricRecord({"train_loss": float(w[0]), "num-examples": 4})
    content = {"arrays": ArrayRecord([w + 1.0]), "metrics": metrics}
    return Message(RecordDict(content), reply_to=message)


def measured(server_round, arrays):
    return MetricRecord({"norm": float(np.linalg.norm(arrays.to_numpy_ndarrays()[0]))})


@server.main()
def main(grid, context):
    inner = FedAvg(min_train_nodes=4, min_available_nodes=4, fraction_evaluate=0.0)
    start = ArrayRecord([np.zeros(4)])
    WRAPPERS[KIND](inner).start(grid=grid, initial_arrays=start, num_rounds=3, evaluate_fn=measured)
