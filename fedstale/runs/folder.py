"""The folder of a run: settings, events, metrics, model and report.

Every file but the log is written under another name and renamed, so a folder never holds half a
file.
"""

import json
import logging
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import chain, count
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w
from flwr.app import ArrayRecord
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedstale.config import SimulationConfig
from fedstale.errors import ConfigError, FedstaleError, ProtocolError
from fedstale.files import hold, is_held
from fedstale.flower import model_of
from fedstale.traces import Status
from fedstale.traces.io import replacing
from fedstale.until import Until

logger = logging.getLogger(__name__)

CONFIG, EVENTS, METRICS = "config.toml", "events.parquet", "metrics.parquet"
ADVISED = "advised.json"
MODEL, SUMMARY = "model.safetensors", "summary.json"
_ORDER = "order"
"""Key of the metadata of a model that has the names of its arrays in their order, as JSON."""
ONLINE = "online.parquet"
LOG = "log.txt"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"
"""Name of the file that is locked while a run goes on."""
_PART = ".*.part"  # what `replacing` calls a file until it is whole
DEPLOYED = "SuperNodes"
"""The `executor` of a summary where the clients were real."""

# How a job ended, from the server's point of view, besides the words of the runtime.
FAILED = {
    status: status.name.lower()
    for status in (Status.LATE, Status.EXPIRED, Status.INTERRUPTED, Status.STALLED)
}
LATE, EXPIRED, INTERRUPTED, STALLED = FAILED.values()
UNCLAIMED = "unclaimed"
IN_FLIGHT = "in-flight"

NEVER = float("inf")
UNKNOWN = float("nan")

METRICS_SCHEMA = pa.schema(
    [
        ("time_s", pa.float64()),
        ("version", pa.int64()),
        ("source", pa.string()),
        ("name", pa.string()),
        ("value", pa.float64()),
    ]
)
ONLINE_SCHEMA = pa.schema(
    [
        ("device_id", pa.string()),
        ("start_s", pa.float64()),
        ("end_s", pa.float64()),
        ("is_drawn", pa.bool_()),
    ]
)


def has_earlier(path: Path, marks: Sequence[str], *, overwrite: bool) -> bool:
    """Test if a folder holds an earlier result, which may be removed.

    Args:
        path: of the folder; it need not exist.
        marks: files by which a result is known.
        overwrite: whether an earlier result may be removed; anything else never is.

    Raises:
        ConfigError: the folder holds something that must stay.
    """
    if is_empty(path):
        return False
    is_ours = all((path / mark).is_file() for mark in marks)
    if not (overwrite and is_ours):
        hint = "or --overwrite to replace what it holds" if is_ours else "or another path"
        hint = f"--resume {path} to go on with its run, {hint}" if is_unfinished(path) else hint
        raise ConfigError(f"out = {str(path)!r} is not empty: expected a new folder, {hint}")
    return True


def is_empty(path: Path) -> bool:
    """Return whether a folder is not there, or holds only what a killed process had begun."""
    parts = path.iterdir() if path.is_dir() else [path] if path.exists() else []
    return all(part.name == LOCK or part.match(_PART) for part in parts)


def is_unfinished(folder: Path) -> bool:
    """Return whether a folder holds a run that was killed or interrupted, and can go on."""
    with suppress(ConfigError):
        return (status_of(folder) or (lost(folder) and "interrupted")) == "interrupted"
    return False


