"""Downloads of published recordings, complete and checked or not at all.

A file is written under a temporary name beside its target, checked, and renamed when it is whole,
so a broken or corrupted download leaves what was there before. Where no checksum is known, the one
seen is recorded beside the file (NAME.sha256, as sha256sum writes it), to compare with later.
"""

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fedstale.errors import TraceError
from fedstale.traces.io.atomic import replacing
from fedstale.traces.sources.catalogue import SOURCES, RemoteFile

TIMEOUT_S = 30.0
MAX_BYTES = 1 << 30
_CHUNK = 1 << 16

Progress = Callable[[int, int | None], None]
"""Called with bytes so far and, where it is known, bytes in all."""


def fetch(
    name: str,
    folder: str | Path,
    *,
    url: str | None = None,
    progress: Progress | None = None,
    max_bytes: int = MAX_BYTES,
) -> Path:
    """Download a published recording and return where it is.

    Args:
        name: one of `SOURCES`; its `licence_line` is there to be shown.
        folder: where to put it; made if missing.
        url: where to get it instead; for a source of several files, the folder that they are in.
        progress: called as bytes arrive; None to report nothing.
        max_bytes: size beyond which a file is rejected.

    Returns:
        The file, or a folder NAME for a source of several files; `sources.read` reads either.

    Raises:
        TraceError: the name is unknown, or a file cannot be had, is cut short, too large or not
            the one that was published.
    """
    source = SOURCES.get(name)
    if source is None:
        raise TraceError(f"source {name!r}: expected one of {', '.join(SOURCES)}")
    folder = Path(folder)
    several = len(source.files) > 1
    place = folder / name if several else folder
    with _as_trace_error(str(place)):
        place.mkdir(parents=True, exist_ok=True)
    for file in source.files:
        from_ = (
            file.url if url is None else f"{url.rstrip('/')}/{file.filename}" if several else url
        )
        _fetch_file(file, place / file.filename, from_, progress, max_bytes)
    return place if several else place / source.files[0].filename


def _fetch_file(
    file: RemoteFile, target: Path, url: str, progress: Progress | None, max_bytes: int
) -> None:
    if not url.startswith(("http://", "https://")):
        raise TraceError(f"url = {url!r}: expected http:// or https://")
    if file.sha256 is not None and target.is_file():
        with target.open("rb") as present:
            if hashlib.file_digest(present, "sha256").hexdigest() == file.sha256:
                return
    with _as_trace_error(url), replacing(target) as out:
        request = urllib.request.Request(url, headers={"User-Agent": "fedstale"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            seen = _copy(response, out, url, progress, max_bytes)
        if file.sha256 is not None and seen != file.sha256:
            raise TraceError(
                f"{url}: sha256 is {seen}, expected {file.sha256}: the file was changed or damaged "
                "on the way; nothing was kept"
            )
    if file.sha256 is None:
        with _as_trace_error(str(target)), replacing(checksum_file(target)) as out:
            out.write(f"{seen}  {target.name}\n".encode())


def checksum_file(target: Path) -> Path:
    """Return where the checksum of a download is recorded when none was known before."""
    return target.with_name(target.name + ".sha256")


def _copy(
    response: http.client.HTTPResponse,
    out: BinaryIO,
    url: str,
    progress: Progress | None,
    max_bytes: int,
) -> str:
    """Copy a response to a file and return its SHA-256."""
    if url.startswith("https://") and not response.url.startswith("https://"):
        raise TraceError(f"{url}: leads to {response.url}, without encryption: rejected")
    stated = response.headers.get("Content-Length")
    total = int(stated) if stated is not None and stated.isdigit() else None
    digest, done = hashlib.sha256(), 0
    too_large = TraceError(f"{url}: larger than {max_bytes} bytes: expected a trace file")
    if total is not None and total > max_bytes:
        raise too_large
    while chunk := response.read(_CHUNK):
        done += len(chunk)
        if done > max_bytes:
            raise too_large
        digest.update(chunk)
        out.write(chunk)
        if progress is not None:
            progress(done, total)
    if done == 0 or (total is not None and done != total):
        raise TraceError(
            f"{url}: ended after {done} of {total or 'some'} bytes; nothing was kept: try again"
        )
    return digest.hexdigest()


@contextmanager
def _as_trace_error(what: str) -> Iterator[None]:
    try:
        yield
    except urllib.error.HTTPError as e:
        e.close()
        raise TraceError(f"{what}: the server answers {e.code} {e.reason}") from None
    except urllib.error.URLError as e:
        raise TraceError(f"{what}: cannot be reached ({e.reason})") from None
    except http.client.HTTPException as e:
        raise TraceError(f"{what}: broken off ({type(e).__name__}); nothing was kept") from None
    except OSError as e:
        raise TraceError(f"{what}: {e.strerror or e}; nothing was kept") from None
    except TraceError:
        raise
    except ValueError as e:
        raise TraceError(f"{what}: not an address ({e})") from None
