"""Writes folders of finished runs by hand: settings, seed, and what was measured when."""

import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd

from fedstale.config import SimulationConfig
from fedstale.reports.costs import ledger
from fedstale.reports.folder import RunFolder
from fedstale.simulation.jobs import INTERRUPTED
from fedstale.strategies.server.runtime import REPORTED

sys.path.append(str(Path(__file__).parent.parent / "reports"))

BASE = SimulationConfig(app="digits", traces="synthetic:5", until="1h")


def write_finished(
    path, *, seed=0, accuracies=(), status="stopped", end_s=3600.0, source="server", **settings
):
    """Write a run that measured accuracies, as pairs of an instant in s and a value."""
    from made_run import job, table_of

    jobs = [
        job(0, device=0, status=REPORTED, sent_at=0.0),
        job(1, device=1, status=INTERRUPTED, sent_at=10.0),
    ]
    events = table_of(jobs, pd.Index(["phone-0", "phone-1"]))
    with RunFolder.create(path) as folder:
        folder.write_config(replace(BASE, seed=seed, **settings))
        folder.write_events(events)
        folder.write_metrics(
            [(time, i, source, "accuracy", value) for i, (time, value) in enumerate(accuracies)]
        )
        folder.write_summary(
            {
                **dict(status=status, reason="", app="digits", devices=2, seed=seed),
                **dict(virtual_s=end_s, wall_s=1.0, rounds=len(accuracies)),
                **ledger(events),
                "metrics": {},
            }
        )
    return path
