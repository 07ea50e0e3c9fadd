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

import pyarrow as pa
import tomli_w
from flwr.app import Context
from flwr.serverapp import Grid

from fedstale.config import Until
from fedstale.deployment.job_log import JobLog
from fedstale.reports.costs import ledger
from fedstale.reports.folder import CONFIG, DEPLOYED, RunFolder
from fedstale.reports.run import report_at_end
from fedstale.simulation.metrics import RunMetrics
from fedstale.simulation.stock_strategies import report_stock_strategies
from fedstale.strategies.server.runtime import Runtime
from fedstale.strategies.server.superlink import SuperLinkGrid, connected


@contextmanager
def recorded(grid: Grid, folder: str | Path, context: Context, *, app: str) -> Iterator[Grid]:
    """Note what happens in a run on real devices, and write the run's folder in the end.

    A simulation writes a folder of its own: its grid is given back as it is.

    Args:
        grid: of a ServerApp.
        folder: where, on the server; empty writes none.
        context: of the ServerApp, for the run config.
        app: its name.

    Raises:
        ConfigError: the folder holds something, or cannot be made.
    """
    if not str(folder):
        yield grid
        return
    own = connected(grid)
    if not isinstance(own, SuperLinkGrid):
        yield own
        return
    with RunFolder.create(Path(folder)) as opened, own:
        table = {"app": app, "run_config": dict(context.run_config)}
        (opened.path / CONFIG).write_text(tomli_w.dumps(table), encoding="utf-8")
        log, metrics = JobLog(), RunMetrics(Until())
        own.runtime.add(log)
        own.runtime.add(metrics)
        report_stock_strategies()
        started, status, reason = time.perf_counter(), "finished", ""
        try:
            yield own
        except BaseException as problem:
            status, reason = "failed", f"{type(problem).__name__}: {problem}"
            raise
        finally:
            own.runtime.ended(status, reason)
            facts = {
                "status": status,
                "reason": reason,
                "app": app,
                "devices": log.n_nodes,
                "seed": context.run_config.get("seed", 0),
                "executor": DEPLOYED,
                "wall_s": round(time.perf_counter() - started, 3),
            }
            write_run(opened, own.runtime, log.events(), metrics, facts)


def write_run(
    folder: RunFolder, run: Runtime, events: pa.Table, metrics: RunMetrics, facts: Mapping[str, Any]
) -> None:
    """Write what came of a run.

    Args:
        folder: of the run.
        run: that has ended.
        events: what happened, one row a job.
        metrics: what was measured.
        facts: for the summary: status, reason, app, devices, seed and the like.
    """
    folder.write_events(events)
    folder.write_metrics(metrics.rows)
    if metrics.arrays is not None:
        folder.write_model(metrics.arrays)
    folder.write_summary(
        {
            **facts,
            "virtual_s": run.now(),
            "rounds": metrics.rounds,
            **_known(ledger(events)),
            "metrics": metrics.latest,
        }
    )
    report_at_end(folder.path)


def _known(accounts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return accounts with None for a sum of which nobody knows all the parts."""
    return {
        name: {key: value if isfinite(value) else None for key, value in parts.items()}
        for name, parts in accounts.items()
    }
