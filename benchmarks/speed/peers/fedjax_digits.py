"""Train the clients of `benchmarks/speed/peers.py` with fedjax; print the rate of each round."""

import json
import sys
import time

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg
from sklearn.datasets import load_digits


def forward(params, batch):
    """Return logits."""
    hidden = jax.nn.relu(batch["x"] @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def first(rng):
    """Return a network of 64-32-10 units."""
    one, two = jax.random.split(rng)
    return {
        "w1": 0.1 * jax.random.normal(one, (64, 32)),
        "b1": jnp.zeros(32),
        "w2": 0.1 * jax.random.normal(two, (32, 10)),
        "b2": jnp.zeros(10),
    }


def loss(batch, logits):
    """Return the loss of each example."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1)[:, 0]


def main(task):
    """Train, and print the rates as JSON."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32)
    rng = np.random.default_rng(1)
    owned = rng.integers(len(labels), size=(task["clients"], task["examples"]))
    data = fedjax.InMemoryFederatedData(
        {
            f"{i:05d}".encode(): {"x": images[own], "y": labels[own].astype(np.int32)}
            for i, own in enumerate(owned)
        }
    )
    model = fedjax.Model(
        init=first,
        apply_for_train=lambda params, batch, rng: forward(params, batch),
        apply_for_eval=forward,
        train_loss=loss,
        eval_metrics={},
    )
    algorithm = fed_avg.federated_averaging(
        fedjax.model_grad(model),
        client_optimizer=fedjax.optimizers.sgd(task["rate"]),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(
            batch_size=task["batch_size"], num_epochs=task["epochs"], drop_remainder=False, seed=1
        ),
    )
    key = jax.random.PRNGKey(0)
    state = algorithm.init(model.init(key))
    ends = []
    for _ in range(task["rounds"]):
        clients = [(name, own, key) for name, own in data.clients()]
        state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)
        ends.append(time.process_time())
    print(json.dumps([task["clients"] / s for s in np.diff(ends)]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
