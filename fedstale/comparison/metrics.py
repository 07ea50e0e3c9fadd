"""What the runs of a comparison measured, and which runs belong to one variant.

A metric counts as `--until` counts it: from a central evaluation if there is one, else from the
clients. A run that never reached the target counts with the time that it had: with its limit where
it had one; a run whose app ended by itself keeps its model, so it counts to the end of the longest.
"""

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedstale.compare.folders import flat
from fedstale.compare.statistics import Reached
from fedstale.config import SimulationConfig, Until
from fedstale.errors import ConfigError
from fedstale.reports.curves import BOOKKEEPING
from fedstale.reports.figure import Array
from fedstale.reports.run_record import RunRecord
from fedstale.reports.wording import wasted

_SOURCES = ("server", "evaluate", "train")
_DECIDING = ("server", "evaluate")
_WIDEST = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one run measured."""

    variant: str
    seed: int
    folder: Path
    status: str
    end_s: float
    """Virtual instant at which it ended, in s."""
    limit_s: float
    """Virtual time that it had, in s; inf if its app ended by itself without such a limit."""
    spending: Mapping[str, float]
    """Rounds, and where device time and bytes went."""
    metrics: pd.DataFrame
    """One row a measured value."""

    def curve(self, metric: str, source: str) -> tuple[Array, Array]:
        """Return instants in s and values of a metric, each of shape (measurements,)."""
        rows = self.metrics[(self.metrics["name"] == metric) & (self.metrics["source"] == source)]
        return rows["time_s"].to_numpy(np.float64), rows["value"].to_numpy(np.float64)

    def last(self, source: str) -> dict[str, float]:
        """Return the last value of every metric from a source."""
        rows = self.metrics[self.metrics["source"] == source]
        last = rows.groupby("name")["value"].last()
        return {str(name): float(value) for name, value in last.items() if name not in BOOKKEEPING}

    def reached(self, target: Until, source: str, horizon_s: float) -> Reached:
        """Return when the run reached a target.

        Args:
            target: a metric and its value.
            source: of the metric.
            horizon_s: what counts where nothing has cut the run off.
        """
        assert target.metric is not None
        for time, value in zip(*self.curve(target.metric, source), strict=True):
            if target.is_reached(0, {target.metric: float(value)}):
                return Reached(at_s=float(time), ever=True)
        had = self.limit_s if np.isfinite(self.limit_s) else max(self.end_s, horizon_s)
        return Reached(at_s=float(had), ever=False)


def read(variant: str, folder: Path) -> Measured:
    """Read what a run measured.

    Raises:
        ConfigError: it is not the folder of a run that came to its end.
        ProtocolError: a file in it cannot be read.
    """
    record = RunRecord.read(folder)
    status = str(record.summary["status"])
    if status in ("failed", "interrupted"):
        raise ConfigError(
            f"run = {str(folder)!r} {'failed' if status == 'failed' else 'was interrupted'}: "
            "expected a run that came to its end"
        )
    until = Until.parse(tomllib.loads(record.config_text).get("until"))
    # Rounds and metrics cut a run off as well, wherever it stood.
    is_cut = status == "stopped" and not np.isfinite(until.time_s)
    return Measured(
        variant=variant,
        seed=int(record.summary["seed"]),
        folder=folder,
        status=status,
        end_s=record.end_s,
        limit_s=record.end_s if is_cut else until.time_s,
        spending={
            "rounds": float(record.summary["rounds"]),
            "virtual_s": record.end_s,
            "jobs": float(len(record.events)),
            "device_s": float(record.busy_s.sum()),
            "device_time_wasted": wasted(record),
            "bytes": float(record.moved_bytes.sum()),
        },
        metrics=record.metrics,
    )


def deciding_source(runs: Sequence[Measured], metric: str) -> str | None:
    """Return the source of a metric: the first that all runs have, else the first that any has."""
    has = [{source for source in _SOURCES if len(run.curve(metric, source)[0])} for run in runs]
    for found in (set.intersection(*has), set.union(*has)) if has else ():
        for source in _SOURCES:
            if source in found:
                return source
    return None


def target_source(runs: Sequence[Measured], target: Until) -> str:
    """Return the source of the target's metric.

    Raises:
        ConfigError: no run measured it where it could decide.
    """
    assert target.metric is not None
    source = deciding_source(runs, target.metric)
    if source not in _DECIDING:
        known = sorted({name for run in runs for source in _DECIDING for name in run.last(source)})
        near = get_close_matches(target.metric, known, n=1)
        accepted = repr(near[0]) if near else f"one of {known}" if known else "an evaluating app"
        raise ConfigError(
            f"target: no run measured {target.metric!r} in an evaluation: expected {accepted}"
        )
    return source


def grouped(folders: Sequence[Path]) -> dict[Path, str]:
    """Return the variant of each of some runs, named after the settings in which they differ.

    Seeds make no difference, nor do run-config keys that equal the run's seed in all runs.

    Raises:
        ConfigError: a folder is not that of a run, or two runs of a variant have the same seed.
    """
    settings, seeds = {}, {}
    for folder in folders:
        config = SimulationConfig.read(folder / "config.toml")
        settings[folder], seeds[folder] = flat(config), config.seed
    names = {}
    for key in dict.fromkeys(key for one in settings.values() for key in one):
        values = [settings[folder].get(key) for folder in folders]
        is_seed = key == "seed" or (
            key.startswith("run-config.")
            and all(values[i] == seeds[folder] for i, folder in enumerate(folders))
        )
        if not is_seed and len({repr(value) for value in values}) > 1:
            names[key] = key.removeprefix("run-config.").removeprefix("costs.")
    variants: dict[Path, str] = {}
    taken: dict[tuple[str, int], Path] = {}
    for folder in folders:
        said = [f"{names[key]}={settings[folder].get(key)}" for key in names]
        variant = _shortened(printable(", ".join(said) or str(settings[folder]["app"])))
        other = taken.setdefault((variant, seeds[folder]), folder)
        if other != folder:
            raise ConfigError(
                f"runs {str(other)!r} and {str(folder)!r} have the same settings and seed "
                f"{seeds[folder]}: expected one run a seed"
            )
        variants[folder] = variant
    return variants


def printable(text: str) -> str:
    r"""Return text that a terminal shows and does not obey.

    Example:
        >>> print(printable("fast\x1b[2J"))
        fast\x1b[2J
    """
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _shortened(text: str) -> str:
    """Return text with its middle left out if it is long, and a checksum that keeps it distinct."""
    if len(text) <= _WIDEST:
        return text
    checksum = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=3).hexdigest()
    return f"{text[: _WIDEST - 8]}…{checksum}"


def plain_values(run: Measured, sources: Mapping[str, str]) -> dict[str, Any]:
    """Return what a run measured by name: the last value of each metric, and its spending.

    Args:
        run: the run.
        sources: the source of each metric.
    """
    last = {source: run.last(source) for source in _SOURCES}
    metrics = {
        f"{source} {name}": last[source][name]
        for name, source in sources.items()
        if name in last[source]
    }
    return {**metrics, **run.spending}
