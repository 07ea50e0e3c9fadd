"""What the clients of the built-in apps share: a job by the run config, SGD, and the replies.

All randomness comes from explicit seeds, so every process trains to the same bytes. They depend on
the message: a device that is asked twice at one version of the model draws twice.
"""

from collections.abc import Callable
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

Index = npt.NDArray[np.int64]
Examples = tuple[Tensor, ...]
"""Tensors whose first axis is the examples, such as images and labels."""


def place(context: Context) -> tuple[int, int]:
    """Read a device's partition, and the number of partitions.

    Raises:
        ValueError: there is no such partition.
    """
    node = context.node_config
    partition, n_partitions = int(node["partition-id"]), int(node["num-partitions"])
    if not 0 <= partition < n_partitions:
        raise ValueError(
            f"partition-id = {partition}: expected 0 <= partition-id < num-partitions, "
            f"which is {n_partitions}; set both in the node config"
        )
    return partition, n_partitions


def job(
    message: Message, context: Context, data: Examples, stream: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Build the arguments of a training; engines train many devices by them as one program.

    Args:
        message: of training, in which FedProx states mu.
        context: with local-epochs, batch-size, learning-rate and seed in its run config.
        data: the device's examples, n of them.
        stream: tells these random numbers from others that the app draws by the same seed.

    Returns:
        The arguments of `train` after the loss. The order of the examples depends on the stream,
        the seed, the partition and the message, and the number of steps on the share of the work
        that the message asks for.
    """
    # The mods of an app bring it; what else is here does without strategies.
    from fedstale.client import local_steps  # noqa: PLC0415

    config, node = context.run_config, context.node_config
    seed = (*stream, int(config["seed"]), int(node["partition-id"]), number_of(message))
    # Asked of every message; Flower's view of all config records takes fifty times as long.
    told = message.content.get("config")
    mu = told.get("proximal-mu", 0.0) if isinstance(told, ConfigRecord) else 0.0
    epochs, batch_size, n = int(config["local-epochs"]), int(config["batch-size"]), len(data[0])
    # `train` refuses a batch size below 1.
    per_epoch = -(-n // max(batch_size, 1))
    steps = local_steps(message, epochs, per_epoch)
    return {
        "data": data,
        "order": order(n, epochs, seed),
        "batch_size": batch_size,
        "learning_rate": float(config["learning-rate"]),
        **({"steps": steps} if steps < epochs * per_epoch else {}),
        **({"proximal_mu": mu} if mu else {}),
    }


def number_of(message: Message) -> int:
    """Return a number that no other message of a run has.

    It is made of the message's id. A simulation counts its messages, so the same run has the same
    numbers; a SuperLink draws ids. A message that nothing has sent has none, and the instant at
    which it was made stands in.
    """
    about = message.metadata
    return int.from_bytes((about.message_id or repr(about.created_at)).encode())


def order(n: int, epochs: int, seed: tuple[int, ...]) -> Index:
    """Return the order in which a device takes its n examples; shape (epochs, n).

    Raises:
        ValueError: the number of epochs is negative.
    """
    if epochs < 0:
        raise ValueError(f"local-epochs = {epochs}: expected a number >= 0")
    rng = np.random.default_rng(seed)
    return np.array([rng.permutation(n) for _ in range(epochs)], np.int64).reshape(epochs, n)


def received(message: Message, network: nn.Module) -> nn.Module:
    """Return a network with the weights in a message."""
    network.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    return network


def trained(
    message: Message, network: nn.Module, loss: Callable[..., Tensor], job: dict[str, Any]
) -> Message:
    """Return the reply to a message of training: the model after a job, and its mean loss."""
    mean = train(received(message, network), loss, **job)
    metrics = MetricRecord({"train_loss": mean, "num-examples": len(job["data"][0])})
    content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


def evaluated(message: Message, loss: float, accuracy: float, n_examples: int) -> Message:
    """Return the reply to a message of evaluation."""
    metrics = MetricRecord(
        {"eval_loss": loss, "eval_accuracy": accuracy, "num-examples": n_examples}
    )
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def train(
    network: nn.Module,
    loss: Callable[..., Tensor],
    data: Examples,
    order: Index,
    *,
    batch_size: int,
    learning_rate: float,
    steps: int | None = None,
    max_norm: float | None = None,
    proximal_mu: float = 0.0,
) -> float:
    """Train in place with SGD; return the mean loss of the last steps, as many as in an epoch.

    Args:
        network: changed in place.
        loss: called with (network, *batch), returns the mean loss of a batch.
        data: the examples.
        order: of the examples, one row an epoch; shape (epochs, examples).
        batch_size: examples of one step, >= 1.
        learning_rate: of plain SGD.
        steps: to take of these epochs; None takes all.
        max_norm: gradients longer than this are shortened to it; None leaves them.
        proximal_mu: mu of FedProx, which adds mu/2 |w - w_received|^2 to the loss; not to the
            one that is returned.

    Raises:
        ValueError: the batch size is below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch-size = {batch_size}: expected a number >= 1")
    weights = list(network.parameters())
    received = [w.detach().clone() for w in weights] if proximal_mu else ()
    per_epoch = -(-len(data[0]) // batch_size)
    steps = len(order) * per_epoch if steps is None else steps
    total = counted = 0.0
    batches = chain.from_iterable(rows.split(batch_size) for rows in torch.from_numpy(order))
    for step, batch in enumerate(islice(batches, steps)):
        network.zero_grad()
        mean = loss(network, *(tensor[batch] for tensor in data))
        torch.autograd.backward(mean)
        for w, w0 in zip(weights, received, strict=True) if proximal_mu else ():
            if w.grad is not None:
                w.grad.add_(w.detach() - w0, alpha=proximal_mu)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(weights, max_norm)
        # As torch.optim.SGD, which would import torch.compile: two seconds a process.
        with torch.no_grad():
            for w in weights:
                if w.grad is not None:
                    w.add_(w.grad, alpha=-learning_rate)
        if step >= steps - per_epoch:
            total += mean.item() * len(batch)
            counted += len(batch)
    return total / counted if counted else 0.0
