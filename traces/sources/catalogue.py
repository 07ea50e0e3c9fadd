"""The published recordings that fedstale reads: their origin and their channels.

The table is catalogue.toml: `fetch` downloads by it, `read` reads by it, and the page on traces is
compared with it. Which kind of recording a file or folder is, its name and its first bytes tell.

A download is complete and checked or not at all. A file is written under a temporary name beside
its target, checked, and renamed when it is whole, so a broken or corrupted download leaves what was
there before. Where no checksum is known, the one seen is recorded beside the file (NAME.sha256, as
sha256sum writes it), to compare with later.
"""

import hashlib
import re
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from fedstale.errors import TraceError
from fedstale.traces import OWN_LOG, TraceSet
from fedstale.traces.io import replacing
from fedstale.traces.sources import fedscale, links, speeds, windows
from fedstale.traces.sources.archives import head, is_tar, names

NATIVE = "native"
TIMEOUT_S = 30.0
MAX_BYTES = 1 << 30
_CHUNK = 1 << 16
_PICKLES = (b"\x80", b"(", b"}")
"""How a pickle of a dictionary begins, of any protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """One file as its authors publish it."""

    filename: str
    """Name to keep it under."""
    url: str
    """Where it is downloaded from."""
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
    origin: str
    """Authors or project, and the repository that publishes it."""
    licence: str
    """Under which terms, as stated there."""
    accepts: str
    """Files and folders of this kind."""
    files: tuple[RemoteFile, ...]
    """What `fetch` downloads."""
    size_bytes: int | None = None
    """Size of these in all, where the published ones were seen."""

    @property
    def licence_line(self) -> str:
        """One line to print when the recording is downloaded."""
        return f"{self.name}: {self.origin}; licence: {self.licence}"


_READERS: dict[str, Callable[[str | Path], TraceSet]] = {
    "flash": windows.read_phones,
    "flash_days": windows.read_phones_over_days,
    "library_desktops": windows.read_desktops,
    "car_charging": windows.read_cars,
    "gnettrack": links.read_sessions,
    "mahimahi": links.read_opportunities,
    "planetlab": speeds.read_hosts,
    "aibenchmark": speeds.read_phones,
    "fedscale_behaviour": fedscale.read_behaviour,
    "fedscale_capacity": fedscale.read_capacity,
}


def _sources() -> dict[str, TraceSource]:
    text = (resources.files("fedstale.traces.sources") / "catalogue.toml").read_text("utf-8")
    found = {}
    for name, about in tomllib.loads(text).items():
        about["channels"] = tuple(about["channels"])
        about["files"] = tuple(RemoteFile(**file) for file in about["files"])
        found[name] = TraceSource(name=name, reader=_READERS[name], **about)
    return found


SOURCES: Mapping[str, TraceSource] = MappingProxyType(_sources())


def cards() -> list[dict[str, Any]]:
    """Return a card of each recording that can be fetched, and of what comes with fedstale.

    Returns:
        Of each its kind, name, what it is (about), what to type (use), licence, and size in bytes;
        None where no published file was seen.
    """
    found = [
        {
            "kind": "recordings",
            "name": one.name,
            "about": f"{one.about} ({', '.join(one.channels)})",
            "use": f"fedstale traces fetch {one.name}",
            "licence": one.licence,
            "bytes": one.size_bytes,
        }
        for one in SOURCES.values()
    ]
    root = resources.files("fedstale")
    shipped = tomllib.loads((root / "traces" / "sources" / "shipped.toml").read_text("utf-8"))
    for name, card in shipped.items():
        size = sum(len((root / file).read_bytes()) for file in card.pop("files"))
        licence = f"Apache-2.0; learnt from {', '.join(card.pop('learnt_from'))}"
        found.append({"name": name, **card, "licence": licence, "bytes": size})
    return found


_JSON = {
    "flash_days": rb'(?s)\{.*"ready_time"',
    "flash": rb'\{\s*("[^"]*"\s*:\s*\[\s*[\[\]]|\}|$)',
    "aibenchmark": rb'(?s)\[\s*(\]|$|\{.*_Score")',
}
"""How a recording in JSON begins; other JSON may be a log of one's own."""


def kind_of(path: Path) -> str:
    """Return the name of the source that a path is of, or "native".

    Raises:
        TraceError: there is no such path, or it is of no kind that is known.
    """
    if not path.exists():
        raise TraceError(f"{path}: no such file or folder")
    if not path.is_dir():
        kind = _of_file(path)
    elif any(links.parts(file) for file in path.iterdir() if file.is_file()):
        kind = "mahimahi"
    else:
        kind = _of_names([f"{path.absolute().name}/{name}" for name in names(path)])
    if kind is None:
        accepted = {NATIVE: "a .parquet file written by fedstale"}
        accepted |= {name: source.accepts for name, source in SOURCES.items()}
        lines = (f"\n  {name:<19}{files}" for name, files in accepted.items())
        raise TraceError(
            f"{path}: not a trace of a known kind; accepted are{''.join(lines)}\n{OWN_LOG}"
        )
    return kind


def is_foreign(path: Path) -> bool:
    """Return whether a path is of no kind that is known here, and so may be a log of one's own."""
    if path.is_dir():
        logs = [file for file in sorted(path.iterdir()) if file.is_file()]
        return all(is_foreign(file) for file in logs[:3]) if logs else False
    if not path.is_file():
        return False
    if head(path).startswith(b"PAR1"):
        from fedstale.traces.io import parquet  # noqa: PLC0415 - as in `read`

        return not parquet.is_native(path)
    return _of_file(path) is None


