"""The folder of a run whose process was lost, from what it has left in its black box."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from fedstale.config import Costs, SimulationConfig, Until
from fedstale.errors import ResumeError
from fedstale.last_call import LAST_CALL, Kept, LastCall
from fedstale.reports.run import Run
from fedstale.runs import CONFIG, RunFolder
from fedstale.simulation.executors import Executor
from fedstale.simulation.jobs import JobTable
from fedstale.simulation.metrics import RunMetrics, write_run
from fedstale.simulation.run import current_model, enrolled
from fedstale.simulation.trace_grid import TraceGrid
from fedstale.strategies.server import CLIENT_ERROR, RunEnded, read_checkpoint
from fedstale.traces import TraceSet


class _NoClients(Executor):
    def run(self, calls: Any) -> Any:  # noqa: ANN401 - nothing is pulled from this grid
        raise NotImplementedError


def recovered(kept: Kept, pid: int, status: int, *, used_bytes: int) -> Run | None:
    """Write the folder of a run whose process has ended: what happened so far, and why it failed.

    What the run's clients did after their device had been followed is in no table: jobs under way
    count as in flight. Checkpoints stay, so `--resume` goes on.

    Args:
        kept: the files that the process was given.
        pid: of the process.
        status: with which it ended, as `os.waitpid` returns it.
        used_bytes: the most memory that it had at a time.

    Returns:
        The run; None if the process ended it by itself, or never began one.
    """
    logged = list(kept.lines())
    begun = next((line for line in logged if line[0] == "run"), None)
    call = None if begun is None else LastCall.read(Path(begun[1]))
    if begun is None or call is None or call.pid != pid:
        return None
    folder, about = Path(begun[1]), begun[2]
    wall_s = 0.0 if call.job_id is None else time.perf_counter() - call.started
    config = SimulationConfig.read(folder / CONFIG)
    traces = enrolled(TraceSet.load(config.traces, seed=config.seed), config)
    costs = Costs.from_table(config.costs)
    grid = TraceGrid(
        traces,
        _NoClients(),
        costs=costs,
        seed=config.seed,
        run_config=dict(config.run_config),
        on_interrupt=config.on_interrupt,
    )
    jobs = JobTable.left_in(kept.jobs, [line[2] for line in _words(logged)])
    how = _how(status, wall_s, config.client_limit_s, used_bytes)
    now, device = _instant(jobs, call), ""
    if call.job_id is not None:
        row = jobs[call.job_id]
        device = str(traces.device_ids[row.device])
        row.status, row.reason = CLIENT_ERROR, f"the client {how}"
        # Its client may run before its reply is due: nothing is, now.
        row.visible_at = min(row.visible_at, now)
    reason = f"{call.words(device)} {how}"
    _place_unfollowed(jobs, traces.n_devices, costs.download_overhead_s or 0.0)
    with RunFolder(folder) as opened:
        opened.write_events(grid.tables_of(jobs, now))
        facts = {
            "status": "failed",
            "reason": reason,
            "app": about["app"],
            "devices": traces.n_devices,
            "seed": config.seed,
            "epoch": traces.epoch,
            "executor": about["executor"],
            "trained_for_nothing": 0,
            "wall_s": round(time.time() - (folder / CONFIG).stat().st_mtime, 3),
            "crash": {
                "job": call.job_id,
                "device": device or None,
                "kind": call.kind or None,
                "how": how,
                "lines": list(call.lines),
            },
        }
        run = write_run(opened, grid.runtime, _measured(logged, config, opened), facts)
        (folder / LAST_CALL).unlink(missing_ok=True)
    return run


def _words(logged: list[list[Any]]) -> list[list[Any]]:
    """Return the lines of texts by number; a run that went on has told some twice."""
    return [
        line for _, line in sorted({line[1]: line for line in logged if line[0] == "word"}.items())
    ]


def _how(status: int, took_s: float, limit_s: float | None, used_bytes: int) -> str:
    """Return in words how a process ended."""
    if os.WIFSIGNALED(status):
        number = signal.Signals(os.WTERMSIG(status))
        if number == signal.SIGKILL:
            return (
                "was killed (SIGKILL), as the system does when memory runs out; the process had "
                f"used at most {used_bytes / 1e9:.2f} GB"
            )
        return f"ended the process by {number.name} ({signal.strsignal(number)})"
    code = os.waitstatus_to_exitcode(status)
    if limit_s is not None and took_s >= limit_s and code == 1:
        return f"did not end within {limit_s:g} s (client-limit-s)"
    return f"ended the process with exit code {code}"


def _instant(jobs: JobTable, call: LastCall) -> float:
    """Return the virtual instant in s at which the process was lost."""
    columns = jobs.columns
    seen = np.concatenate([columns["sent_at"], columns["delivered_at"], [call.now]])
    return float(seen[np.isfinite(seen)].max())


def _place_unfollowed(jobs: JobTable, n_devices: int, overhead_s: float) -> None:
    """Say from when on devices are free for jobs that nobody has followed yet."""
    columns, used = jobs.columns, np.arange(len(jobs))
    unknown = np.isnan(columns["free_at"][used])
    free_at = np.zeros(n_devices)
    known = used[~unknown]
    np.maximum.at(free_at, columns["device"][known], columns["ended_at"][known])
    for row in used[unknown].tolist():
        device, sent_at = int(columns["device"][row]), float(columns["sent_at"][row])
        columns["free_at"][row] = max(free_at[device], sent_at) + overhead_s
        # Its next job waits for this one, whose end is not known.
        free_at[device] = np.inf


def _measured(logged: list[list[Any]], config: SimulationConfig, folder: RunFolder) -> RunMetrics:
    """Return what was measured, with the model of the last checkpoint."""
    first = max((i for i, line in enumerate(logged) if line[0] == "checkpoint"), default=0)
    metrics = RunMetrics(Until.parse(config.until))
    last = {"train": 0, "query": 0}
    for what, *values in logged[first:]:
        if what == "metrics":
            now, version, source, measured = values
            last[source] = max(last.get(source, 0), version)
            rounds = last["train"] or last["query"]
            run: Any = SimpleNamespace(now=lambda now=now: now, rounds=rounds)
            with suppress(RunEnded):
                metrics.metrics(run, version, source, measured)
    with suppress(ResumeError):
        metrics.arrays = current_model(read_checkpoint(folder.checkpoints)["strategy"]["versions"])
    return metrics
