"""What a run must not lose, in one file: arrays and plain values, with a checksum.

A checkpoint is written under another name, flushed to the disk and renamed, and the one before it
is kept too, so that a crash at any moment leaves a whole one. The file is safetensors; everything
that is no array is JSON in its header. Nothing in it is ever executed.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import struct
import time
from collections.abc import Callable, Mapping
from errno import EDQUOT, EIO, ENOSPC
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save_file

from fedstale.errors import ConfigError, ResumeError
from fedstale.files import exposure, hold, make_private
from fedstale.strategies.server.runtime import Checkpointer
from fedstale.strategies.types import Array, Checked, Count, State, Whole

logger = logging.getLogger(__name__)

FORMAT = 12
SUFFIX = ".checkpoint"

_HELD: set[tuple[int, int]] = set()  # device and inode of the folders that this process holds

_KEPT = 2
_SPACE_S = 5.0
_ERROR = re.compile(r"os error (\d+)")


class Checkpoints(Checked, Checkpointer):
    """The files of a run: checkpoints, and model versions for which memory has no room.

    One checkpoint every few versions is written into a folder, and the last two are kept, for their
    owner only. The folder is held until the process ends, even by kill -9: two runs that go on from
    the same checkpoints would undo each other's versions. A folder to resume is held likewise.

    A run that goes on has lost the jobs in flight, and their devices are free. Strategy, seed,
    model and exchangeable parts must be those that wrote the checkpoint; another setting is logged
    as a warning. If the folder to resume is this one, and no version is in it yet, the run begins
    anew: so the same settings start a run and resume it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Checkpoints(folder).keep(3, lambda: {"w": np.zeros(2), "version": 3})
        ...     read_checkpoint(folder)
        {'w': array([0., 0.]), 'version': 3}
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        every: Count = 1,
        version_memory_bytes: Annotated[Whole, "a whole number of bytes >= 0"] | None = None,
        is_held: bool = False,
    ) -> None:
        """Write into a folder, which is made if it does not exist.

        Args:
            folder: where; checkpoints of an earlier run in it are replaced as new ones come. None
                keeps none.
            every: versions from one checkpoint to the next, >= 1.
            version_memory_bytes: memory that model versions in flight may take together, the
                current one included, >= 0; past it the oldest ones wait on disk, in the folder or
                else the system's temporary folder (TMPDIR), in files that vanish with the process.
                None for no limit. Results are the same to the last bit.
            is_held: whether whoever calls keeps other processes out already, and for less long.

        Raises:
            ConfigError: a setting is out of range, the folder cannot be made, another process
                holds it, or other users may write into it.
        """
        self.folder = None if folder is None else Path(folder)
        self.every = every
        self.version_memory_bytes = version_memory_bytes
        if self.folder is None:
            return
        try:
            make_private(self.folder)
        except OSError as problem:
            raise ConfigError(
                f"checkpoints = {str(folder)!r} cannot be made: {problem.strerror}"
            ) from None
        if not is_held:
            _hold(self.folder, "checkpoints")

    def to_resume(self, path: Path | None) -> State | None:
        """Return the state to go on from, and hold its folder; None to begin anew.

        Raises:
            ConfigError: another process holds it: a run goes on, and would be done twice; or other
                users may write there.
            ResumeError: there is none, or it is damaged.
        """
        if path is None:
            return None
        folder = path if path.is_dir() else path.parent
        if folder.is_dir():
            _hold(folder, "resume")
            is_own = self.folder is not None and path.is_dir() and self.folder.samefile(path)
            if is_own and not _found(folder):
                logger.info("no checkpoint is in %s yet: the run begins anew", folder)
                return None
        return read_checkpoint(path)

    def is_due(self, version: int) -> bool:
        """Return whether a version is one of those that are kept."""
        return self.folder is not None and version % self.every == 0

    def keep(self, version: int, state: Callable[[], State]) -> None:
        """Write a checkpoint; one that cannot be written is logged, and training goes on.

        For space on the disk it waits: a run that went on would lose versions when it is killed.
        """
        assert self.folder is not None, "it is due"
        for torn in self.folder.glob(f".*{SUFFIX}.*.part"):  # of a process that was killed
            torn.unlink(missing_ok=True)
        path = self.folder / f"{version:09d}{SUFFIX}"
        try:
            _write_when_there_is_space(path, state())
        except OSError as problem:
            logger.error(
                "no checkpoint of version %d in %s: %s; the last good one stays",
                *(version, self.folder, problem.strerror),
            )
            return
        files = _found(self.folder)
        last = files.index(path) + 1
        # Later versions are of an earlier run, which this one does not go on from.
        for other in (*files[: max(last - _KEPT, 0)], *files[last:]):
            other.unlink(missing_ok=True)

    def __repr__(self) -> str:
        folder = None if self.folder is None else str(self.folder)
        limit = self.version_memory_bytes
        text = "" if limit is None else f", version_memory_bytes={limit}"
        return f"Checkpoints({folder!r}, every={self.every}{text})"


def write_checkpoint(path: Path, state: State) -> None:
    """Write a state so that the file is whole or not there; arrays are not copied.

    Raises:
        OSError: the disk is full, or the folder is not writable; no file is left behind.
    """
    # A device, which imports strategies too, needs no pandas, as traces do.
    from fedstale.traces.io import replacing  # noqa: PLC0415

    arrays, about = _flattened(state)
    with replacing(path, private=True) as file:
        try:
            save_file(arrays, file.name, about)
        except SafetensorError as problem:
            number = _ERROR.search(str(problem))
            raise OSError(int(number[1]) if number else EIO, str(problem)) from None


