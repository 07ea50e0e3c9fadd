"""The folder of a run: what was asked, what happened, and what came out.

Every file is written under another name and renamed, so a folder never holds half a file.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from flwr.app import ArrayRecord
from safetensors.numpy import save

from fedstale.config import SimulationConfig
from fedstale.errors import ConfigError

CONFIG, EVENTS, METRICS = "config.toml", "events.parquet", "metrics.parquet"
MODEL, SUMMARY = "model.safetensors", "summary.json"

METRICS_SCHEMA = pa.schema(
    [
        ("time_s", pa.float64()),
        ("version", pa.int64()),
        ("source", pa.string()),
        ("name", pa.string()),
        ("value", pa.float64()),
    ]
)


class RunFolder:
    """A folder that holds one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, *, overwrite: bool = False) -> "RunFolder":
        """Make an empty folder for a run.

        Args:
            path: where.
            overwrite: whether an earlier run there may be removed; anything else never is.

        Raises:
            ConfigError: the folder holds something, or cannot be made.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            if not (overwrite and (path / CONFIG).is_file()):
                hint = "or pass --overwrite" if (path / CONFIG).is_file() else "or another path"
                raise ConfigError(
                    f"out = {str(path)!r} is not empty: expected a new folder, {hint}"
                )
            shutil.rmtree(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise ConfigError(f"out = {str(path)!r} cannot be made: {problem.strerror}") from None
        return cls(path)

    def write_config(self, config: SimulationConfig) -> None:
        """Write the resolved settings."""
        with self._replacing(CONFIG) as path:
            config.write(path)

    def write_events(self, events: pa.Table) -> None:
        """Write one row a job."""
        with self._replacing(EVENTS) as path:
            pq.write_table(events, path)

    def write_metrics(self, rows: list[tuple[float, int, str, str, float]]) -> None:
        """Write one row a measured value: time in s, version, source, name, value."""
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(METRICS_SCHEMA)
        table = pa.table(
            dict(zip(METRICS_SCHEMA.names, columns, strict=True)), schema=METRICS_SCHEMA
        )
        with self._replacing(METRICS) as path:
            pq.write_table(table, path)

    def write_model(self, arrays: ArrayRecord) -> None:
        """Write the last model."""
        with self._replacing(MODEL) as path:
            path.write_bytes(save({name: array.numpy() for name, array in arrays.items()}))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the plain figures of the run."""
        with self._replacing(SUMMARY) as path:
            path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")

    @contextmanager
    def _replacing(self, name: str) -> Iterator[Path]:
        part = self.path / f".{name}.part"
        try:
            yield part
            os.replace(part, self.path / name)
        finally:
            part.unlink(missing_ok=True)
