"""The run folder of an app on real devices, as `fedstale simulate` writes one.

The server sees when it sends a job and when the reply arrives; what a device did in between, and
how many bytes a lost job has moved, it does not see. These stay NaN in events.parquet.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
from flwr.app import Context, Message
from flwr.serverapp import Grid

from fedstale.compat import report_stock_strategies
from fedstale.config import read_toml
from fedstale.errors import ConfigError, ResumeError
from fedstale.flower import content_bytes, round_of
from fedstale.runs import (
    CONFIG,
    DEPLOYED,
    IN_FLIGHT,
    LATE,
    NEVER,
    UNCLAIMED,
    UNKNOWN,
    RunFolder,
    is_empty,
)
from fedstale.simulation import (
    Columns,
    JobRow,
    JobTable,
    MessageRounds,
    RunMetrics,
    end_of_app,
    ending,
    write_run,
)
from fedstale.strategies.messages import formats_of
from fedstale.strategies.server import (
    REJECTED,
    REPORTED,
    Callback,
    ResumedClock,
    Runtime,
    SuperLinkGrid,
    Versions,
    connected,
    read_checkpoint,
    write_checkpoint,
)
from fedstale.strategies.stages import asked_share
from fedstale.strategies.types import State
from fedstale.until import Until

logger = logging.getLogger(__name__)

_REST = 10.0
"""Least time between two writings of what was done, in durations of one, which grows with it."""

_UNSEEN = (
    *("started_at", "downloaded_at", "trained_at", "reported_at", "ended_at"),
    *("download_s", "compute_s", "upload_s", "work", "uploaded_bytes"),
)


class JobLog(JobTable):
    """What the server sees of each job on real devices: one row a job, as of a simulation."""

    saved: ClassVar[tuple[str, ...]] = (*JobTable.saved, "_by_message")

    def __init__(self) -> None:
        """Start with no job."""
        super().__init__()
        self._by_message: dict[str, int] = {}

    @property
    def node_ids(self) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Ids of the nodes that a job was sent to, in their order."""
        return np.unique(self.columns["node_id"][: len(self)].astype(np.uint64))

    def of_message(self, message_id: str) -> JobRow | None:
        """Return the job of a message, or None if it was sent by another run."""
        job_id = self._by_message.get(message_id)
        return None if job_id is None else self[job_id]

    def events(self) -> pa.Table:
        """Return all events so far, one row a job."""
        nodes = self.node_ids

        def as_of(jobs: Columns) -> Columns:
            jobs["device"] = np.searchsorted(nodes, jobs["node_id"].view(np.uint64))
            is_open = jobs["status"] == self.number(UNCLAIMED)
            jobs["status"][is_open & (jobs["delivered_at"] == NEVER)] = self.number(IN_FLIGHT)
            return jobs

        names = pd.Index([str(node) for node in nodes.tolist()], dtype="str")
        return pa.concat_tables(self.tables(as_of, names))

    def job_sent(self, run: Runtime, message_id: str, message: Message) -> None:
        """Fill a row."""
        job = self[self.add(1).start]
        about = message.metadata
        # The column holds 64 bits with a sign, and ids of nodes have none.
        job.node_id = about.dst_node_id - 2**64 if about.dst_node_id >= 2**63 else about.dst_node_id
        job.kind, job.round, job.sent_at = about.message_type, round_of(message), run.now()
        self.count_on(slice(job.row, job.row + 1), run.before)
        for name in _UNSEEN:
            setattr(job, name, UNKNOWN)
        job.downloaded_bytes = float(content_bytes(message.content))
        share = asked_share(message.content) if job.kind.startswith("train") else None
        job.work_share = UNKNOWN if share is None else share
        job.format_down, job.format_up = formats_of(message.content)
        job.status = UNCLAIMED
        self.name(job, message_id)

    def name(self, job: JobRow, message_id: str) -> None:
        """Give a job the id of its message, which is empty if the message could not be sent."""
        if job.kind.startswith("train"):
            self.note_reported_by(job.node_id, job.row)
        if message_id:
            self._by_message[message_id] = job.row
        else:
            job.status, job.reason = UNCLAIMED, "the SuperLink did not take the message"

    def reply(self, run: Runtime, message_id: str, reply: Message, status: str) -> None:
        """Note the reply to a job, or the error in its place."""
        job = self.of_message(message_id)
        if job is None:
            return
        self.learn(job.node_id, reply)
        job.delivered_at, job.status = run.now(), status
        if reply.has_error():
            job.reason = reply.error.reason or ""
        else:
            job.reason = ""
            job.uploaded_bytes = float(content_bytes(reply.content))

    def rejected(self, run: Runtime, message_id: str, *, reason: str) -> None:
        """Note why a reply was not used, or that none came in time."""
        super().rejected(run, message_id, reason=reason)
        job = self.of_message(message_id)
        if job is not None and job.delivered_at == NEVER:
            job.status, job.reason = LATE, reason


