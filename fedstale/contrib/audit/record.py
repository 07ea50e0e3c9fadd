"""A record of a run that others can check: what was heard, who was picked, and how jobs ended.

Each line of record.jsonl holds the SHA-256 of the line before, so that the hash of the last line,
the head, stands for all of them. What a selector knows is a function of the earlier lines, and the
generator that it draws from follows from the seed: whoever has the file can make every pick again,
as `verify` does. It holds no wall time: a simulation writes the same bytes again.
"""

import json
import logging
import os
import platform
from collections.abc import Mapping
from contextlib import closing
from hashlib import sha256
from math import isfinite, isnan
from pathlib import Path
from typing import IO, Any

import numpy as np
from flwr.app import RecordDict

from fedstale import __version__
from fedstale.errors import ConfigError, FedstaleError, ResumeError, RunEnded
from fedstale.strategies.stages import Pick, Stage, StageRun
from fedstale.strategies.types import (
    PROPERTIES_RECORD,
    End,
    Job,
    NodeSet,
    State,
    forecast_in,
    properties_in,
    require,
)

logger = logging.getLogger(__name__)

RECORD = "record.jsonl"
"""Its name in the folder of a run."""
FORMAT = 3
NONE_BEFORE = "0" * 64
"""In the place of a hash, in a line that begins a chain."""

_MOST_REASON = 2000
_NO_NODES = NodeSet.of(np.zeros(0, dtype=np.uint64))

_encoded = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode


