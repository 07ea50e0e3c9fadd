"""The images, how they are dealt to devices, and the model.

All randomness comes from explicit seeds, so every process deals alike.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from fashion_app import idx
from fedstale.apps import classification
from fedstale.apps.classification import Data, Index

# Each stream of random numbers has a purpose, so that no two of them coincide.
DEAL, SHUFFLE = range(2)

load_data = lru_cache(maxsize=2)(idx.read_folder)


class Network(nn.Sequential):
    """Two convolutions of 8 and 16 channels, each of which halves the image, and a linear layer.

    9,098 weights. Strides take the place of pooling, for speed.
    """

    def __init__(self, seed: int = 0) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            super().__init__(
                nn.Conv2d(1, 8, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(8, 16, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(16 * 7 * 7, idx.N_LABELS),
            )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (n, 10) for images, uint8 of shape (n, 28, 28)."""
        return super().forward(images.unsqueeze(1) / 255)  # type: ignore[no-any-return]


def client_data(
    partition: int, n_partitions: int, *, data: str, alpha: float, seed: int
) -> tuple[Data, Data]:
    """Load a device's examples for training and for evaluation."""
    mine = assign(n_partitions, data, alpha, seed)[partition]
    return classification.held_out(load_data(data)[0], mine)


@lru_cache(maxsize=4)
def assign(n_partitions: int, data: str, alpha: float, seed: int) -> list[Index]:
    """Return the examples of the training set that each device has."""
    labels = load_data(data)[0][1].numpy()
    rng = np.random.default_rng((seed, DEAL))
    return classification.assign(labels, n_partitions, alpha, rng)
