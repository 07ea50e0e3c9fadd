"""Bytes and JSON out of files, folders, zip and tar archives that other projects published.

Nothing is ever extracted to disk. Sizes are counted while unpacking, because the sizes that an
archive states are as little to be trusted as the rest of it.
"""

import gzip
import io
import json
import lzma
import math
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Self, TypeAlias

from fedstale.errors import TraceError

_CHUNK = 1 << 20


MOST_FILES = 500_000
"""In an archive or a folder."""
MOST_BYTES = 512 << 20
"""Of one file, unpacked."""
MOST_BYTES_IN_ALL = 2 << 30
"""Of all files of an archive or a folder, unpacked."""

_Stream: TypeAlias = IO[bytes] | io.BufferedIOBase
_Entry: TypeAlias = tuple[str, Callable[[], _Stream]]
"""Name of a file, and what opens it."""

_DAMAGED = (
    *(EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zipfile.BadZipFile),
    tarfile.TarError,
)

# JSON may name the halves of a character one by one; a half alone is no text that can be stored.
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


@contextmanager
def opening(path: Path) -> Iterator[None]:
    """Turn every way in which a file can fail to be read into one TraceError."""
    try:
        yield
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file or folder") from None
    except _DAMAGED as e:
        raise TraceError(f"{path}: truncated or damaged ({e}): fetch it again") from None
    except (NotImplementedError, RuntimeError) as e:
        raise TraceError(f"{path}: cannot unpack ({e}): expected a plain zip or tar.gz") from None
    except OSError as e:
        raise TraceError(f"{path}: cannot read ({e.strerror or e})") from None