class AuditRecord(Stage):
    """Writes the lines of one file.

    Lines are on the disk before a checkpoint that follows them, and with the system before messages
    go to the nodes that they name. A simulation that goes on from a checkpoint repeats what
    followed it to the byte: those lines are written again, and wait for no disk. On real devices
    they stay, and a line says that the run has gone back.

    Args:
        path: of the file; None for record.jsonl in the folder of the run.
    """

    requires = frozenset({"start", "any settings"})

    def __init__(self, path: str | Path | None = None) -> None:
        require(path != "", "AuditRecord.path", path, "a file, or None for the run's folder")
        self.path = None if path is None else Path(path)
        self.n, self.head = 0, NONE_BEFORE
        """Number of the last line, counted from 1, and its SHA-256."""
        self._n_bytes = 0
        self._file: IO[bytes] | None = None
        self._is_unwritable = False
        self._about: State = {}
        self._candidates = _NO_NODES
        """At the last pick."""
        self._sent: list[Job] = []
        """Training jobs that have gone at one instant, and are in no line yet."""

    # Beginning and going on.

    def begin(self, run: StageRun, state: Mapping[str, Any] | None) -> None:
        """Begin the file, or go on in it.

        Raises:
            ConfigError: there is such a file, it cannot be made, or it is to be in the folder of
                the run, and the run has none.
            ResumeError: the file is not the one that the checkpoint was written beside, or there
                was none.
        """
        self._repeats, self._now, self._summary = run.repeats, run.now, run.summary
        run.on_pick.append(self._note_pick)
        run.on_end.append(self._close)
        if self.path is None and run.folder is None:
            raise ConfigError(
                "strategy.AuditRecord.path = None: this run has no folder; expected a file such as "
                "'runs/record.jsonl', or with a built-in app a run-folder"
            )
        self._path = self.path or (run.folder or Path()) / RECORD
        if not run.is_resumed:
            self._begin(run)
        elif state is None:
            raise ResumeError(
                f"record = {str(self._path)!r}: the checkpoint is of a run without one, and "
                "its picks so far are in no line; begin the record with the run"
            )
        else:
            self._go_on(run.about, state)

    def _begin(self, run: StageRun) -> None:
        others = [stage for stage in run.earlier if isinstance(stage, AuditRecord)]
        goes_on = any(other._path == self._path for other in others)
        if run.repeats and self.path is None and not goes_on:
            # A simulation that begins anew in a folder has what was there in its place.
            self._path.unlink(missing_ok=True)
        if goes_on or (run.may_resume and self._path.exists()):
            # A run that was killed before its first checkpoint has written lines, too.
            self._open_at_end(least=0)
        else:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("xb")
            except FileExistsError:
                raise ConfigError(
                    f"record = {str(self._path)!r} exists: expected a new file, or resume=... to "
                    "go on with the run in it"
                ) from None
            except OSError as problem:
                raise ConfigError(
                    f"record = {str(self._path)!r} cannot be made: {problem.strerror}"
                ) from None
        self._about = run.about
        versions = {"python": platform.python_version(), "numpy": np.__version__}
        start = {"format": FORMAT, "fedstale": __version__, **versions}
        self._add("start", start | {"seed": run.seed, "now": run.now()} | run.about)

    def _go_on(self, about: State, state: Mapping[str, Any]) -> None:
        n, head = int(state["n"]), str(state["head"])
        self._candidates = NodeSet.of(np.asarray(state["candidates"], dtype=np.uint64))
        changed = about if about != state["about"] else {}
        self._about, now = about, self._now()
        if self._repeats:
            self._cut_back(int(state["bytes"]), n, head)
            if changed:
                self._add("settings", {"now": now} | changed)
            return
        if not self._path.exists():
            # Another folder, as a run on a SuperLink may have: the chain goes on in a second file.
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("xb")
            self.n, self.head = n, head
        else:
            self._open_at_end(least=n)
        self._add("resumed", {"to": n, "head": head, "now": now} | changed)

    def state_dict(self) -> State:
        """Return the state for a checkpoint; the lines so far are on the disk then."""
        self._note_sent()
        self._flush(sync=True)
        where = {"n": self.n, "head": self.head, "bytes": self._n_bytes, "about": self._about}
        return where | {"candidates": self._candidates.ids}

    def _close(self, problem: BaseException | None, version: int) -> None:
        """Write the last line, for a run that ended by itself or by an exception, and close."""
        if self._file is None:
            return
        how, reason = "finished", ""
        if problem is not None:
            how = "stopped" if isinstance(problem, RunEnded) else "failed"
            reason = f"{type(problem).__name__}: {problem}" if how == "failed" else str(problem)
        with closing(self._file):
            if not self._is_unwritable:
                self._add("end", {"how": how, "reason": reason[:_MOST_REASON], "version": version})
                self._flush(sync=True)
        self._file = None
        self._summary["record"] = {"lines": self.n, "head": self.head}
        logger.info("record %s: %d lines, head %s", self._path, self.n, self.head)

    # What happens.

    def _note_pick(self, pick: Pick) -> None:
        """Record the candidates and picks of a selector, or the number drawn to evaluate."""
        if pick.purpose == "evaluate":
            self._add("evaluate", {"online": len(pick.free), "k": pick.k})
            return
        joined, left = self._changes(pick.free)
        self._add(
            "pick",
            {
                "now": self._now(),
                "k": pick.k,
                **({"joined": joined} if joined else {}),
                **({"left": left} if left else {}),
                "candidates": len(pick.free),
                "in_flight": pick.context.n_in_flight,
                "buffer_size": pick.context.buffer_size,
                "missing": pick.context.n_missing,
                "keeps_stragglers": pick.context.keeps_stragglers,
                "version": pick.context.version,
                "deadline_s": plain(pick.context.deadline_s),
                "rng": plain_state(pick.drawn_from),
                "picks": pick.chosen,
            },
        )
        if not self._repeats:
            self._flush()

    def outgoing(self, job: Job, content: RecordDict) -> RecordDict:
        """Keep a training job for the line that is written once all of the instant have gone."""
        if job.purpose == "train":
            self._sent.append(job)
        return content

    def _note_sent(self) -> None:
        """Note which nodes jobs went to, in one line for all that went at once."""
        jobs, self._sent = self._sent, []
        # The grid may have taken none of them, which has ended the run.
        if not jobs or isnan(jobs[0].sent_at):
            return
        unsent = [job.node_id for job in jobs if not job.message_id]
        line = {"now": jobs[0].sent_at, "job": jobs[0].job_id, "nodes": [j.node_id for j in jobs]}
        self._add("sent", line | ({"unsent": unsent} if unsent else {}))

    def incoming(self, job: Job, content: RecordDict) -> None:
        """Note what a device states of itself, as it was received."""
        if forecast := forecast_in(content):
            self._add("heard", {"node": job.node_id, "now": self._now(), "forecast": forecast})
        if PROPERTIES_RECORD in content:
            self._add("stated", {"node": job.node_id, "properties": properties_in(content)})

    def ended(self, job: Job, end: End) -> None:
        """Record the end of a training job, and the facts that its reply states of its node."""
        if end.how == "left out":
            self._add("left-out", {"job": job.job_id, "reason": end.reason[:_MOST_REASON]})
        elif job.purpose == "train" and end.how != "not sent":
            reason = {"reason": end.reason[:_MOST_REASON]} if end.reason else {}
            facts = {name: plain(value) for name, value in end.facts.items()}
            job_of = {"job": job.job_id, "node": job.node_id, "how": end.how}
            self._add("ended", {**job_of, **reason, **facts})

    # The candidates, as changes since the last pick.

    def _changes(self, free: NodeSet) -> tuple[list[int], list[int]]:
        """Return the nodes that have become candidates since the last pick, and that no longer are.

        The bits of one grid are compared; of two sets of nodes their ids.
        """
        before, self._candidates = self._candidates, free
        if free.everyone is before.everyone:
            joined = NodeSet(free.everyone, free.words & ~before.words).ids
            left = NodeSet(free.everyone, before.words & ~free.words).ids
        else:
            joined = np.setdiff1d(free.ids, before.ids, assume_unique=True)
            left = np.setdiff1d(before.ids, free.ids, assume_unique=True)
        return joined.tolist(), left.tolist()

    # The file.

    def _add(self, kind: str, facts: Mapping[str, object]) -> None:
        self._note_sent()
        try:
            text = _encoded(facts)
        except ValueError:
            text = _encoded(_finite(facts))
        self.n += 1
        line = f'{{"n":{self.n},"before":"{self.head}","kind":"{kind}",{text[1:]}'.encode()
        self.head = sha256(line).hexdigest()
        assert self._file is not None, "lines follow the beginning"
        try:
            self._file.write(line + b"\n")
        except OSError as problem:
            raise self._unwritable(problem) from None
        self._n_bytes += len(line) + 1

    def _flush(self, *, sync: bool = False) -> None:
        assert self._file is not None, "lines follow the beginning"
        try:
            self._file.flush()
            if sync:
                os.fsync(self._file.fileno())
        except OSError as problem:
            raise self._unwritable(problem) from None

    def _unwritable(self, problem: OSError) -> FedstaleError:
        self._is_unwritable = True
        return FedstaleError(
            f"record = {str(self._path)!r} cannot be written: {problem.strerror}; the run ends, "
            "because what follows could not be checked"
        )

    def _open_at_end(self, least: int) -> None:
        """Go on behind the last line; a line that a crash tore off is removed.

        Args:
            least: number that the last line has at least.
        """
        try:
            data = self._path.read_bytes()
        except OSError as problem:
            raise ResumeError(
                f"record = {str(self._path)!r} cannot be read: {problem.strerror}"
            ) from None
        n_bytes = data.rfind(b"\n") + 1
        last = _last_line(data[:n_bytes])
        try:
            n = int(json.loads(last)["n"]) if last else 0
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ResumeError(
                f"record = {str(self._path)!r}: its last line cannot be read; fedstale audit "
                "--verify says what is wrong with it"
            ) from None
        if n < least:
            raise ResumeError(
                f"record = {str(self._path)!r} has {n} lines, and the run has written {least}: it "
                "was cut, or is of another run"
            )
        self._open_after(n_bytes)
        self.n, self.head = n, sha256(last).hexdigest() if last else NONE_BEFORE

    def _cut_back(self, n_bytes: int, n: int, head: str) -> None:
        """Go on behind a line, and remove what follows.

        Raises:
            ResumeError: that line is not there.
        """
        try:
            found = self._path.read_bytes()[:n_bytes]
        except OSError:
            found = b""
        if len(found) != n_bytes or sha256(_last_line(found)).hexdigest() != head:
            raise ResumeError(
                f"record = {str(self._path)!r} is not the record beside which the checkpoint was "
                "written: expected its lines up to the checkpoint as they were"
            )
        self._open_after(n_bytes)
        self.n, self.head = n, head

    def _open_after(self, n_bytes: int) -> None:
        try:
            file = self._path.open("r+b")
        except OSError as problem:
            raise self._unwritable(problem) from None
        file.truncate(n_bytes)
        file.seek(n_bytes)
        self._file, self._n_bytes = file, n_bytes


def _last_line(data: bytes) -> bytes:
    return data.rstrip(b"\n").rpartition(b"\n")[2]


def plain(number: float) -> float | str | None:
    """Return a number as JSON has it: None for NaN, "inf" and "-inf" for the infinite.

    Example:
        >>> plain(2.5), plain(float("nan")), plain(-np.inf)
        (2.5, None, '-inf')
    """
    if isfinite(number):
        return number
    return None if isnan(number) else "inf" if number > 0 else "-inf"


def plain_state(state: Mapping[str, Any]) -> list[str | int]:
    """Return the state of NumPy's default generator: state and increment in hex, and what is left.

    Example:
        >>> plain_state(np.random.default_rng(0).bit_generator.state)[2:]
        [0, 0]
    """
    inner = state["state"]
    words = (f"{inner['state']:x}", f"{inner['inc']:x}")
    return [*words, state["has_uint32"], state["uinteger"]]


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return plain(value) if isinstance(value, float) else value