def _of_names(inside: list[str]) -> str | None:
    if any(windows.is_log(name) for name in inside):
        return "library_desktops"
    if any(name.lower().endswith(".csv") for name in inside):
        return "gnettrack"
    if any(speeds.HOST.search(name) for name in inside):
        return "planetlab"
    return None


def _of_file(path: Path) -> str | None:
    if links.parts(path):
        return "mahimahi"
    if windows.is_log(path.name):
        return "library_desktops"
    start = head(path)
    if start.startswith(b"PAR1") or path.suffix == ".parquet":
        return NATIVE
    if zipfile.is_zipfile(path) or is_tar(path):
        return _of_names(list(names(path)))
    # The name of a folder alone would make percentages of any log of a day.
    if speeds.HOST.search(path.absolute().as_posix()) and start.split(b"\n")[0].strip().isdigit():
        return "planetlab"
    return _of_content(start)


def _of_content(start: bytes) -> str | None:
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    for kind, form in _JSON.items():
        if re.match(form, text):
            return kind
    if b"plugout_time" in text.split(b"\n")[0]:
        return "car_charging"
    if b"DL_bitrate" in text.split(b"\n")[0]:
        return "gnettrack"
    is_pickle = start[:1] in _PICKLES
    if is_pickle and b"finish_time" in start:
        return "fedscale_behaviour"
    return "fedscale_capacity" if is_pickle and b"computation" in start else None


def read(path: Path, source: str | None = None) -> TraceSet:
    """Return the traces in a file or folder; see `TraceSet.read`."""
    kind = kind_of(path) if source is None else source
    if kind == NATIVE:
        # Only here, so that reading a published recording does not load pyarrow.
        from fedstale.traces.io import parquet  # noqa: PLC0415

        return parquet.read(path)
    if kind not in SOURCES:
        raise TraceError(f"source = {kind!r}: expected {NATIVE!r} or one of {', '.join(SOURCES)}")
    return SOURCES[kind].reader(path)


Progress = Callable[[int, int | None], None]
"""Called with bytes so far and, where it is known, bytes in all."""


def fetch(
    name: str,
    folder: str | Path,
    *,
    url: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Download a published recording and return where it is.

    Args:
        name: one of `SOURCES`; its `licence_line` is there to be shown.
        folder: where to put it; made if missing.
        url: where to get it instead; for a source of several files, the folder that they are in.
        progress: called as bytes arrive; None to report nothing.

    Returns:
        The file, or a folder NAME for a source of several files; `TraceSet.read` reads either.

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
        _fetch_file(file, place / file.filename, from_, progress)
    return place if several else place / source.files[0].filename


def _fetch_file(file: RemoteFile, target: Path, url: str, progress: Progress | None) -> None:
    if not url.startswith(("http://", "https://")):
        raise TraceError(f"url = {url!r}: expected http:// or https://")
    if file.sha256 is not None and target.is_file():
        with target.open("rb") as present:
            if hashlib.file_digest(present, "sha256").hexdigest() == file.sha256:
                return
    too_large = TraceError(f"{url}: larger than {MAX_BYTES} bytes: expected a trace file")
    digest, done = hashlib.sha256(), 0
    with _as_trace_error(url), replacing(target) as out:
        # Bytes as they are stored: packed ones on the way would not have the size that is stated.
        headers = {"User-Agent": "fedstale", "Accept-Encoding": "identity"}
        with httpx.stream(
            "GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True
        ) as response:
            if response.is_error:
                raise TraceError(
                    f"{url}: the server answers {response.status_code} {response.reason_phrase}"
                )
            if url.startswith("https://") and response.url.scheme != "https":
                raise TraceError(f"{url}: leads to {response.url}, without encryption: rejected")
            stated = response.headers.get("Content-Length")
            total = int(stated) if stated is not None and stated.isdigit() else None
            if total is not None and total > MAX_BYTES:
                raise too_large
            for chunk in response.iter_raw(_CHUNK):
                done += len(chunk)
                if done > MAX_BYTES:
                    raise too_large
                digest.update(chunk)
                out.write(chunk)
                if progress is not None:
                    progress(done, total)
        if done == 0 or (total is not None and done != total):
            raise TraceError(
                f"{url}: ended after {done} of {total or 'some'} bytes; nothing was kept: try again"
            )
        seen = digest.hexdigest()
        if file.sha256 is not None and seen != file.sha256:
            raise TraceError(
                f"{url}: sha256 is {seen}, expected {file.sha256}: the file was changed or damaged "
                "on the way; nothing was kept"
            )
    if file.sha256 is None:
        checksum = target.with_name(f"{target.name}.sha256")
        with _as_trace_error(str(target)), replacing(checksum) as out:
            out.write(f"{seen}  {target.name}\n".encode())


@contextmanager
def _as_trace_error(what: str) -> Iterator[None]:
    try:
        yield
    except httpx.ProtocolError as e:
        raise TraceError(f"{what}: broken off ({type(e).__name__}); nothing was kept") from None
    except httpx.HTTPError as e:
        raise TraceError(f"{what}: cannot be reached ({e})") from None
    except httpx.InvalidURL as e:
        raise TraceError(f"{what}: not an address ({e})") from None
    except OSError as e:
        raise TraceError(f"{what}: {e.strerror or e}; nothing was kept") from None
