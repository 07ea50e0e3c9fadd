"""Files that belong to one user and to one process; every layer may import this.

What is secret, or shows what a device or a model is, is made with mode 0600 in folders with mode
0700, whatever the umask is. What others could read or change is refused with a sentence.
"""

import os
import stat
import sys
from contextlib import suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

from fedstale.errors import ConfigError

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
PRIVATE_UMASK = 0o077
"""Of a process all of whose files are private."""

_OTHERS_WRITE, _OTHERS = 0o022, 0o077


def open_private(path: str, flags: int) -> int:
    """Open a file that only its owner may read, as an `opener` of `open`.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     with open(f"{folder}/key", "w", opener=open_private) as file:
        ...         oct(os.fstat(file.fileno()).st_mode & 0o777)
        '0o600'
    """
    descriptor = os.open(path, flags, PRIVATE_FILE)
    if os.name == "posix" and os.fstat(descriptor).st_mode & _OTHERS:
        # It was there before. Some disks know no modes; then the checks say so.
        with suppress(PermissionError):
            os.fchmod(descriptor, PRIVATE_FILE)
    return descriptor


def make_private(folder: Path) -> None:
    """Make a folder that only its owner may enter, unless it exists.

    Folders that it is in are made as the umask says.

    Raises:
        OSError: it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=PRIVATE_FOLDER)
        return
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is no folder")


def exposure(path: Path, *, only_writing: bool = False) -> str:
    """Return in a sentence that others may read or change a file or folder, and what to do.

    Args:
        path: which exists.
        only_writing: whether others may read it.

    Returns:
        Empty if nobody else may, or if systemd gave the file to this service alone.
    """
    given = os.environ.get("CREDENTIALS_DIRECTORY")
    if os.name != "posix" or (given and path.resolve().is_relative_to(Path(given).resolve())):
        return ""
    mode = path.stat().st_mode
    is_folder = stat.S_ISDIR(mode)
    open_to = mode & (_OTHERS_WRITE if only_writing else _OTHERS)
    if not open_to:
        return ""
    wanted = "go-w" if only_writing else f"{PRIVATE_FOLDER if is_folder else PRIVATE_FILE:o}"
    may = "change" if mode & _OTHERS_WRITE else "enter" if is_folder else "read"
    return (
        f"{path} has mode {stat.S_IMODE(mode):04o}, and other users may {may} it: "
        f"chmod {wanted} {path}"
    )


def check_private(setting: str, path: Path, *, folder: bool = False) -> None:
    """Check that only its owner may read a file, and that nobody else may put another in its place.

    Args:
        setting: that names it.
        path: of the file; it need not exist.
        folder: whether nobody else may enter its folder either.

    Raises:
        ConfigError: others may; the text has the mode, and the chmod that mends it.
    """
    found = exposure(path) if path.is_file() else ""
    around = path.parent
    # From a folder such as /tmp, others cannot take away what is not theirs.
    if not found and around.is_dir() and (folder or not around.stat().st_mode & stat.S_ISVTX):
        found = exposure(around, only_writing=not folder)
    if found:
        raise ConfigError(f"{setting}: {found}")


def hold(descriptor: int, *, shared: bool = False, waits: bool = False) -> str | None:
    """Keep others from holding an open file or folder, until it is closed or this process ends.

    Args:
        descriptor: of the file or folder.
        shared: whether others may hold it that share it too.
        waits: whether to wait until nobody holds it who keeps this process from it.

    Returns:
        None if this process holds it now; else who does, such as "process 4133 of server-1", or
        "another process" where the system does not tell: Linux does, of processes that this one may
        see, which those of another container are not. On Windows nothing is held.
    """
    if sys.platform == "win32":
        return None
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind if waits else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        about = os.fstat(descriptor)
        device = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
        with suppress(OSError):
            for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
                # 1: FLOCK  ADVISORY  WRITE 4133 fe:00:3235927 0 EOF
                words = line.split()
                if words[1] == "FLOCK" and words[5] == device:
                    return f"process {words[4]} of {os.uname().nodename}"
        return "another process"
    return None


def is_held(path: Path) -> bool:
    """Return whether a process holds a file; False if there is none."""
    try:
        with path.open(encoding="utf-8") as file:
            return hold(file.fileno(), shared=True) is not None
    except OSError:
        return False
