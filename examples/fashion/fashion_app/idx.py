"""Fashion-MNIST out of its authors' four files, which are in the IDX format of MNIST.

An IDX file holds two bytes 0, a byte for the type of the values (8: unsigned bytes), the number of
axes, the length of each axis as a big-endian uint32, and the values.

Reference:
    Xiao, Rasul, Vollgraf. Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
    Algorithms. 2017.
"""

import math
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fedstale.apps.classification import Data
from fedstale.errors import ConfigError, TraceError
from fedstale.traces.sources import read_file

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the files."""
SIDE = 28
"""Pixels of an image in a row and in a column."""
N_LABELS = 10
MOST_EXAMPLES = 100_000
"""In a file; the authors' hold 60,000 and 10,000."""

_UNSIGNED_BYTES = 8


def read_folder(data: str) -> tuple[Data, Data]:
    """Return the training set and the test set.

    Images are uint8 of shape (n, 28, 28), labels int64 of shape (n,) in 0 to 9.

    Args:
        data: folder of the four files, each plain or as .gz; empty takes that of Debian.

    Raises:
        ConfigError: a file is missing, is not in the format, or does not fit the others.
    """
    train, test = (_examples(data, name) for name in ("train", "t10k"))
    return train, test


def _examples(data: str, name: str) -> Data:
    """Return the images and labels of one half, "train" or "t10k"."""
    try:
        images = read_idx(_find(data, f"{name}-images-idx3-ubyte"), SIDE, SIDE)
        labels = read_idx(_find(data, f"{name}-labels-idx1-ubyte"))
    except TraceError as problem:
        raise ConfigError(f"data = {data!r}: {problem}") from None
    if len(images) != len(labels):
        raise ConfigError(
            f"data = {data!r}: {name} has {len(images)} images and {len(labels)} labels: "
            "expected as many of both"
        )
    if labels.max() >= N_LABELS:
        raise ConfigError(
            f"data = {data!r}: {name} has a label {labels.max()}: expected 0 to {N_LABELS - 1}"
        )
    return torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))


def _find(data: str, name: str) -> Path:
    folder = Path(data) if data else DEBIAN
    for path in (folder / name, folder / f"{name}.gz"):
        if os.path.exists(path):  # Path.exists raises for names that are too long
            return path
    raise ConfigError(
        f"data = {data!r}: no {name} or {name}.gz in {folder}: install Debian's package "
        "dataset-fashion-mnist, or pass --run-config 'data=\"FOLDER\"' with a folder of the four "
        "files of Fashion-MNIST"
    )


def read_idx(path: Path, *each: int) -> npt.NDArray[np.uint8]:
    """Return the values of an IDX file of unsigned bytes, plain or gzipped.

    Args:
        path: of the file.
        each: shape of one example, such as 28, 28; nothing for labels.

    Returns:
        An array of shape (n, *each), 1 <= n <= MOST_EXAMPLES.

    Raises:
        TraceError: the file cannot be read, is larger than so many examples, is not in the format
            or has another shape.
    """
    magic = bytes([0, 0, _UNSIGNED_BYTES, 1 + len(each)])
    begin = 4 * (2 + len(each))
    raw = read_file(path, begin + MOST_EXAMPLES * math.prod(each))
    shape = tuple(int(n) for n in np.frombuffer(raw[4:begin].ljust(begin - 4, b"\0"), ">u4"))
    if raw[:4] != magic or shape[1:] != each or shape[0] < 1:
        expected = ", ".join(["n", *map(str, each)])
        raise TraceError(
            f"{path}: begins with {raw[:begin].hex(' ', 4)}: expected IDX of unsigned bytes with "
            f"axes ({expected}), which begins with {magic.hex()}"
        )
    if len(raw) - begin != math.prod(shape):
        raise TraceError(
            f"{path}: holds {len(raw) - begin} values: expected {math.prod(shape)}, as its header "
            "says; it is truncated or damaged"
        )
    return np.frombuffer(raw, np.uint8, offset=begin).reshape(shape).copy()
