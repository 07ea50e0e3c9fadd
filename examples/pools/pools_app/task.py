"""The images and which site has them, the networks of the pools, and what they predict."""

import gzip
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, Message
from flwr.app.user_config import UserConfig
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedstale.apps.classification import Data, assign
from fedstale.strategies.types import Array

N_CLASSES, GROUPS, MOST_IMAGES = 10, 3, 6000
WORK = 60.0
"""Work units of a job that learns from labels alone."""


class Images(NamedTuple):
    """Three fifths are the sites' own, one is public, and one is for tests."""

    own: Data
    public: Tensor
    """Without labels."""
    test: Data


def _dense(side: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(side**2, width), nn.ReLU(), nn.Linear(width, N_CLASSES)
    )


def _convolutions(side: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * (side // 2) ** 2, N_CLASSES)),
    )


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "small": lambda side: _dense(side, 12),
    "wide": lambda side: _dense(side, 128),
    "conv": _convolutions,
}
"""By pool, for images of shape (n, 1, side, side)."""


def pools(config: UserConfig) -> list[str]:
    """Return the pools of a run."""
    names = str(config["pools"]).split(",")
    if unknown := set(names) - set(NETWORKS):
        raise ValueError(f"pools has {sorted(unknown)}: expected some of {','.join(NETWORKS)}")
    return names


def pool(config: UserConfig, site: int, node_config: UserConfig) -> str:
    """Return the pool of a site: that of its node config, or else one in turn."""
    names = pools(config)
    found = str(node_config.get("pool", names[site % len(names)]))
    if found not in names:
        raise ValueError(f"pool = {found!r} in the node config: expected {'|'.join(names)}")
    return found


def network(pool: str, side: int, arrays: ArrayRecord | None = None, seed: int = 0) -> nn.Module:
    """Return the network of a pool with some weights, else with those that a seed draws."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = NETWORKS[pool](side)
    if arrays is not None:
        made.load_state_dict(arrays.to_torch_state_dict())
    return made


@torch.no_grad()
def predict(pool: str, arrays: ArrayRecord, images: Array) -> Array:
    """Return the probabilities of classes, shape (n, classes), that a pool's network gives."""
    logits = network(pool, images.shape[-1], arrays)(torch.from_numpy(images))
    return logits.softmax(dim=1).numpy()


@lru_cache(maxsize=2)
def load(data: str, seed: int) -> Images:
    """Return digits, or the first 6,000 images of Fashion-MNIST in a folder, split by a seed."""
    if data:
        files = [Path(data) / f"train-{name}-ubyte.gz" for name in ("images-idx3", "labels-idx1")]
        pixels, labels = (
            np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, MOST_IMAGES * size, at)
            for path, size, at in zip(files, (28**2, 1), (16, 8), strict=True)
        )
        images = pixels.reshape(-1, 1, 28, 28) / 255
    else:
        pixels, labels = load_digits(return_X_y=True)
        images = pixels.reshape(-1, 1, 8, 8) / 16
    order = np.random.default_rng((seed, 0)).permutation(len(labels))
    x = torch.from_numpy(images[order].astype(np.float32))
    y = torch.from_numpy(labels[order].astype(np.int64))
    n = len(y) // 5
    return Images((x[2 * n :], y[2 * n :]), x[:n], (x[n : 2 * n], y[n : 2 * n]))


def images(config: UserConfig) -> Images:
    """Return the images of a run, with as many public ones as it says."""
    found = load(str(config["data"]), int(config["seed"]))
    return found._replace(public=found.public[: int(config["public"])])


def own(config: UserConfig, site: int, n_sites: int) -> Data:
    """Return the labelled images of a site.

    They are dealt by label to three groups, and in a group to its sites: those whose number modulo
    3 is the same, which are a pool where there are three.
    """
    (x, y), seed, group = images(config).own, int(config["seed"]), site % GROUPS
    groups = assign(
        y.numpy(), GROUPS, float(config["pool-alpha"]), np.random.default_rng((seed, 1))
    )
    labels, n = y.numpy()[groups[group]], len(range(group, n_sites, GROUPS))
    rng = np.random.default_rng((seed, 2, group))
    shares = assign(labels, n, float(config["alpha"]), rng)
    mine = torch.from_numpy(groups[group][shares[site // GROUPS]])
    return x[mine], y[mine]


def work(message: Message) -> float:
    """Return the work units of a job; learning from predictions as well takes twice as many."""
    return WORK * (2 if "predictions" in message.content else 1)