def status_of(folder: Path) -> str:
    """Return how the run in a folder ended; nothing if it has not.

    Raises:
        ConfigError: its summary cannot be read.
    """
    try:
        return str(json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["status"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        raise ConfigError(
            f"{str(folder / SUMMARY)!r} cannot be read ({type(problem).__name__}): remove it to go "
            "on with the run, or --overwrite the run"
        ) from None


def lost(folder: Path) -> str:
    """Return in a sentence that the process of a run ended before the run did; else nothing."""
    if is_held(folder / LOCK) or (folder / SUMMARY).is_file() or not (folder / CONFIG).is_file():
        return ""
    return (
        "the process of the run ended before the run did; with --executor processes a client that "
        "ends its process is named, and the run goes on"
    )


class RunFolder:
    """A folder that holds one run; a context manager that keeps other processes out of it."""

    def __init__(self, path: Path) -> None:
        """Hold a folder for as long as this process lives, whatever ends it.

        Raises:
            ConfigError: another process holds it, or it cannot be written to.
        """
        self.path = path
        try:
            self._lock = (path / LOCK).open("w", encoding="utf-8")
        except OSError as problem:
            raise ConfigError(
                f"out = {str(path)!r} cannot be written to: {problem.strerror}"
            ) from None
        if owner := hold(self._lock.fileno()):
            self._lock.close()
            raise ConfigError(
                f"out = {str(path)!r} is in use by a run that goes on, of {owner}: wait for it, or "
                "choose another folder"
            )
        for torn in path.glob(_PART):  # of a process that was killed
            torn.unlink(missing_ok=True)

    @property
    def checkpoints(self) -> Path:
        """Where the run's checkpoints are."""
        return self.path / CHECKPOINTS

    @classmethod
    def create(cls, path: Path, *, overwrite: bool = False) -> "RunFolder":
        """Make an empty folder for a run.

        Args:
            path: where.
            overwrite: whether an earlier run there may be removed; anything else never is.

        Raises:
            ConfigError: the folder holds something, or cannot be made.
        """
        is_earlier = has_earlier(path, (CONFIG,), overwrite=overwrite)
        make_folder(path)
        folder = cls(path)
        # What a run is known by goes last, and the lock stays: a kill in the midst leaves a run.
        for part in sorted(path.iterdir(), key=lambda part: part.name == CONFIG):
            if is_earlier and part.is_dir() and not part.is_symlink():
                shutil.rmtree(part)
            elif is_earlier and part.name != LOCK:
                part.unlink()
        return folder

    @classmethod
    def resume(cls, path: Path, config: SimulationConfig) -> "RunFolder":
        """Open the folder of a run that did not come to its end, or stopped at an earlier limit.

        Args:
            path: of the folder.
            config: what the run goes on with: the settings that it had, with its limit or a later
                one.

        Raises:
            ConfigError: it is no folder of a run, the run in it is over or still going on, or it
                has other settings.
        """
        if not (path / CONFIG).is_file():
            raise ConfigError(
                f"resume = {str(path)!r} has no {CONFIG}: expected the folder of a run that was "
                "interrupted or killed"
            )
        with ExitStack() as stack:
            folder = stack.enter_context(cls(path))
            goes_further = _goes_further(path, config)
            if status := status_of(path):
                _require_unfinished(path, status, goes_further=goes_further)
            stack.pop_all()
        return folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        """Release the lock of the folder."""
        self._lock.close()

    @contextmanager
    def logging(self, *, appends: bool) -> Iterator[None]:
        """Write into the folder what Flower and fedstale log meanwhile, as far as they do.

        Lines have no times: those of a ServerApp are virtual.

        Args:
            appends: whether the run goes on, and so does its log.
        """
        path, mode = self.path / LOG, "a" if appends else "w"
        try:
            handler = _LogFile(path, mode=mode, encoding="utf-8")
        except OSError as problem:
            raise _unwritable(path, problem) from None
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
        loggers = logging.getLogger("flwr"), logging.getLogger("fedstale")
        for logger in loggers:
            logger.addHandler(handler)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(handler)
            with suppress(OSError):  # which was told when it came
                handler.close()

    @contextmanager
    def _writing(self, name: str) -> Iterator[BinaryIO]:
        """Give a file of the folder to write, as `replacing` does.

        Raises:
            FedstaleError: the disk is full, or the folder is gone.
        """
        try:
            with replacing(self.path / name) as file:
                yield file
        except OSError as problem:
            raise _unwritable(self.path / name, problem) from None

    def write_config(self, config: SimulationConfig | Mapping[str, Any]) -> None:
        """Write the resolved settings, or their table, of a run that is not over any more."""
        (self.path / SUMMARY).unlink(missing_ok=True)
        with self._writing(CONFIG) as file:
            tomli_w.dump(config.table() if isinstance(config, SimulationConfig) else config, file)

    def write_events(self, events: pa.Table | Iterator[pa.Table]) -> None:
        """Write one row a job; a row group for each table, if there are several."""
        tables = iter([events]) if isinstance(events, pa.Table) else events
        first = next(tables)
        with (
            self._writing(EVENTS) as file,
            pq.ParquetWriter(file, first.schema) as writer,
        ):
            for table in chain([first], tables):
                writer.write_table(table)

    def read_events(self, columns: Sequence[str], *, status: str | None = None) -> pa.Table:
        """Return some columns of what `write_events` wrote, for jobs that ended so or for all."""
        only = None if status is None else [("status", "=", status)]
        return pq.read_table(self.path / EVENTS, columns=list(columns), filters=only)

    def write_online(self, windows: pa.Table) -> None:
        """Write when devices were online: one row a window."""
        with self._writing(ONLINE) as file:
            pq.write_table(windows, file)

    def write_metrics(self, rows: Sequence[tuple[float, int, str, str, float]]) -> None:
        """Write one row a measured value: time in s, version, source, name, value."""
        named = [dict(zip(METRICS_SCHEMA.names, row, strict=True)) for row in rows]
        with self._writing(METRICS) as file:
            pq.write_table(pa.Table.from_pylist(named, schema=METRICS_SCHEMA), file)

    def write_model(self, arrays: ArrayRecord) -> None:
        """Write the last model."""
        with self._writing(MODEL) as file:
            file.write(model_bytes(arrays))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the plain figures of the run; those that are not finite become null."""
        text = json.dumps(_strict(summary), indent=2, allow_nan=False)
        with self._writing(SUMMARY) as file:
            file.write(text.encode() + b"\n")


class _LogFile(logging.FileHandler):
    """A log that ends where it cannot be written any more; the run goes on."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Say once why lines are missing."""
        del record
        # No line that comes now is for this file.
        self.setLevel(logging.CRITICAL + 1)
        problem = sys.exc_info()[1]
        logger.warning("%s ends here: %s", self.baseFilename, problem)


def _unwritable(path: Path, problem: OSError) -> FedstaleError:
    return FedstaleError(
        f"{path} cannot be written: {problem.strerror or problem}; make room on the disk"
    )


def model_bytes(arrays: ArrayRecord) -> bytes:
    """Return a model as it stands in model.safetensors.

    That format sorts arrays by dtype and name, so their order stands in its metadata.
    """
    order = {_ORDER: json.dumps(list(arrays))}
    return save(model_of(arrays), metadata=order)


def read_model(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a model.safetensors, in the order of the record that they come from.

    Raises:
        ProtocolError: the file cannot be read.
    """
    try:
        with safe_open(path, "numpy") as file:
            order = json.loads((file.metadata() or {}).get(_ORDER, json.dumps(file.keys())))
            if not isinstance(order, list) or sorted(order) != sorted(file.keys()):
                raise ValueError("its order is not one of its arrays")
            return {name: file.get_tensor(name) for name in order}
    except (SafetensorError, OSError, ValueError, TypeError, RecursionError) as problem:
        raise ProtocolError(
            f"{str(path)!r} is not a readable model ({problem}); run fedstale simulate again"
        ) from None


def _strict(value: Any) -> Any:
    """Replace NaN and infinity, which JSON has not, by None."""
    if isinstance(value, Mapping):
        return {key: _strict(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def new_folder(path: Path) -> Path:
    """Make a folder that does not exist: PATH, or else PATH-2, PATH-3 and so on; return it.

    Raises:
        ConfigError: it cannot be made.
    """
    make_folder(path.parent)
    for number in count(1):
        folder = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        except OSError as problem:
            raise ConfigError(f"out = {str(folder)!r} cannot be made: {problem.strerror}") from None
        return folder
    raise AssertionError


def make_folder(path: Path) -> None:
    """Make a folder, with those that it is in, unless it exists.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ConfigError(f"out = {str(path)!r} cannot be made: {problem.strerror}") from None


def _goes_further(path: Path, config: SimulationConfig) -> bool:
    """Return whether settings are those of the run in a folder, but for a later limit."""
    before = SimulationConfig.read(path / CONFIG)
    if others := replace(before, until=config.until).differing(config):
        raise ConfigError(
            f"resume = {str(path)!r} holds a run with {others}: it keeps its settings"
        )
    old, new = Until.parse(before.until), Until.parse(config.until)
    if new != old and not new.goes_beyond(old):
        raise ConfigError(
            f"until = {config.until!r}: the run in {str(path)!r} ends at "
            f"{before.until or 'no limit'}; expected a later limit of the same kind"
        )
    return new != old


def _require_unfinished(path: Path, status: str, *, goes_further: bool) -> None:
    if status == "interrupted":
        return
    if status != "stopped":
        raise ConfigError(
            f"resume = {str(path)!r}: that run has come to its end ({status}); expected one that "
            "was interrupted or killed, or stopped at its limit"
        )
    if not goes_further:
        raise ConfigError(
            f"resume = {str(path)!r}: that run has stopped at its limit; expected a later until"
        )