class DeploymentCheckpoint(Callback):
    """Keeps in the folder what a run has done, for the run that goes on after a crash."""

    def __init__(self, folder: Path, log: JobLog, metrics: RunMetrics) -> None:
        """Keep jobs and metrics."""
        self._path, self._log, self._metrics = folder / "deployment.checkpoint", log, metrics
        self._rests_until = 0.0

    def restore(self, run: Runtime, strategy: State | None) -> None:
        """Go on from what the folder holds, if that is anything.

        Args:
            run: that goes on; its time does too.
            strategy: state of the version at which; what was noted of later ones is made again.
        """
        if not self._path.is_file():
            return
        version = strategy["versions"]["version"] if strategy else -1
        state = read_checkpoint(self._path)
        self._log.load_state_dict(state["log"])
        self._metrics.load_state_dict(state["metrics"])
        run.limits = self._metrics.limits
        self._metrics.rows[:] = [row for row in self._metrics.rows if row[1] <= version]
        used = self._log.columns["status"] == self._log.number(REPORTED)
        for job in map(self._log.__getitem__, np.flatnonzero(used).tolist()):
            if job.kind.startswith("train") and not 0 < job.aggregated_version <= version:
                job.aggregated_version, job.staleness, job.weight = -1, UNKNOWN, UNKNOWN
                job.status, job.reason = REJECTED, f"not in version {version}: the run went back"
        if strategy:
            self._metrics.arrays = Versions.model_in(strategy["versions"])
            self._metrics.rounds = run.trained = version
        run.clock = ResumedClock(run.clock, state["now"])

    def keep(self, run: Runtime) -> None:
        """Write what is new before the checkpoint is, unless it was written just now."""
        if time.monotonic() >= self._rests_until:
            self._write(run)

    def ended(self, run: Runtime, status: str, reason: str) -> None:
        """Write all: a run that has failed goes on too."""
        self._write(run)

    def _write(self, run: Runtime) -> None:
        began = time.monotonic()
        state = {
            "now": run.now(),
            "log": self._log.state_dict(),
            "metrics": self._metrics.state_dict(),
        }
        try:
            write_checkpoint(self._path, state)
        except OSError as problem:
            logger.warning("%s cannot be written: %s", self._path, problem.strerror)
        ended = time.monotonic()
        self._rests_until = ended + _REST * (ended - began)


def _opened(path: Path, config: Mapping[str, Any], app: str) -> tuple[RunFolder, State | None]:
    """Return the folder of a run, and the strategy's state from which the run in it goes on.

    Raises:
        ConfigError: it holds anything but the run with the checkpoints that are to be resumed.
    """
    resume = str(config.get("resume", ""))
    if is_empty(path):
        return RunFolder.create(path), None
    had = read_toml(path / CONFIG) if (path / CONFIG).is_file() else {}
    kept = had.get("run_config", {}).get("checkpoints")
    if not (
        resume
        and kept
        and had.get("app") == app
        and Path(kept) in {(at := Path(resume)), at.parent}
    ):
        raise ConfigError(
            f"run-folder = {str(path)!r} is not empty: expected a new folder, or resume = the "
            "folder of checkpoints of the run in it, to go on with that"
        )
    folder = RunFolder(path)
    try:
        return folder, read_checkpoint(resume)
    except ResumeError:
        # It ended before its first version, or the strategy says what is wrong.
        return folder, None


@contextmanager
def recorded(grid: Grid, folder: str | Path, context: Context, *, app: str) -> Iterator[Grid]:
    """Note what happens in a run on real devices, and write the run's folder in the end.

    A run that goes on from its checkpoints goes on in its folder too. A simulation writes a folder
    of its own: its grid is given back as it is.

    Args:
        grid: of a ServerApp.
        folder: where, on the server; empty writes none.
        context: of the ServerApp, for the run config.
        app: its name.

    Raises:
        ConfigError: the folder holds something else than the run that goes on, or cannot be made.
    """
    if not str(folder):
        yield grid
        return
    own = connected(grid)
    if not isinstance(own, SuperLinkGrid):
        yield own
        return
    opened, before = _opened(Path(folder), context.run_config, app)
    with opened, own:
        opened.write_config({"app": app, "run_config": dict(context.run_config)})
        log, metrics = JobLog(), RunMetrics(Until())
        checkpoint = DeploymentCheckpoint(opened.path, log, metrics)
        checkpoint.restore(own.runtime, before)
        own.runtime.folder = opened.path
        own.runtime.add(log)
        own.runtime.add(metrics)
        own.runtime.add(checkpoint)
        own.runtime.before_checkpoint = lambda: checkpoint.keep(own.runtime)
        report_stock_strategies()

        def facts() -> dict[str, Any]:
            seed = context.run_config.get("seed", 0)
            return {"app": app, "devices": log.node_ids.size, "seed": seed, "executor": DEPLOYED}

        with written_at_end(opened, own.runtime, log.events, metrics, facts):
            yield own


@contextmanager
def written_at_end(
    folder: RunFolder,
    run: Runtime,
    events: Callable[[], pa.Table],
    metrics: RunMetrics,
    facts: Callable[[], Mapping[str, Any]],
) -> Iterator[None]:
    """Write the files of a run at its end, however it ends.

    Args:
        folder: of the run.
        run: that goes on inside.
        events: returns what happened, one row a job.
        metrics: what is measured.
        facts: returns what the summary says besides: app, devices, seed and the like.
    """
    started, (status, reason) = time.perf_counter(), ("finished", "")
    messages = MessageRounds()
    run.add(messages)
    try:
        yield
    except BaseException as problem:
        status, reason = ending(problem)
        raise
    finally:
        messages.finish(run)
        reason = reason or end_of_app(run)
        run.ended(status, reason)
        folder.write_events(events())
        wall_s = round(time.perf_counter() - started, 3)
        summary = {"status": status, "reason": reason, **facts(), "wall_s": wall_s}
        if hint := write_run(folder, run, metrics, summary).summary["hint"]:
            logger.warning("%s", hint)
