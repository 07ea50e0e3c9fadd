"""Train the clients of `benchmarks/speed/peers.py` with pfl; print the rate of each round."""

import contextlib
import json
import os
import sys
import time

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset
from pfl.data.dataset import Dataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy


class Network(nn.Sequential):
    """64-32-10 units."""

    def __init__(self):
        super().__init__(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def loss(self, images, labels, eval=False):
        """Return the mean loss of a batch."""
        return cross_entropy(self(images), labels)

    @torch.no_grad()
    def metrics(self, images, labels):
        """Return what pfl asks for."""
        return {"loss": Weighted(self.loss(images, labels).item() * len(labels), len(labels))}


class Ends(TrainingProcessCallback):
    """Notes when each round ends, in processor time."""

    def __init__(self):
        self.at = []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Look at the clock."""
        self.at.append(time.process_time())
        return False, Metrics()


def main(task):
    """Train, and print the rates as JSON."""
    torch.set_num_threads(1)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32)
    targets = torch.tensor(labels, dtype=torch.int64)
    rng = np.random.default_rng(1)
    owned = rng.integers(len(labels), size=(task["clients"], task["examples"]))
    turn = iter(range(10**9))
    data = FederatedDataset(
        lambda user: Dataset(raw_data=[images[owned[user]], targets[owned[user]]], user_id=user),
        lambda: next(turn) % task["clients"],
    )
    network, ends = Network(), Ends()
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        FederatedAveraging().run(
            backend=SimulatedBackend(training_data=data, val_data=None, postprocessors=[]),
            model=PyTorchModel(
                model=network,
                local_optimizer_create=torch.optim.SGD,
                central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
            ),
            algorithm_params=NNAlgorithmParams(
                central_num_iterations=task["rounds"],
                evaluation_frequency=10**9,
                train_cohort_size=task["clients"],
                val_cohort_size=0,
            ),
            model_train_params=NNTrainHyperParams(
                local_num_epochs=task["epochs"],
                local_learning_rate=task["rate"],
                local_batch_size=task["batch_size"],
            ),
            model_eval_params=NNEvalHyperParams(local_batch_size=None),
            callbacks=[ends],
        )
    print(json.dumps([task["clients"] / s for s in np.diff(ends.at)]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
