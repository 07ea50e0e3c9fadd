"""One copy of large data for several processes of a machine.

The arrays of a value, such as a trace set, go into one file, which every process maps into its
memory instead of reading: the pages are the same ones for all, and are loaded when they are needed.
What is left, some names and numbers, is small enough to be sent.
"""

import mmap
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

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
