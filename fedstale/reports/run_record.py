"""A finished run, read back from its folder for those who look at it."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fedstale.errors import ConfigError, ProtocolError
from fedstale.reports.folder import CONFIG, EVENTS, METRICS, METRICS_SCHEMA, SUMMARY
from fedstale.simulation.jobs import FLYING
from fedstale.strategies.server.runtime import REPORTED

Array = npt.NDArray[np.float64]

_NEEDED = (CONFIG, EVENTS, METRICS, SUMMARY)
_EVENT_COLUMNS = {
    *("job_id", "device_id", "kind", "round", "status", "reason", "staleness", "weight"),
    *("started_at", "downloaded_at", "trained_at", "reported_at", "ended_at"),
    *("download_s", "compute_s", "upload_s", "downloaded_bytes", "uploaded_bytes"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What the folder of a run holds, without its model."""

    name: str
    """Name of the folder."""
    config_text: str
    """The resolved settings as TOML."""
    events: pd.DataFrame
    """One row a job."""
    metrics: pd.DataFrame
    """One row a measured value."""
    summary: Mapping[str, Any]
    """The plain figures of the run."""

    @classmethod
    def read(cls, folder: Path) -> "RunRecord":
        """Read a run's folder.

        Args:
            folder: what `fedstale simulate` wrote.

        Raises:
            ConfigError: it is not the folder of a run.
            ProtocolError: a file in it cannot be read.
        """
        if not folder.is_dir():
            raise ConfigError(
                f"run = {str(folder)!r} is not a folder: expected what fedstale simulate wrote"
            )
        missing = [name for name in _NEEDED if not (folder / name).is_file()]
        if missing:
            raise ConfigError(
                f"run = {str(folder)!r} has no {', '.join(missing)}: expected the folder of a run "
                "that came to its end; run fedstale simulate again"
            )
        config_text, summary = _texts(folder)
        return cls(
            name=folder.resolve().name,
            config_text=config_text,
            events=_frame(folder / EVENTS, _EVENT_COLUMNS),
            metrics=_frame(folder / METRICS, set(METRICS_SCHEMA.names)),
            summary=summary,
        )

    @property
    def end_s(self) -> float:
        """Virtual instant at which the run ended, in s."""
        return float(self.summary["virtual_s"])

    @property
    def busy_s(self) -> Array:
        """Seconds that a device is known to have spent on each job; shape (jobs,)."""
        phases = self.events[["download_s", "compute_s", "upload_s"]]
        return np.nansum(phases.to_numpy(np.float64), axis=1)

    @property
    def moved_bytes(self) -> Array:
        """Bytes that each job is known to have moved, both ways; shape (jobs,)."""
        moved = self.events[["downloaded_bytes", "uploaded_bytes"]]
        return np.nansum(moved.to_numpy(np.float64), axis=1)

    @property
    def outcome(self) -> npt.NDArray[np.object_]:
        """What each job counts as: used, wasted or flying; shape (jobs,)."""
        status = self.events["status"].to_numpy(object)
        return np.where(
            status == REPORTED, "used", np.where(status == FLYING, "flying", "wasted")
        ).astype(object)


def _texts(folder: Path) -> tuple[str, Mapping[str, Any]]:
    try:
        config_text = (folder / CONFIG).read_text(encoding="utf-8")
        tomllib.loads(config_text)
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        absent = {"status", "app", "devices", "seed", "virtual_s", "rounds"} - set(summary)
    except (ValueError, TypeError, OSError, RecursionError) as problem:
        raise ProtocolError(
            f"run = {str(folder)!r}: {CONFIG} or {SUMMARY} cannot be read ({problem}); "
            "run fedstale simulate again"
        ) from None
    if absent:
        raise ProtocolError(
            f"run = {str(folder)!r}: {SUMMARY} has no {', '.join(sorted(absent))}; "
            "run fedstale simulate again"
        )
    return config_text, summary


def _frame(path: Path, columns: set[str]) -> pd.DataFrame:
    try:
        table = pq.read_table(path)
        absent = columns - set(table.column_names)
        frame: pd.DataFrame = table.to_pandas()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as problem:
        first = str(problem).split("\n", maxsplit=1)[0]
        raise ProtocolError(
            f"{str(path)!r} is not a readable Parquet file ({first}); run fedstale simulate again"
        ) from None
    if absent:
        raise ProtocolError(
            f"{str(path)!r} has no column {', '.join(sorted(absent))}: expected the columns that "
            "docs/formats.md lists; run fedstale simulate again"
        )
    return frame