def read_file(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the bytes of one file, unpacked if it is gzipped or xz.

    Raises:
        TraceError: the file is missing, empty, damaged or larger than the limit.
    """
    with opening(path), _plain(path) as stream:
        data = _read(stream, most_bytes, str(path))
    if not data.strip():
        raise TraceError(f"{path}: is empty")
    return data


def read_json(path: Path) -> object:
    """Return the content of a JSON file, packed or not.

    Raises:
        TraceError: the file is missing, empty or not JSON, says one thing twice, or holds half of
            a character.
    """
    data = read_file(path)
    try:
        text = data.decode(json.detect_encoding(data))
        content: object = json.loads(text, object_pairs_hook=_distinct)
        if _HALF.search(text):
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except TraceError as e:
        raise TraceError(f"{path}: {e}") from None
    except (ValueError, RecursionError) as e:
        reason = "nested too deeply" if isinstance(e, RecursionError) else str(e)
        raise TraceError(f"{path}: not JSON, or truncated ({reason})") from None


def head(path: Path, size: int = 4096) -> bytes:
    """Return the first bytes of a file, unpacked if it is gzipped or xz."""
    with opening(path), _plain(path) as stream:
        return stream.read(size)


def names(path: Path) -> Iterator[str]:
    """Yield the names of the plain files in a folder or an archive, without reading them."""
    for name, _ in members(path, lambda _: False):
        yield name


def members(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes | None]]:
    """Yield (name, bytes) of each plain file in a folder, a zip, a tar or a gzipped tar.

    Bytes are None where the name is not wanted. Hidden files, links and the resource forks that
    macOS puts into archives are passed over.

    Args:
        path: folder or archive.
        wanted: called with each name, relative to the folder or archive, with forward slashes.

    Raises:
        TraceError: a name leads out of the archive or is no text, a limit is passed, or it is
            damaged.
    """
    with opening(path):
        if path.is_dir():
            entries = _in_folder(path)
        elif zipfile.is_zipfile(path):
            entries = _in_zip(path)
        elif is_tar(path):
            entries = _in_tar(path)
        else:
            raise TraceError(
                f"{path}: expected a folder, a zip or a tar.gz, whole and not truncated"
            )
        total = 0
        for count, (name, opened) in enumerate(entries, start=1):
            data = None
            if wanted(name) and not _is_hidden(name):
                with opened() as stream:
                    data = _read(stream, MOST_BYTES, f"{path}: {name}")
                total += len(data)
                if name.encode(errors="ignore").decode() != name:
                    raise TraceError(f"{path}: member {name!r} is not named in UTF-8: rename it")
            if count > MOST_FILES or total > MOST_BYTES_IN_ALL:
                raise TraceError(
                    f"{path}: holds more than {MOST_FILES} files or {MOST_BYTES_IN_ALL} bytes: "
                    "expected a trace archive"
                )
            if not _is_hidden(name):
                yield name, data


def is_tar(path: Path) -> bool:
    """Return whether a file is a tar archive, plain or gzipped."""
    return head(path, 512)[257:262] == b"ustar"


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def _safe(path: Path, name: str) -> str:
    if not name:
        raise TraceError(f"{path}: damaged, a member has no name: fetch it again")
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or ":" in parts.parts[:1]:
        raise TraceError(f"{path}: member {name!r} leads out of the archive: rejected")
    return str(parts)


def _plain(path: Path) -> io.BufferedIOBase:
    # A pipe would wait for ever, a device never end.
    if path.exists() and not path.is_file():
        raise TraceError(f"{path}: is a folder or a device, expected a file")
    with path.open("rb") as stream:
        magic = stream.read(6)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(path)
    if magic == b"\xfd7zXZ\x00":
        return lzma.LZMAFile(path)
    return path.open("rb")


def _read(stream: _Stream, limit: int, name: str) -> bytes:
    out = io.BytesIO()
    while chunk := stream.read(_CHUNK):
        out.write(chunk)
        if out.tell() > limit:
            raise TraceError(f"{name}: larger than {limit} bytes: expected a smaller file")
    return out.getvalue()


def _in_folder(path: Path) -> Iterator[_Entry]:
    files: list[Path] = []
    for file in path.rglob("*"):
        if file.is_file():
            files.append(file)
        if len(files) > MOST_FILES:
            raise TraceError(f"{path}: holds more than {MOST_FILES} files: expected traces")
    for file in sorted(files):
        yield file.relative_to(path).as_posix(), partial(_plain, file)


def _in_zip(path: Path) -> Iterator[_Entry]:
    with zipfile.ZipFile(path) as archive:
        for info in sorted(archive.infolist(), key=lambda i: i.filename):
            name = _safe(path, info.filename)
            if not info.is_dir():
                yield name, partial(archive.open, info)


def _in_tar(path: Path) -> Iterator[_Entry]:
    with _plain(path) as stream:
        # Headers and padding come on top of the content.
        most = MOST_BYTES_IN_ALL + 1024 * MOST_FILES + tarfile.RECORDSIZE
        bounded = _Bounded(stream, most, path)
        with tarfile.open(  # type: ignore[call-overload]
            fileobj=bounded, mode="r|", tarinfo=_StrictHeader
        ) as archive:
            for info in archive:
                name = _safe(path, info.name)
                if info.isfile():
                    yield name, partial(archive.extractfile, info)


class _StrictHeader(tarfile.TarInfo):
    """A header that must be whole; tarfile takes a broken one for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        if len(buf) == tarfile.BLOCKSIZE and not any(buf):
            return super().frombuf(buf, encoding, errors)
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as e:
            raise tarfile.ReadError(f"{e}, before the end of the archive") from None


class _Bounded:
    """A stream that fails beyond so many bytes, whatever a tar header promises."""

    def __init__(self, stream: io.BufferedIOBase, limit: int, path: Path) -> None:
        self._stream, self._left, self._path = stream, limit, path

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise TraceError(f"{self._path}: unpacks to too much: expected a trace archive")
        return data


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object of JSON, whose later entries must not hide earlier ones."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise TraceError(f"{twice!r} occurs twice in one object: expected distinct names")
    return made


def number(value: object) -> float:
    """Return a number of a published file; NaN for what is none, or too large for one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan
