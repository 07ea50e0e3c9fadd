"""Files that travel: apps and traces once to each machine, and the folder of a run there and back.

What many runs need lies in Ray's object store, which brings it to a machine once; each worker
unpacks it into a temporary folder of its own, which it holds. Folders that nobody holds, as those
of a node that was killed, go when the next process comes.
"""

import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fedstale.errors import ConfigError
from fedstale.files import exposure, hold, make_private
from fedstale.runs import CHECKPOINTS, CONFIG, LOCK, SUMMARY

_RESULTS = {"runs", "comparisons", "tunings"}
"""Folders beside an app into which commands write by default."""
_LEFT_OUT = {"__pycache__", "node_modules", "venv"}
_MOST = 1 << 30
_MODES = 0o777


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A file or folder in Ray's object store."""

    name: str
    """Of the file or folder; what a recording is, its name tells."""
    data: Any
    """Reference to the bytes of an archive."""


Bundles = Mapping[str, Bundle]
"""What runs need, by the name that their settings have for it; what a node has anyway is not in."""


def send(path: Path, *, of_app: bool) -> Bundle:
    """Put a file or folder into the object store of the cluster that is joined.

    Args:
        path: of the file or folder.
        of_app: as of `packed`.

    Raises:
        ConfigError: an app is too large to be sent.
    """
    import ray  # noqa: PLC0415 - an extra

    data = packed(path, of_app=of_app)
    if of_app and len(data) > _MOST:
        raise ConfigError(
            f"app = {str(path)!r} has {len(data) / 1e9:.1f} GB, which is too much to be sent: "
            "expected at most 1 GB; put data elsewhere, on every node"
        )
    return Bundle(name=path.resolve().name, data=ray.put(data))


def packed(path: Path, *, of_app: bool = False) -> bytes:
    """Return an archive of a file or folder, in which links are what they lead to.

    Args:
        path: of the file or folder.
        of_app: whether hidden files, caches and folders of results stay behind.
    """
    root, seen, archive = path.resolve(), set[tuple[int, int]](), io.BytesIO()

    def is_sent(name: str) -> bool:
        return not (of_app and (name.startswith(".") or name.endswith(".egg-info")))

    with tarfile.open(fileobj=archive, mode="w", dereference=True) as tar:
        tar.add(root, arcname=root.name, recursive=False)
        for folder, inner, names in os.walk(root, followlinks=True):
            here, about = Path(folder), os.stat(folder)
            left = (_LEFT_OUT | (_RESULTS if here == root else set())) if of_app else set()
            inner[:] = [name for name in inner if is_sent(name) and name not in left]
            if (about.st_dev, about.st_ino) in seen:
                # A link to where we come from.
                inner.clear()
                continue
            seen.add((about.st_dev, about.st_ino))
            for name in (*inner, *filter(is_sent, names)):
                if (here / name).exists():
                    own = PurePosixPath(root.name) / (here / name).relative_to(root).as_posix()
                    tar.add(here / name, arcname=str(own), recursive=False)
    return archive.getvalue()


def packed_run(folder: Path, *, goes_on: bool = False) -> bytes:
    """Return an archive of a run's folder.

    Args:
        folder: of the run.
        goes_on: whether a process writes to it now; then only what the run can go on from.

    Raises:
        OSError: a file has just been replaced.
    """
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            is_wanted = not goes_on or name.parts[0] in (CONFIG, CHECKPOINTS)
            if is_wanted and name.parts[0] != LOCK and not name.name.endswith(".part"):
                tar.add(path, arcname=name.as_posix(), recursive=False)
    return archive.getvalue()


def unpack(data: bytes, folder: Path) -> None:
    """Unpack an archive into an empty folder, which is made; nothing comes to lie outside of it."""

    def plain(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        found = tarfile.data_filter(member, path)
        if found is None or not (found.isreg() or found.isdir()):
            return None
        # Checkpoints are for their owner only.
        return found.replace(mode=member.mode & _MODES, deep=False)

    folder.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extractall(folder, filter=plain)


def put_back(data: bytes, folder: Path) -> None:
    """Replace the files of a run's folder by those that a node has sent.

    Whatever ends this leaves a folder that the run can go on from: the settings go last and come
    first, and the summary, which says that a run is over, goes first and comes last.
    """
    incoming = folder.parent / f".{folder.name}.incoming"
    shutil.rmtree(incoming, ignore_errors=True)
    unpack(data, incoming)
    for name in _in_order(folder, first=SUMMARY, last=CONFIG):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in _in_order(incoming, first=CONFIG, last=SUMMARY):
        (incoming / name).replace(folder / name)
    incoming.rmdir()


def placed(sent: Bundle, folder: Path) -> Path:
    """Unpack a file or folder below a folder of this process, unless it has been; return it."""
    import ray  # noqa: PLC0415 - an extra

    content = folder / "sent" / sent.data.hex()
    if not content.is_dir():
        unpack(ray.get(sent.data), content)
    return content / sent.name


@contextmanager
def own_folder() -> Iterator[Path]:
    """Make a temporary folder of this process on a node, and remove those of killed ones.

    Raises:
        ConfigError: another user may write into the folder around it.
    """
    base = Path(tempfile.gettempdir()) / f"fedstale-nodes-{os.getuid()}"
    make_private(base)
    if base.stat().st_uid != os.getuid() or exposure(base):
        raise ConfigError(f"{base} belongs to others: remove it, or set TMPDIR")
    # While this process holds the base, no other takes its folder for that of a killed one.
    with _opened(base) as around:
        hold(around, waits=True)
        for left in base.iterdir():
            # One whose process ends just now removes it itself.
            with suppress(FileNotFoundError), _opened(left) as descriptor:
                if hold(descriptor) is None:
                    shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(dir=base))
        own = os.open(folder, os.O_RDONLY)
        hold(own)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(own)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _in_order(folder: Path, *, first: str, last: str) -> list[str]:
    """Return the names in a folder, but for that of its lock."""
    names = sorted(path.name for path in folder.iterdir() if path.name != LOCK)
    return sorted(names, key=lambda name: (name == last) - (name == first))
