"""Makes run folders in which devices state chances and durations, job by job."""

import pandas as pd
from made_run import job, table_of

from fedstale.config import SimulationConfig
from fedstale.reports.costs import ledger
from fedstale.reports.folder import RunFolder


def write_stated(path, jobs, *, n_devices=3, app="digits", names=None, online=None):
    """Write the folder of a run whose jobs are given as those of `stated`."""
    events = table_of(
        [{**row, "job_id": i} for i, row in enumerate(jobs)],
        pd.Index(names or [f"phone-{i}" for i in range(n_devices)]),
    )
    with RunFolder.create(path) as folder:
        folder.write_config(SimulationConfig(app=app, traces="given"))
        folder.write_events(events)
        folder.write_metrics([])
        if online is not None:
            folder.write_online(online)
        folder.write_summary(
            {
                **dict(status="finished", reason="", app=app, devices=n_devices, seed=0),
                **dict(executor="inline", virtual_s=1e6, wall_s=1.0, rounds=1),
                **ledger(events),
                "metrics": {},
            }
        )
    return path


def stated(device, at, status="reported", p=float("nan"), duration_s=float("nan"), **more):
    """Return a training job; one that comes back does so 95 s after its sending."""
    said = {"reported_p_finish": p, "reported_duration_s": duration_s}
    return job(0, device=device, status=status, sent_at=float(at), **{**said, **more})


def asked(device, at):
    """Return a query that was answered, which carries a statement."""
    return stated(device, at, kind="query.forecast", delivered_at=float(at) + 1.0)


def told(device, outcomes, p, *, every_s=1000.0, duration_s=float("nan")):
    """Return jobs of a device, each after a query, finished (1) or lost (0) as `outcomes` say."""
    jobs = []
    for i, kept in enumerate(outcomes):
        at = i * every_s
        status = "reported" if kept else "interrupted"
        chance = p[i] if hasattr(p, "__len__") else p
        jobs += [asked(device, at), stated(device, at + 10, status, chance, duration_s)]
    return jobs
