"""One copy of large traces for several processes of a machine.

The arrays of a trace set go into one file, which every process maps into its memory instead of
reading: the pages are the same ones for all, and are loaded when they are needed. What is left,
some names and numbers, is small enough to be sent.
"""

import io
import mmap
import pickle
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedstale.traces.trace_set import TraceSet

_ALIGNED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTraces:
    """A trace set whose arrays are in a file; made by `share`, and sent to other processes."""

    path: Path
    """The file; whoever made it removes it."""
    places: tuple[tuple[int, int], ...]
    """Where each array begins and ends, in bytes."""
    rest: bytes
    """Everything else; pickled, as all that processes of one program send to each other."""

    def open(self) -> TraceSet:
        """Return the traces, with arrays that cannot be written to."""
        with self.path.open("rb") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        arrays = [mapped[begin:end] for begin, end in self.places]
        traces: TraceSet = pickle.loads(self.rest, buffers=arrays)
        return traces


def share(traces: TraceSet, path: Path) -> SharedTraces:
    """Write the arrays of a trace set into a file, and return what other processes need.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     shared = share(TraceSet.ideal(3), Path(folder) / "traces")
        ...     shared.open().n_devices
        3
    """
    buffers: list[pickle.PickleBuffer] = []
    rest = io.BytesIO()
    _Pickler(rest, protocol=5, buffer_callback=buffers.append).dump(traces)
    places = []
    with path.open("wb") as file:
        for buffer in buffers:
            file.write(bytes(-file.tell() % _ALIGNED))
            begin = file.tell()
            file.write(buffer.raw())
            places.append((begin, file.tell()))
        # Nothing can be mapped from an empty file.
        file.write(bytes(_ALIGNED))
    return SharedTraces(path=path, places=tuple(places), rest=rest.getvalue())


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:  # noqa: ANN401 - as pickle has it
        # Notes of a trace set cannot be written to, and Python pickles no such view.
        if isinstance(value, MappingProxyType):
            return _view, (dict(value),)
        return NotImplemented


def _view(notes: dict[str, int]) -> MappingProxyType[str, int]:
    return MappingProxyType(notes)
