"""Model arrays on disk that are read like arrays in memory.

The file has no name: it is unlinked as soon as it is open, so the system frees its space with the
last array on it, and no end of the process, not even kill -9, leaves it behind. Nobody else reads
it, and it has no format: arrays one after the other, each at a multiple of 64 bytes.
"""

import mmap
import tempfile
from pathlib import Path

import numpy as np

from fedstale.strategies.arrays import Model

_ALIGNED = 64


def stored(model: Model, folder: Path) -> Model:
    """Return the same arrays, read-only and mapped from an unnamed file.

    Args:
        model: C-contiguous arrays of any shapes and dtypes.
        folder: where the file is; a folder in memory (tmpfs) saves no memory.

    Returns:
        Arrays with the same names, bytes, shapes and dtypes. Their pages are read when they are
        used, and the system takes them back when it needs memory. The file is open until the last
        of them is gone.

    Raises:
        OSError: the disk is full, the folder is not writable, or too many files are open; what was
            written is gone.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     stored({"w": np.arange(3)}, Path(folder))
        {'w': array([0, 1, 2])}
    """
    offsets = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for array in model.values():
            offsets.append(file.seek(-(-file.tell() // _ALIGNED) * _ALIGNED))
            rest = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            while rest:
                rest = rest[file.write(rest) :]
        if file.tell() == 0:
            return model
        data = mmap.mmap(file.fileno(), file.tell(), access=mmap.ACCESS_READ)
    return {
        name: np.ndarray(array.shape, array.dtype, data, offset) if array.size else array
        for (name, array), offset in zip(model.items(), offsets, strict=True)
    }


def check_writable(folder: Path) -> None:
    """Raise unless files can be made in a folder.

    Raises:
        OSError: they cannot.
    """
    with tempfile.TemporaryFile(dir=folder):
        pass
