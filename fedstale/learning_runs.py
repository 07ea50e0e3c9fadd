"""Fit learning constants to the folders of runs.

Needed are the model's loss on the server at some versions, the first one among them, and which
jobs went into each version. Strategies of fedstale record both where the app evaluates the model on
the server; Flower's own strategies do not say which reply went into which version.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedstale import __version__
from fedstale.agents.env.learning_emulators import out_of_sample
from fedstale.agents.env.learning_fit import FREE, LearningFit, LearningRun, checked, fit_learning
from fedstale.errors import ConfigError
from fedstale.reports.run import Run

LOSS = "loss"
"""Metric of the server that is fitted to."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class FittedRuns:
    """A fit to the folders of runs."""

    fit: LearningFit
    """The constants."""
    table: pd.DataFrame
    """How well each emulator predicts runs that were left out; see `out_of_sample`."""
    provenance: dict[str, Any]
    """What the file of constants says of how it was made."""

    def write(self, path: str | Path) -> None:
        """Write a file of constants, which training and evaluation of agents accept.

        Raises:
            ConfigError: it cannot be written.
        """
        self.fit.write(path, self.provenance)


def fit_runs(folders: Sequence[str | Path], *, seed: int = 0) -> FittedRuns:
    """Fit how a model learns to some runs of one app.

    Args:
        folders: see `read_learning_runs`.
        seed: of the deals of data, and of which runs are left out together.

    Raises:
        ConfigError: as of `read_learning_runs`.
        ProtocolError: a file in a folder cannot be read.
    """
    runs = read_learning_runs(folders)
    fit = fit_learning(runs, seed=seed)
    table = out_of_sample(runs, fit, seed=seed)
    rows = [{name: plain(value) for name, value in row.items()} for row in table.to_dict("records")]
    provenance: dict[str, Any] = {
        "fedstale": __version__,
        "runs": [Path(folder).name for folder in folders],
        "seed": seed,
        "skew": fit.skew,
        "kept": [name for name in fit.spread if name not in FREE],
        # TOML has no null: what is not known is left out.
        "out_of_sample": [{k: v for k, v in row.items() if v is not None} for row in rows],
    }
    return FittedRuns(fit=fit, table=table, provenance=provenance)


def plain(value: Any) -> Any:  # noqa: ANN401 - of a data frame
    """Return a value of a table as JSON has it; None for NaN."""
    if isinstance(value, float):
        return None if np.isnan(value) else round(value, 6)
    return value


def read_learning_runs(folders: Sequence[str | Path]) -> list[LearningRun]:
    """Return what run folders tell of how their app learns.

    Args:
        folders: what `fedstale simulate` wrote, or deployed apps with a run folder; at least 5,
            each once.

    Raises:
        ConfigError: a folder has not what is needed, occurs twice, or they are too few, or of
            different apps.
        ProtocolError: a file in one cannot be read.
    """
    places = [Path(folder).resolve() for folder in folders]
    for folder, place in zip(folders, places, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"run = {str(folder)!r} is given twice: expected each run once")
    runs = [learning_run(folder) for folder in folders]
    checked(runs)
    return runs


def learning_run(folder: str | Path) -> LearningRun:
    """Return what one run folder tells; errors as of `read_learning_runs`."""
    run, name = Run(folder), f"run = {str(folder)!r}"
    jobs = run.jobs
    merged = jobs[jobs["aggregated_version"] >= 1]
    if merged.empty:
        raise ConfigError(
            f"{name}: no job says which version it went into: expected a run by a strategy of "
            "fedstale, such as -c \"strategy='fedavg'\""
        )
    metrics = run.metrics
    losses = metrics[metrics["source"].eq("server") & metrics["name"].eq(LOSS)]
    if losses.empty:
        raise ConfigError(
            f"{name}: the server measured no {LOSS}: expected an app whose server evaluates the "
            f"model and reports {LOSS!r}"
        )
    # A version that was evaluated twice is the same model.
    losses = losses.drop_duplicates("version").sort_values("version")
    last = int(merged["aggregated_version"].max())
    losses = losses[losses["version"] <= last]
    # Devices that never got a job are part of the fleet; each known one has a place.
    places = {device: i for i, device in enumerate(dict.fromkeys(jobs["device_id"]))}
    each = [merged[merged["aggregated_version"].eq(v)] for v in range(1, last + 1)]
    busy = merged["delivered_at"] - merged["sent_at"]
    moved = merged[["downloaded_bytes", "uploaded_bytes"]].max(axis=1)
    return LearningRun(
        name=name,
        app=Path(str(run.summary["app"])).name,
        n_devices=max(int(run.summary["devices"]), len(places)),
        versions=losses["version"].to_numpy(dtype=np.int64),
        losses=losses["value"].to_numpy(dtype=np.float64),
        merged=[part["device_id"].map(places).to_numpy(dtype=np.int64) for part in each],
        weights=[part["weight"].fillna(1.0).to_numpy(dtype=np.float64) for part in each],
        staleness=np.array(
            [part["staleness"].fillna(0.0).mean() if len(part) else 0.0 for part in each]
        ),
        job_s=float(busy.median()),
        n_bytes=float(moved.median()),
    )
