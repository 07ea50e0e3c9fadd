"""Where fitted numbers come from: files, checksums, the command and the day."""

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedstale import __version__


def of_fit(files: Mapping[str, Sequence[Path]]) -> dict[str, Any]:
    """Return the provenance of a fit.

    Args:
        files: the recordings of each part; folders are listed file by file.

    Returns:
        A table for TOML. Files are named without their folders, so that it says nothing of the
        machine it was made on.
    """
    options = [
        f"--{part} {shlex.quote(path.name)}" for part, paths in files.items() for path in paths
    ]
    return {
        "command": " ".join(["fedstale traces fit", *options]),
        "date": datetime.now(UTC).date().isoformat(),
        "version": __version__,
        "files": [
            {"part": part, "name": name, "sha256": checksum}
            for part, paths in files.items()
            for path in paths
            for name, checksum in _checksums(path)
        ],
    }


def _checksums(path: Path) -> list[tuple[str, str]]:
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.is_file())
        return [(f"{path.name}/{p.relative_to(path).as_posix()}", _sha256(p)) for p in inside]
    return [(path.name, _sha256(path))]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
