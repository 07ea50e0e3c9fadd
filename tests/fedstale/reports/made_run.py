"""Makes run folders by hand, with every kind of ending and with names of ill will."""

import numpy as np
import pandas as pd
import pyarrow as pa

from fedstale.config import SimulationConfig
from fedstale.reports.costs import ledger
from fedstale.reports.folder import ONLINE_SCHEMA, RunFolder
from fedstale.simulation.jobs import COLUMNS, EXPIRED, IN_FLIGHT, INTERRUPTED, LATE, JobRow, table
from fedstale.strategies.server.runtime import REPORTED

EVERYTHING = {"forecasts": True, "about": {"epoch": "2024-01-01T06:00:00"}}
"""What a run of devices with a clock that forecast themselves has, besides."""
ENDINGS = [REPORTED, REPORTED, REPORTED, INTERRUPTED, LATE, EXPIRED, IN_FLIGHT]
HOSTILE = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt=1'>"


def job(job_id, *, device, status, sent_at, **other):
    """Return a job of 10 s down, 60 s of training and 20 s up, or what its ending leaves of it."""
    is_done = status in {REPORTED, LATE}
    has_started = status != EXPIRED
    at = np.where([has_started, has_started, is_done, is_done], [5.0, 15.0, 75.0, 95.0], np.inf)
    started, downloaded, trained, reported = (sent_at + at).tolist()
    ended = reported if is_done else sent_at + (45.0 if has_started else 0.0)
    fields = {
        **dict(job_id=job_id, node_id=1000 + device, device=device),
        **dict(kind="train", round=1, status=status, sent_at=sent_at, started_at=started),
        **dict(downloaded_at=downloaded, trained_at=trained, reported_at=reported),
        **dict(ended_at=ended, delivered_at=ended, download_s=10.0 * has_started),
        **dict(compute_s=60.0 if is_done else 30.0 * has_started, upload_s=20.0 * is_done),
        **dict(work=60.0, downloaded_bytes=1e6 * has_started, uploaded_bytes=1e6 * is_done),
    }
    return {**fields, **other}


def table_of(jobs, device_ids):
    """Return the events table of jobs, whose other columns are those of a job just sent."""
    columns = {
        name: [row.get(name, getattr(JobRow, name).default) for row in jobs] for name in COLUMNS
    }
    return table(columns, device_ids)


def write_run(
    path,
    *,
    n_jobs=70,
    n_devices=7,
    names=None,
    metrics=None,
    stale=True,
    app="digits",
    reason="",
    executor="inline",
    online=None,
    wall_s=(),
    forecasts=False,
    about=None,
):
    """Write a run's folder and return its path."""
    rng = np.random.default_rng(1)
    jobs = []
    for number in range(n_jobs):
        status = ENDINGS[number % len(ENDINGS)]
        extra = {"reason": reason or f"it ended as {status}"} if status != REPORTED else {}
        if stale and status == REPORTED:
            staleness = float(rng.integers(0, 6))
            extra |= {"staleness": staleness, "weight": 1 / np.sqrt(1 + staleness)}
        if forecasts:
            chance, duration_s = rng.uniform(), rng.lognormal(np.log(95.0), 0.5)
            extra |= {"reported_p_finish": chance, "reported_duration_s": duration_s}
        device = int(rng.integers(n_devices)) if n_jobs else 0
        jobs.append(job(number, device=device, status=status, sent_at=30.0 * number, **extra))
    ids = pd.Index(names or [f"phone-{i}" for i in range(n_devices)])
    events = table_of(jobs, ids)
    if metrics is None:
        metrics = [
            (30.0 * job, job, source, name, value)
            for job in range(0, n_jobs, 5)
            for source, name, value in (
                ("server", "accuracy", 1 - 1 / (job + 2)),
                ("server", "loss", 5 / (job + 2)),
                ("train", "train_loss", 4 / (job + 2)),
            )
        ]
    with RunFolder.create(path) as folder:
        folder.write_config(SimulationConfig(app=app, traces="given"))
        folder.write_events(events)
        folder.write_metrics(metrics)
        folder.write_wall(wall_s)
        if online is not None:
            rows = [dict(zip(ONLINE_SCHEMA.names, row, strict=True)) for row in online]
            folder.write_online(pa.Table.from_pylist(rows, schema=ONLINE_SCHEMA))
        folder.write_summary(
            {
                **dict(status="finished", reason="", app=app, devices=n_devices, seed=0),
                **dict(executor=executor),
                **dict(virtual_s=30.0 * n_jobs + 60.0, wall_s=1.0, rounds=n_jobs // 5),
                **ledger(events),
                "metrics": {},
                **(about or {}),
            }
        )
    return path
