"""Which kind of trace a file or folder is, told by its name and its first bytes; and its reader."""

import zipfile
from pathlib import Path

from fedstale.errors import TraceError
from fedstale.traces.sources import mahimahi, planetlab
from fedstale.traces.sources.archives import head, is_tar, names
from fedstale.traces.sources.catalogue import SOURCES
from fedstale.traces.trace_set import TraceSet

NATIVE = "native"
_ACCEPTED = """accepted are
  native             a .parquet file written by fedstale
  flash              ready_strict.json
  gnettrack          a G-NetTrack CSV, a folder or a zip of them
  mahimahi           NAME.up and NAME.down, plain or gzipped, or a folder of them
  planetlab          a tar.gz, zip or folder of DAY/HOST, or one host file in a folder named DAY
  aibenchmark        AI Benchmark's JSON list of phones
  fedscale_behaviour client_behave_trace
  fedscale_capacity  client_device_capacity"""


def kind_of(path: Path) -> str:
    """Return the name of the source that a path is of, or "native".

    Raises:
        TraceError: there is no such path, or it is of no kind that is known.
    """
    if not path.exists():
        raise TraceError(f"{path}: no such file or folder")
    kind = _of_folder(path) if path.is_dir() else _of_file(path)
    if kind is None:
        raise TraceError(f"{path}: not a trace of a known kind; {_ACCEPTED}")
    return kind


def _of_folder(path: Path) -> str | None:
    if any(mahimahi.parts(p) for p in path.iterdir() if p.is_file()):
        return "mahimahi"
    return _of_names([f"{path.absolute().name}/{name}" for name in names(path)])


def _of_names(inside: list[str]) -> str | None:
    if any(name.lower().endswith(".csv") for name in inside):
        return "gnettrack"
    if any(planetlab.HOST.search(name) for name in inside):
        return "planetlab"
    return None


def _of_file(path: Path) -> str | None:
    if mahimahi.parts(path):
        return "mahimahi"
    start = head(path)
    if start.startswith(b"PAR1") or path.suffix == ".parquet":
        return NATIVE
    if zipfile.is_zipfile(path) or is_tar(path):
        return _of_names(list(names(path)))
    if planetlab.HOST.search(path.absolute().as_posix()):
        return "planetlab"
    return _of_content(start)


def _of_content(start: bytes) -> str | None:
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"{"):
        return "flash"
    if text.startswith(b"["):
        return "aibenchmark"
    if b"DL_bitrate" in text.split(b"\n")[0]:
        return "gnettrack"
    if b"finish_time" in start:
        return "fedscale_behaviour"
    return "fedscale_capacity" if b"computation" in start else None


def read(path: Path, source: str | None = None) -> TraceSet:
    """Return the traces in a file or folder; see `TraceSet.read`."""
    kind = kind_of(path) if source is None else source
    if kind == NATIVE:
        # Only here, so that reading a published recording does not load pyarrow.
        from fedstale.traces.io.parquet import read as read_native  # noqa: PLC0415

        return read_native(path)
    if kind not in SOURCES:
        raise TraceError(f"source = {kind!r}: expected {NATIVE!r} or one of {', '.join(SOURCES)}")
    return SOURCES[kind].reader(path)
