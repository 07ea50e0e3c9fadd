"""Small images in the four files of Fashion-MNIST, written as its authors describe the format."""

import gzip
import struct

import numpy as np

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def idx(values, kind=8):
    """Return the bytes of an IDX file."""
    header = struct.pack(f">HBB{values.ndim}I", 0, kind, values.ndim, *values.shape)
    return header + values.astype(np.uint8).tobytes()


def drawn(n, seed):
    """Return images with a bright bar, whose height is the label, in noise; and the labels."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(n) % 10)
    images = rng.integers(0, 90, (n, 28, 28))
    for image, label in zip(images, labels, strict=True):
        image[2 * label + 3 : 2 * label + 7, 4:24] += 120
    return images, labels


def write_clothes(folder, n_train=400, n_test=110, *, packed=False):
    """Write the four files into a folder, gzipped or not."""
    folder.mkdir(exist_ok=True)
    values = (*drawn(n_train, 1), *drawn(n_test, 2))
    for name, array in zip(FILES, values, strict=True):
        raw = idx(array)
        path = folder / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(raw, mtime=0) if packed else raw)
