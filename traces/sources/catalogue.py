"""The published recordings that fedstale reads: where they are from, and what they know.

The table is catalogue.toml: `fetch` downloads by it, `read` reads by it, and the page on traces is
compared with it.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType

from fedstale.traces.sources import aibenchmark, fedscale, flash, gnettrack, mahimahi, planetlab
from fedstale.traces.trace_set import TraceSet


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """One file as its authors publish it."""

    filename: str
    """Name to keep it under."""
    url: str
    """Where it is downloaded from."""
    size_bytes: int | None = None
    """Size, where the published file was seen."""
    sha256: str | None = None
    """Checksum, where the published file was seen; None means it is recorded at the download."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSource:
    """One kind of recording, and the published example of it."""

    name: str
    """What it is called here."""
    about: str
    """What was recorded, in a line."""
    reader: Callable[[str | Path], TraceSet]
    """Reads a file or folder of this kind."""
    channels: tuple[str, ...]
    """What the reader learns from it by default."""
    compute_unit: str | None
    """What one unit of work is; None where compute is not known."""
    origin: str
    """Authors or project, and the repository that publishes it."""
    licence: str
    """Under which terms, as stated there."""
    files: tuple[RemoteFile, ...]
    """What `fetch` downloads."""

    @property
    def licence_line(self) -> str:
        """One line to print when the recording is downloaded."""
        return f"{self.name}: {self.origin}; licence: {self.licence}"


_READERS: dict[str, tuple[Callable[[str | Path], TraceSet], str | None]] = {
    "flash": (flash.read, None),
    "gnettrack": (gnettrack.read, None),
    "mahimahi": (mahimahi.read, None),
    "planetlab": (planetlab.read, planetlab.COMPUTE_UNIT),
    "aibenchmark": (aibenchmark.read, aibenchmark.COMPUTE_UNIT),
    "fedscale_behaviour": (fedscale.read_behaviour, None),
    "fedscale_capacity": (fedscale.read_capacity, fedscale.COMPUTE_UNIT),
}
"""Reader and compute unit of each source."""


def _sources() -> dict[str, TraceSource]:
    text = (resources.files("fedstale.traces.sources") / "catalogue.toml").read_text("utf-8")
    found = {}
    for name, about in tomllib.loads(text).items():
        about["channels"] = tuple(about["channels"])
        about["files"] = tuple(RemoteFile(**file) for file in about["files"])
        reader, unit = _READERS[name]
        found[name] = TraceSource(name=name, reader=reader, compute_unit=unit, **about)
    return found


SOURCES: Mapping[str, TraceSource] = MappingProxyType(_sources())
