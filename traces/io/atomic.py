"""Files that are replaced whole or not at all, by every part of fedstale that writes one."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

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
