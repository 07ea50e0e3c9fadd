"""Labelled examples that are dealt to devices with label skew, and how they are classified.

The share of each label that a device holds is drawn from a Dirichlet distribution.

Reference:
    Hsu, Qi, Brown. Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification. 2019. There devices are of equal size; here, as in most later work, the
    examples of each label are split among the devices, so sizes differ too.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Index = npt.NDArray[np.int64]
Data = tuple[Tensor, Tensor]
"""Examples, of any shape (n, ...), and their labels, int64 of shape (n,)."""

_BATCH = 1000
"""Examples that are evaluated at a time."""


def assign(labels: Index, n_partitions: int, alpha: float, rng: np.random.Generator) -> list[Index]:
    """Deal examples to devices, unevenly by label.

    Args:
        labels: of the examples, shape (n,).
        n_partitions: number of devices, >= 1. With more devices than examples, the whole set is
            dealt out several times over.
        alpha: concentration of the Dirichlet distribution, > 0; small is uneven.
        rng: draws the shares and the examples.

    Returns:
        The examples of each device, at least one each.

    Raises:
        ValueError: there is no device, or alpha is not positive.
    """
    if n_partitions < 1:
        raise ValueError(f"num-partitions = {n_partitions}: expected at least one device")
    if not 0 < alpha < np.inf:
        raise ValueError(f"alpha = {alpha}: expected a number > 0, such as 0.5")
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


def held_out(data: Data, mine: Index) -> tuple[Data, Data]:
    """Split a device's examples for training and for evaluation.

    Every fifth example is for evaluation; a device with fewer than five uses all for both.

    Args:
        data: of all devices.
        mine: the device's own examples among them, shape (n,).
    """
    examples, labels = data
    own = torch.from_numpy(mine)
    is_test = torch.arange(len(own)) % 5 == 4
    if not is_test.any():
        return (examples[own], labels[own]), (examples[own], labels[own])
    train, test = own[~is_test], own[is_test]
    return (examples[train], labels[train]), (examples[test], labels[test])


def losses(network: nn.Module, examples: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each example in nats, shape (n,)."""
    return cross_entropy(network(examples), labels, reduction="none")


def mean_loss(network: nn.Module, examples: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats."""
    return cross_entropy(network(examples), labels)


@torch.no_grad()
def evaluate(network: nn.Module, data: Data) -> tuple[float, float]:
    """Return the mean cross-entropy in nats and the share of right answers."""
    loss = right = 0.0
    for examples, labels in zip(*(torch.split(x, _BATCH) for x in data), strict=True):
        logits, share = network(examples), len(labels) / len(data[1])
        loss += share * cross_entropy(logits, labels).item()
        right += share * (logits.argmax(dim=1) == labels).double().mean().item()
    return loss, right


def _feed_the_empty(owner: Index, n_partitions: int, rng: np.random.Generator) -> None:
    """Give each device without examples one of a device that has several."""
    empty = np.flatnonzero(np.bincount(owner, minlength=n_partitions) == 0)
    order = rng.permutation(len(owner))
    _, kept = np.unique(owner[order], return_index=True)
    spare = np.delete(order, kept)
    owner[spare[: len(empty)]] = empty