def _write_when_there_is_space(path: Path, state: State) -> None:
    """Write a state, and wait while the disk is full; the log has a line for it.

    Raises:
        OSError: the folder is not writable.
    """
    is_told = False
    while True:
        try:
            write_checkpoint(path, state)
            break
        except OSError as problem:
            if problem.errno not in {ENOSPC, EDQUOT}:
                raise
            if not is_told:
                free = shutil.disk_usage(path.parent).free / 1e6
                logger.error(
                    "no space for checkpoint %s in %s, where %.1f MB are free (%s): the run waits "
                    "until there is",
                    *(path.name, path.parent, free, problem.strerror),
                )
            is_told = True
            time.sleep(_SPACE_S)
    if is_told:
        logger.warning("checkpoint %s is written, and the run goes on", path.name)


def read_checkpoint(path: str | Path) -> State:
    """Return the state in a file, or the latest whole one in a folder.

    Raises:
        ResumeError: there is none, or it is damaged.
    """
    path = Path(path)
    if not path.is_dir():
        return _read(path)
    files = _found(path)
    for file in reversed(files):
        try:
            return _read(file)
        except ResumeError as problem:
            logger.warning("%s", problem)
    raise ResumeError(
        f"resume = {str(path)!r} holds no whole checkpoint (files *{SUFFIX}: {len(files)}): "
        "expected a folder that a run has written checkpoints into"
    )


def _flattened(state: State) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the arrays of a state by number, and the JSON with their places."""
    arrays: dict[str, Array] = {}

    def taken(value: Any) -> Any:
        """Encode a value in JSON, where each object has one key, its kind."""
        if isinstance(value, np.ndarray):
            # Model arrays may have any name: files number them.
            arrays[f"{len(arrays):06d}"] = np.ascontiguousarray(value).reshape(value.shape)
            return {"array": f"{len(arrays) - 1:06d}"}
        if isinstance(value, Mapping):
            return {"dict": [[taken(key), taken(inner)] for key, inner in value.items()]}
        if isinstance(value, tuple):
            return {"tuple": [taken(inner) for inner in value]}
        if isinstance(value, list):
            return [taken(inner) for inner in value]
        return value.item() if isinstance(value, np.generic) else value

    text = json.dumps(taken(state))
    about = {"format": FORMAT, "checksum": _checksum(text, arrays), "state": text}
    # One entry: safetensors writes several in any order, and equal states make equal files.
    return arrays, {"about": json.dumps(about)}


def unpacked(data: bytes) -> State:
    """Return the state in the bytes of a file.

    Raises:
        ResumeError: they are no checkpoint, one of another format, or damaged.
    """
    try:
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])["__metadata__"]
        about = json.loads(header["about"]) if "about" in header else header
        version, text, checksum = about["format"], about["state"], about["checksum"]
        arrays = load(data)
    except Exception as problem:  # whatever a torn header leads to
        raise ResumeError(f"no checkpoint, or a damaged one ({type(problem).__name__})") from None
    if version != FORMAT:
        raise ResumeError(f"a checkpoint of format {version}: this release reads {FORMAT}")
    if checksum != _checksum(text, arrays):
        raise ResumeError("a damaged checkpoint: its checksum does not match")

    def given(value: Any) -> Any:
        if isinstance(value, list):
            return [given(inner) for inner in value]
        if not isinstance(value, dict):
            return value
        ((kind, inner),) = value.items()
        if kind == "array":
            return arrays[inner]
        if kind == "tuple":
            return tuple(map(given, inner))
        return {given(key): given(one) for key, one in inner}

    try:
        state: State = given(json.loads(text))
    except (ValueError, LookupError, TypeError, RecursionError) as problem:
        raise ResumeError(f"a damaged checkpoint ({type(problem).__name__})") from None
    return state


def _checksum(text: str, arrays: Mapping[str, Any]) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _hold(folder: Path, setting: str) -> None:
    """Keep other processes from a folder of checkpoints, for as long as this one lives.

    Args:
        folder: which exists.
        setting: that names it.

    Raises:
        ConfigError: another process holds it, it cannot be held, or other users may write into it.
    """
    if open_to := exposure(folder, only_writing=True):
        raise ConfigError(f"{setting} = {str(folder)!r}: {open_to}")
    try:
        descriptor = os.open(folder.resolve(), os.O_RDONLY)
        about = os.fstat(descriptor)
        if (about.st_dev, about.st_ino) in _HELD:
            os.close(descriptor)
            return
        owner = hold(descriptor)
    except OSError as problem:
        # Another user's, or on a disk that has no locks.
        raise ConfigError(
            f"{setting} = {str(folder)!r} cannot be held: {problem.strerror}"
        ) from None
    if owner is not None:
        os.close(descriptor)
        raise ConfigError(
            f"{setting} = {str(folder)!r} is in use by a run that goes on in {owner}: wait for it, "
            "stop it (flwr stop), or choose another folder"
        )
    _HELD.add((about.st_dev, about.st_ino))
    if open_to := exposure(folder):
        logger.warning("%s: %s", setting, open_to)


def _found(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def _read(path: Path) -> State:
    try:
        return unpacked(path.read_bytes())
    except OSError as problem:
        raise ResumeError(f"resume = {str(path)!r} cannot be read: {problem.strerror}") from None
    except ResumeError as problem:
        raise ResumeError(f"resume = {str(path)!r}: {problem}") from None
