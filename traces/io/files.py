"""Files that are replaced whole or not at all, and files that several processes map.

The arrays of a value, such as a trace set, go into one file, which every process maps into its
memory instead of reading: the pages are the same ones for all, and are loaded when they are needed.
What is left, some names and numbers, is small enough to be sent.
"""

import mmap
import os
import pickle
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from fedstale.files import open_private


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """Give a file to write that takes the place of a path once it is whole and on the disk.

    The file is written beside its target as .NAME.RANDOM.part, flushed to the disk and renamed. If
    anything goes wrong, the target stays as it was and the part is removed.

    Args:
        path: what to make or replace; its folder exists.
        private: whether only its owner may read it; else it has the mode that the umask says.

    Raises:
        OSError: the disk is full, or the folder is missing or not writable.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder) / "notes.txt"
        ...     with replacing(path) as file:
        ...         size = file.write(b"whole")
        ...     path.read_text()
        'whole'
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with open(part, "xb", opener=open_private if private else None) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    if os.name == "posix":
        # A new name is safe only once its folder is; Windows cannot open folders, and need not.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


T = TypeVar("T")

_ALIGNED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared(Generic[T]):
    """A value whose arrays are in a file; made by `share`, and sent to other processes."""

    path: Path
    """The file; the process that made it removes it."""
    places: tuple[tuple[int, int], ...]
    """Where each array begins and ends, in bytes."""
    rest: bytes
    """Everything else; pickled, as all that processes of one program send to each other."""

    def open(self) -> T:
        """Return the value, with arrays that cannot be written to."""
        with self.path.open("rb") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        arrays = [mapped[begin:end] for begin, end in self.places]
        value: T = pickle.loads(self.rest, buffers=arrays)
        return value


def share(value: T, path: Path) -> Shared[T]:
    """Write the arrays of a value into a file, and return what other processes need.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from fedstale.traces import TraceSet
        >>> with TemporaryDirectory() as folder:
        ...     shared = share(TraceSet.ideal(3), Path(folder) / "traces")
        ...     shared.open().n_devices
        3
    """
    buffers: list[pickle.PickleBuffer] = []
    rest = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    places = []
    with path.open("wb") as file:
        for buffer in buffers:
            file.write(bytes(-file.tell() % _ALIGNED))
            begin = file.tell()
            file.write(buffer.raw())
            places.append((begin, file.tell()))
        # Nothing can be mapped from an empty file.
        file.write(bytes(_ALIGNED))
    return Shared(path=path, places=tuple(places), rest=rest)
