"""The run folder of an app on real devices, as `fedstale simulate` writes one.

The server sees when it sends a job and when the reply arrives; what a device did in between, and
how many bytes a lost job has moved, it does not see. These stay NaN in events.parquet.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import tomli_w
from flwr.app import Context
from flwr.serverapp import Grid

from fedstale.config import Until
from fedstale.deployment.recorded_grid import RecordedGrid
from fedstale.reports.costs import ledger
from fedstale.reports.folder import CONFIG, DEPLOYED, RunFolder
from fedstale.reports.run import report_at_end
from fedstale.simulation.progress import Progress
from fedstale.simulation.stock_strategies import probe
from fedstale.strategies.server.observer import Observer
from fedstale.strategies.server.superlink import without_stalls


@contextmanager
def recorded(grid: Grid, folder: str | Path, context: Context, *, app: str) -> Iterator[Grid]:
    """Give a grid that notes what happens, and write the run's folder in the end.

    A grid that records runs itself, as in a simulation, is given back as it is.

    Args:
        grid: of a ServerApp.
        folder: where, on the server; empty writes none.
        context: of the ServerApp, for the run config.
        app: its name.

    Raises:
        ConfigError: the folder holds something, or cannot be made.
    """
    if not str(folder) or isinstance(grid, Observer):
        yield grid
        return
    with RunFolder.create(Path(folder)) as opened, without_stalls(grid) as reached:
        table = {"app": app, "run_config": dict(context.run_config)}
        (opened.path / CONFIG).write_text(tomli_w.dumps(table), encoding="utf-8")
        noted, progress = RecordedGrid(reached), Progress(Until())
        noted.on_aggregated = progress.aggregated
        noted.on_measured = lambda version, source, metrics: progress.measured(
            noted.now(), version, source, metrics
        )
        started, status, reason = time.perf_counter(), "finished", ""
        try:
            with probe(noted.on_measured, noted.on_aggregated):
                yield noted
        except BaseException as problem:
            status, reason = "failed", f"{type(problem).__name__}: {problem}"
            raise
        finally:
            facts = {
                "status": status,
                "reason": reason,
                "app": app,
                "devices": len({flight.node_id for flight in noted.flights}),
                "seed": context.run_config.get("seed", 0),
                "executor": DEPLOYED,
                "wall_s": round(time.perf_counter() - started, 3),
            }
            write_run(opened, noted, progress, facts)


def write_run(
    folder: RunFolder, grid: RecordedGrid, progress: Progress, facts: Mapping[str, Any]
) -> None:
    """Write what came of a run.

    Args:
        folder: of the run.
        grid: what happened.
        progress: what was measured.
        facts: for the summary: status, reason, app, devices, seed and the like.
    """
    events = grid.events()
    folder.write_events(events)
    folder.write_metrics(progress.rows)
    if progress.arrays is not None:
        folder.write_model(progress.arrays)
    folder.write_summary(
        {
            **facts,
            "virtual_s": grid.now(),
            "rounds": progress.rounds,
            **_known(ledger(events)),
            "metrics": progress.latest,
        }
    )
    report_at_end(folder.path)


def _known(accounts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return accounts with None for a sum of which nobody knows all the parts."""
    return {
        name: {key: value if isfinite(value) else None for key, value in parts.items()}
        for name, parts in accounts.items()
    }
