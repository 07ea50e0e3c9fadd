"""Runs the simulations of a comparison in processes of their own, and goes on where it stopped.

Each run is an ordinary run folder. A run whose folder holds its end is not repeated, one that was
interrupted or killed goes on from its last checkpoint, one that failed begins anew. Traces that
several runs need are read once, and their arrays are in the memory of the machine once.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedstale.comparison.plan import PlannedRun
from fedstale.config import SimulationConfig, Until
from fedstale.errors import ConfigError, FedstaleError
from fedstale.live.watching import Watcher
from fedstale.parallel import Report, WorkerPool
from fedstale.reports.folder import CONFIG, LOCK, SUMMARY
from fedstale.simulation.run import simulate
from fedstale.strategies.server.runtime import Runtime
from fedstale.traces import TraceSet
from fedstale.traces.io.mapped import Shared, share

_REPORT_EVERY_S = 0.5


State = Literal["new", "half", "failed", "done"]
Watch = Callable[[Mapping[Path, float]], None]
"""Called with the share of each run that is over, by folder, whenever one has moved."""


def run(
    runs: Sequence[PlannedRun], *, workers: int, log: Path, overwrite: bool = False, watch: Watch
) -> dict[Path, str]:
    """Run what is not done yet.

    Args:
        runs: the runs.
        workers: processes at a time.
        log: file that gets what runs print.
        overwrite: whether finished and unfinished runs are begun anew.
        watch: called with how far the runs are.

    Returns:
        Why a run failed, by its folder, in the order of the runs; all others are done.

    Raises:
        ConfigError: a folder holds another run, or a run cannot begin; the others keep what they
            have done.
        KeyboardInterrupt: it was asked to stop; the runs keep what they have done. The message
            states how many are done.
    """
    states = {run.folder: "failed" if overwrite else state(run) for run in runs}
    todo = [run for run in runs if states[run.folder] != "done"]
    shares = {run.folder: float(states[run.folder] == "done") for run in runs}
    watch(shares)
    failed: dict[Path, str] = {}
    try:
        with ExitStack() as stack, WorkerPool(_simulated, log) as pool:
            shared = _shared_traces(todo, log.parent, stack)
            jobs = (_Job(run=run, begun=states[run.folder], traces=shared(run)) for run in todo)
            for job, news, what in pool.work(jobs, workers):
                folder = job.run.folder
                if news == "rejected":
                    raise _not_begun(job.run, what)
                if news == "died" or (news == "done" and what):
                    failed[folder] = " ".join(what.split())
                shares[folder] = what if news == "progress" else 1.0
                watch(shares)
    except KeyboardInterrupt:
        n_done = sum(state(run) == "done" for run in runs)
        raise KeyboardInterrupt(f"interrupted with {n_done} of {len(runs)} runs done") from None
    return {run.folder: failed[run.folder] for run in runs if run.folder in failed}


def state(run: PlannedRun) -> State:
    """Return how far a run is, by what its folder holds.

    Raises:
        ConfigError: the folder holds another run, or what is no run.
    """
    if not (run.folder / CONFIG).is_file():
        # A process that is killed while it writes its first file leaves a part of it.
        for part in run.folder.glob(".*.part"):
            part.unlink()
        if run.folder.is_dir() and any(f.name != LOCK for f in run.folder.iterdir()):
            raise ConfigError(
                f"{str(run.folder)!r} holds something that is no run: expected an empty folder "
                "or none; choose another --out"
            )
        return "new"
    changed = SimulationConfig.read(run.folder / CONFIG).differing(run.config)
    if changed:
        raise ConfigError(
            f"{str(run.folder)!r} holds a run with {changed}: choose another --out, or pass "
            "--overwrite to run everything again"
        )
    summary = run.folder / SUMMARY
    if not summary.is_file():
        return "half"
    try:
        status = json.loads(summary.read_text(encoding="utf-8"))["status"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(
            f"{str(summary)!r} cannot be read: remove the folder of that run, or pass --overwrite"
        ) from None
    ended: dict[str, State] = {"interrupted": "half", "failed": "failed"}
    return ended.get(str(status), "done")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What a process is given."""

    run: PlannedRun
    begun: State
    traces: Shared[TraceSet] | None
    """None if it reads them itself."""


def _shared_traces(
    runs: Sequence[PlannedRun], folder: Path, stack: ExitStack
) -> Callable[[PlannedRun], Shared[TraceSet] | None]:
    """Return a function that gives the traces of a run; None if no other run needs them.

    They are read when they are first needed, into files that all processes map into their memory.
    The stack deletes the files; processes that have mapped them keep what they have.
    """

    def key(run: PlannedRun) -> tuple[str, int]:
        # Recordings do not depend on the seed of a run.
        is_drawn = TraceSet.is_synthetic(run.config.traces)
        return run.config.traces, run.seed if is_drawn else 0

    uses, shared = Counter(map(key, runs)), dict[tuple[str, int], Shared[TraceSet]]()

    def of(run: PlannedRun) -> Shared[TraceSet] | None:
        if uses[key(run)] > 1 and key(run) not in shared:
            path = folder / f".traces-{len(shared)}"
            try:
                traces = TraceSet.load(run.config.traces, seed=run.seed)
                shared[key(run)] = share(traces, path)
            except (FedstaleError, OSError) as problem:
                raise _not_begun(run, problem) from None
            stack.callback(path.unlink, missing_ok=True)
        return shared.get(key(run))

    return of


def _not_begun(run: PlannedRun, problem: object) -> ConfigError:
    return ConfigError(f"variant {run.variant!r}, seed {run.seed}: {problem}")


class _ShareDone(Watcher):
    """Reports how much of a run is done."""

    def __init__(self, until: Until, report: Report) -> None:
        super().__init__(until, every_s=_REPORT_EVERY_S)
        self._report = report

    def look(self, run: Runtime) -> None:
        self._report(self.share(run.now()) or 0.0)

    def ended(self, run: Runtime, status: str, reason: str) -> None:
        """Report nothing: if the first process is gone, the run's folder is still to be written."""


def _simulated(job: _Job, report: Report) -> str:
    """Simulate, in a process of its own, and return why the run failed if it did."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    run, traces = job.run, job.traces
    result = simulate(
        run.config,
        run.folder,
        traces=traces.open() if traces else TraceSet.load(run.config.traces, seed=run.seed),
        overwrite=job.begun == "failed",
        resume=job.begun == "half",
        callbacks=[_ShareDone(Until.parse(run.config.until), report)],
    )
    if result.status == "interrupted":
        raise KeyboardInterrupt
    return (result.reason or "it failed") if result.status == "failed" else ""
