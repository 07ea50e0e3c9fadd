"""Files that travel: apps and traces once to each machine, and the folder of a run there and back.

What many runs need lies in Ray's object store, and is unpacked on a machine once, into a folder
whose name is a checksum of what is in it. A process that uses such a folder holds a lock on it;
folders that nobody holds, as those of a node that was killed, go when the next process comes.
"""

import hashlib
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
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
    digest: str
    """Checksum of names and contents."""
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
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return Bundle(name=path.resolve().name, digest=digest, data=ray.put(data))


def packed(path: Path, *, of_app: bool = False) -> bytes:
    """Return an archive of a file or folder; the same contents give the same bytes.

    Args:
        path: of the file or folder.
        of_app: whether hidden files, caches and folders of results stay behind.
    """
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, source in sorted(_files(path, of_app=of_app)):
            about = tar.gettarinfo(source, arcname=name)
            about.mtime, about.uid, about.gid, about.uname, about.gname = 0, 0, 0, "", ""
            if source.is_dir():
                tar.addfile(about)
            else:
                with source.open("rb") as file:
                    tar.addfile(about, file)
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


class NodeStore:
    """Folders on a machine that hold what was sent to it, each for as long as processes use it."""

    def __init__(self) -> None:
        """Use the temporary folder of this user, and remove there what nobody uses.

        Raises:
            ConfigError: another user may write into the folder.
        """
        self._base = Path(tempfile.gettempdir()) / f"fedstale-nodes-{os.getuid()}"
        make_private(self._base)
        if self._base.stat().st_uid != os.getuid() or exposure(self._base):
            raise ConfigError(f"{self._base} belongs to others: remove it, or set TMPDIR")
        self._held = ExitStack()
        for lock in self._base.glob("*.lock"):
            self._sweep(lock)

    def place(self, sent: Bundle) -> Path:
        """Return where a file or folder is, unpacked if this machine does not have it yet."""
        folder = self._base / sent.digest
        self._hold(folder)
        with (self._base / f"{sent.digest}.making").open("w", encoding="ascii") as making:
            hold(making.fileno(), waits=True)
            if not folder.is_dir():
                import ray  # noqa: PLC0415 - an extra

                made = self.own_folder() / "content"
                unpack(ray.get(sent.data), made)
                made.rename(folder)
        return folder / sent.name

    def own_folder(self) -> Path:
        """Return a new folder for this process alone."""
        folder = Path(tempfile.mkdtemp(dir=self._base, prefix="work-"))
        self._hold(folder)
        return folder

    def close(self) -> None:
        """Remove what no other process uses."""
        self._held.close()
        for lock in self._base.glob("*.lock"):
            self._sweep(lock)

    def _hold(self, folder: Path) -> None:
        path = folder.with_name(f"{folder.name}.lock")
        while True:
            lock = path.open("w", encoding="ascii")
            hold(lock.fileno(), shared=True, waits=True)
            # Who swept it in between has removed the file that is locked now.
            if path.exists() and path.stat().st_ino == os.fstat(lock.fileno()).st_ino:
                self._held.callback(lock.close)
                return
            lock.close()

    def _sweep(self, lock: Path) -> None:
        with suppress(OSError), lock.open(encoding="ascii") as file:
            if hold(file.fileno()) is None:
                shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
                lock.with_suffix(".making").unlink(missing_ok=True)
                lock.unlink(missing_ok=True)


def _files(path: Path, *, of_app: bool) -> Iterator[tuple[str, Path]]:
    """Yield all files below a path with their names in an archive, and folders that are empty."""
    root = path.resolve()
    if root.is_file():
        yield root.name, root
        return
    seen: set[tuple[int, int]] = set()
    for folder, inner, names in os.walk(root, followlinks=True):
        here = Path(folder)
        about = here.stat()
        if (about.st_dev, about.st_ino) in seen:
            # A link to where we come from.
            inner.clear()
            continue
        seen.add((about.st_dev, about.st_ino))
        if of_app:
            top = _RESULTS if here == root else set()
            inner[:] = [
                name
                for name in inner
                if not name.startswith(".")
                and not name.endswith(".egg-info")
                and name not in _LEFT_OUT | top
            ]
        kept = [name for name in names if not (of_app and name.startswith("."))]
        relative = PurePosixPath(root.name) / here.relative_to(root).as_posix()
        if not inner and not kept:
            yield str(relative), here
        for name in kept:
            if (here / name).is_file():
                yield str(relative / name), (here / name).resolve()


def _in_order(folder: Path, *, first: str, last: str) -> list[str]:
    """Return the names in a folder, but for that of its lock."""
    names = sorted(path.name for path in folder.iterdir() if path.name != LOCK)
    return sorted(names, key=lambda name: (name == last) - (name == first))
