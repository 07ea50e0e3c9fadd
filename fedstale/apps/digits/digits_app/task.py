"""The digits, how they are dealt to devices, and the model.

The data are in digits.json, because Flower sends devices no binary files of an app. All randomness
comes from explicit seeds, so every process sees the same data.
"""

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedstale.apps import classification
from fedstale.apps.classification import Data, Index

# Each stream of random numbers has a purpose, so that no two of them coincide.
SPLIT, DEAL, SHUFFLE = range(3)


class Network(nn.Sequential):
    """A network of 64-32-10 units, for images of shape (n, 64) in [0, 1]."""

    def __init__(self, seed: int = 0) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            super().__init__(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def read_digits() -> tuple[Index, Index]:
    """Return the pixels, shape (1797, 64) in 0 to 16, and the labels, shape (1797,)."""
    digits = json.loads((Path(__file__).parent / "digits.json").read_text(encoding="utf-8"))
    pixels = [[int(level, 17) for level in image] for image in digits["images"]]
    labels = [int(label) for label in digits["labels"]]
    return np.array(pixels, dtype=np.int64), np.array(labels, dtype=np.int64)


@lru_cache(maxsize=4)
def load_data(seed: int) -> tuple[Data, Data]:
    """Return the training set and the test set, 4/5 and 1/5 of the 1797 digits.

    Images are float32 of shape (n, 64) in [0, 1].
    """
    pixels, labels = read_digits()
    order = np.random.default_rng((seed, SPLIT)).permutation(len(labels))
    images = torch.from_numpy((pixels[order] / 16).astype(np.float32))
    targets = torch.from_numpy(labels[order])
    n_test = len(labels) // 5
    return (images[n_test:], targets[n_test:]), (images[:n_test], targets[:n_test])


@lru_cache(maxsize=4096)
def client_data(partition: int, n_partitions: int, alpha: float, seed: int) -> tuple[Data, Data]:
    """Load a device's examples for training and for evaluation."""
    mine = assign(n_partitions, alpha, seed)[partition]
    return classification.held_out(load_data(seed)[0], mine)


@lru_cache(maxsize=4)
def assign(n_partitions: int, alpha: float, seed: int) -> list[Index]:
    """Return the examples of the training set that each device has."""
    labels = load_data(seed)[0][1].numpy()
    rng = np.random.default_rng((seed, DEAL))
    return classification.assign(labels, n_partitions, alpha, rng)
