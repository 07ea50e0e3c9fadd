"""What a site does: train its pool's network on its own labels and on what other pools predict."""

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from fedstale.apps import client
from fedstale.client import local_steps
from pools_app import task
from pools_app.stage import PUBLIC, digest, of_pool, with_prefix

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return what some steps have changed in the network of this site's pool."""
    config, (site, n_sites) = context.run_config, client.place(context)
    pool = task.pool(config, site, context.node_config)
    public, data = task.images(config).public, task.own(config, site, n_sites)
    others, share = predicted(message, public), float(config["distillation"])
    received = of_pool(message.content.array_records["arrays"], pool)
    network = task.network(pool, public.shape[-1], received)
    steps = local_steps(message, 1, int(config["local-steps"]))
    n, batch_size = len(data[1]), int(config["batch-size"])
    seed = int(config["seed"]), site, client.number_of(message)
    rng = np.random.default_rng((*seed, 1))

    def loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        of_labels = cross_entropy(network(x), y)
        if others is None:
            return of_labels
        some = torch.from_numpy(rng.integers(len(public), size=batch_size))
        told = network(public[some]).log_softmax(dim=1)
        of_others = kl_div(told, others[some], reduction="batchmean")
        return (1 - share) * of_labels + share * of_others

    mean = client.train(
        network,
        loss,
        data,
        client.order(n, -(-steps * batch_size // n), seed),
        batch_size=batch_size,
        learning_rate=float(config["learning-rate"]),
        steps=steps,
    )
    changes = {
        name: Array(after.numpy() - received[name].numpy())
        for name, after in network.state_dict().items()
    }
    content = RecordDict({"arrays": ArrayRecord(with_prefix(ArrayRecord(changes), pool))})
    content["metrics"] = MetricRecord({"train_loss": mean, "num-examples": n})
    content["about"] = ConfigRecord({"fedstale.update": "delta"})
    return Message(content, reply_to=message)


def predicted(message: Message, public: Tensor) -> Tensor | None:
    """Return the mean of what the other pools predict of the public images; None for nothing.

    Raises:
        ValueError: they have predicted other images.
    """
    if "predictions" not in message.content:
        return None
    if message.content["predicted"][PUBLIC] != digest(public.numpy()):
        raise ValueError(
            f"the public images of this site, of shape {tuple(public.shape)}, are not those of the "
            "server: expected the same in the same order; set public, data and seed as there"
        )
    each = message.content.array_records["predictions"].values()
    return torch.from_numpy(np.mean([array.numpy() for array in each], axis=0))
