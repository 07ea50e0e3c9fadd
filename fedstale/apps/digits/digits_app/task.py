"""The data, the model, and how to train and evaluate it.

The data come with scikit-learn. They are dealt to the devices with label skew: the share of each
label that a device holds is drawn from a Dirichlet distribution. All randomness comes from
explicit seeds, so every process sees the same data and trains to the same bytes.

Reference:
    Hsu, Qi, Brown. Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification. 2019. There devices are of equal size; here, as in most later work, the
    examples of each label are split among the devices, so sizes differ too.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Index = npt.NDArray[np.int64]
Data = tuple[Tensor, Tensor]
"""Images, float32 of shape (n, 64) in [0, 1], and labels, int64 of shape (n,)."""

# Each stream of random numbers has a purpose, so that no two of them coincide.
_SPLIT, _DEAL, _SHUFFLE = range(3)


class Network(nn.Sequential):
    """A network of 64-32-10 units."""

    def __init__(self, seed: int = 0) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            super().__init__(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@lru_cache(maxsize=4)
def load_data(seed: int) -> tuple[Data, Data]:
    """Return the training set and the test set, 4/5 and 1/5 of the 1797 digits."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - takes a second

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng((seed, _SPLIT)).permutation(len(labels))
    images = torch.from_numpy((pixels[order] / 16).astype(np.float32))
    targets = torch.from_numpy(labels[order].astype(np.int64))
    n_test = len(labels) // 5
    return (images[n_test:], targets[n_test:]), (images[:n_test], targets[:n_test])


@lru_cache(maxsize=4096)
def client_data(partition: int, n_partitions: int, alpha: float, seed: int) -> tuple[Data, Data]:
    """Return what a device trains on, and what it evaluates on.

    Every fifth example is for evaluation; a device with fewer than five uses all for both.
    """
    if not 0 <= partition < n_partitions:
        raise ValueError(
            f"partition-id = {partition}: expected 0 <= partition-id < num-partitions, "
            f"which is {n_partitions}; set both in the node config"
        )
    images, labels = load_data(seed)[0]
    mine = torch.from_numpy(deal(n_partitions, alpha, seed)[partition])
    held_out = torch.arange(len(mine)) % 5 == 4
    if not held_out.any():
        return (images[mine], labels[mine]), (images[mine], labels[mine])
    train, test = mine[~held_out], mine[held_out]
    return (images[train], labels[train]), (images[test], labels[test])


@lru_cache(maxsize=4)
def deal(n_partitions: int, alpha: float, seed: int) -> list[Index]:
    """Deal the training set to devices, unevenly by label.

    Args:
        n_partitions: number of devices, >= 1. With more devices than examples, the whole set is
            dealt out several times over.
        alpha: concentration of the Dirichlet distribution, > 0; small is uneven.
        seed: of the data and the draw.

    Returns:
        The examples of each device, at least one each.

    Raises:
        ValueError: there is no device, or alpha is not positive.
    """
    if n_partitions < 1:
        raise ValueError(f"num-partitions = {n_partitions}: expected at least one device")
    if not 0 < alpha < np.inf:
        raise ValueError(f"alpha = {alpha}: expected a number > 0, such as 0.5")
    rng = np.random.default_rng((seed, _DEAL))
    labels = load_data(seed)[0][1].numpy()
    examples = np.tile(np.arange(len(labels)), -(-n_partitions // len(labels)))
    owner = np.empty(len(examples), dtype=np.int64)
    for label in np.unique(labels):
        places = rng.permutation(np.flatnonzero(labels[examples] == label))
        ends = np.cumsum(rng.dirichlet(np.full(n_partitions, alpha)))
        ranks = (np.arange(len(places)) + 0.5) / len(places)
        owner[places] = np.minimum(np.searchsorted(ends, ranks), n_partitions - 1)
    _feed_the_empty(owner, n_partitions, rng)
    by_owner = np.argsort(owner, kind="stable")
    cuts = np.cumsum(np.bincount(owner, minlength=n_partitions))[:-1]
    return np.split(examples[by_owner], cuts)


def order(n: int, epochs: int, seed: tuple[int, ...]) -> Index:
    """Return the order in which a device takes its n examples; shape (epochs, n).

    It depends on the seed alone, such as (seed, partition, round).
    """
    if epochs < 0:
        raise ValueError(f"local-epochs = {epochs}: expected a number >= 0")
    rng = np.random.default_rng((_SHUFFLE, *seed))
    return np.array([rng.permutation(n) for _ in range(epochs)], np.int64).reshape(epochs, n)


def losses(network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each example in nats."""
    return cross_entropy(network(images), labels, reduction="none")


def train(
    network: nn.Module, data: Data, order: Index, *, batch_size: int, learning_rate: float
) -> float:
    """Train in place with SGD; return the mean loss of the last epoch.

    Args:
        network: changed in place.
        data: images and labels.
        order: of the examples, one row an epoch; shape (epochs, examples).
        batch_size: examples of one step, >= 1.
        learning_rate: of plain SGD.
    """
    if batch_size < 1:
        raise ValueError(f"batch-size = {batch_size}: expected a number >= 1")
    images, labels = data
    optimizer = torch.optim.SGD(network.parameters(), lr=learning_rate)
    total = 0.0
    for examples in torch.from_numpy(order):
        total = 0.0
        for batch in examples.split(batch_size):
            optimizer.zero_grad()
            loss = cross_entropy(network(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
    return total / len(labels)


@torch.no_grad()
def evaluate(network: nn.Module, data: Data) -> tuple[float, float]:
    """Return the mean cross-entropy in nats and the share of right answers."""
    images, labels = data
    logits = network(images)
    right = (logits.argmax(dim=1) == labels).double().mean()
    return cross_entropy(logits, labels).item(), right.item()


def _feed_the_empty(owner: Index, n_partitions: int, rng: np.random.Generator) -> None:
    """Give each device without examples one of a device that has several."""
    empty = np.flatnonzero(np.bincount(owner, minlength=n_partitions) == 0)
    order = rng.permutation(len(owner))
    _, kept = np.unique(owner[order], return_index=True)
    spare = np.delete(order, kept)
    owner[spare[: len(empty)]] = empty
