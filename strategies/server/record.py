"""A record of a run that others can check: what was heard, who was picked, and how jobs ended.

Each line of record.jsonl holds the SHA-256 of the line before, so that the hash of the last line,
the head, stands for all of them. What a selector knows is a function of the earlier lines, and the
generator that it draws from follows from the seed: whoever has the file can make every pick again,
as `fedstale.verify` does. It holds no wall time: a simulation writes the same bytes again.
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
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from fedstale import __version__
from fedstale.errors import ConfigError, FedstaleError, ResumeError
from fedstale.strategies.server.jobs import Ending, SentJob
from fedstale.strategies.server.runtime import MOST_REASON, RunEnded, Runtime
from fedstale.strategies.types import (
    Forecast,
    History,
    NodeSet,
    Situation,
    State,
    bits_at,
    places_of,
)

if TYPE_CHECKING:
    from fedstale.strategies.strategy import StaleStrategy

logger = logging.getLogger(__name__)

RECORD = "record.jsonl"
"""Its name in the folder of a run."""
FORMAT = 1
NONE_BEFORE = "0" * 64
"""In the place of a hash, in a line that begins a chain."""

_NOBODY = NodeSet.of(np.zeros(0, dtype=np.uint64))

_encoded = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode


def record_of(strategy: "StaleStrategy", run: Runtime) -> "Record | None":
    """Return the record that a strategy asks for; the run's own if it has begun there already.

    Raises:
        ConfigError: it is to be in the folder of the run, and the run has none.
    """
    if strategy.record is False:
        return None
    if strategy.record is True and run.folder is None:
        raise ConfigError(
            "strategy.record = True: this run has no folder; expected a file such as "
            "'runs/record.jsonl', or with a built-in app a run-folder"
        )
    path = (run.folder or Path()) / RECORD if strategy.record is True else Path(strategy.record)
    if run.record is None or run.record.path != path:
        repeats = run.checkpointer is not None and run.checkpointer.jobs_survive
        run.record = Record(path, repeats=repeats)
    return run.record


class Record:
    """Writes the lines of one file.

    Lines are on the disk before a checkpoint that follows them, and with the system before messages
    go to the nodes that they name.
    """

    def __init__(self, path: Path, *, repeats: bool = False) -> None:
        """Write to a file; nothing is opened yet.

        Args:
            path: of the file.
            repeats: whether a run that goes on from a checkpoint repeats what followed it to the
                byte, as a simulation does: those lines are then written again, and wait for no
                disk. On real devices they stay, and a line says that the run has gone back.
        """
        self.path, self._repeats = path, repeats
        self.n, self.head = 0, NONE_BEFORE
        """Number of the last line, counted from 1, and its SHA-256."""
        self._n_bytes = 0
        self._file: IO[bytes] | None = None
        self._is_unwritable = False
        self._about: State = {}
        self._candidates = _NOBODY
        """At the last pick."""
        self._sending: list[int] = []
        self._unsent: list[int] = []
        self._ending: State | None = None

    # Beginning and going on.

    def begin(self, about: State, *, seed: int, now: float, resumes: bool) -> None:
        """Begin a run of a strategy.

        Args:
            about: the strategy, its settings and its selector, see `EventLoop`.
            seed: of the generator that selectors draw from.
            now: the instant in s.
            resumes: whether the run was asked to go on from checkpoints, and there was none: it may
                have written lines before it was killed, and the chain goes on.

        Raises:
            ConfigError: there is such a file, or it cannot be made.
        """
        if not self.n and not (resumes and self.path.exists()):
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("xb")
            except FileExistsError:
                raise ConfigError(
                    f"record = {str(self.path)!r} exists: expected a new file, or resume=... to go "
                    "on with the run in it"
                ) from None
            except OSError as problem:
                raise ConfigError(
                    f"record = {str(self.path)!r} cannot be made: {problem.strerror}"
                ) from None
        else:
            self._open_at_end(least=0)
        self._candidates = _NOBODY
        self._about = about
        versions = {"python": platform.python_version(), "numpy": np.__version__}
        start = {"format": FORMAT, "fedstale": __version__, **versions, "seed": seed, "now": now}
        self._add("start", start | about)

    def go_on(self, about: State, state: Mapping[str, Any], *, now: float) -> None:
        """Go on from a checkpoint.

        Args:
            about: as of `begin`.
            state: what `state_dict` returned.
            now: the instant in s.

        Raises:
            ResumeError: the file is not the one that the checkpoint was written beside.
        """
        n, head = int(state["n"]), str(state["head"])
        self._candidates = NodeSet.of(np.asarray(state["candidates"], dtype=np.uint64))
        changed = about if about != state["about"] else {}
        self._about = about
        if self._repeats:
            self._cut_back(int(state["bytes"]), n, head)
            if changed:
                self._add("settings", {"now": now} | changed)
            return
        if not self.path.exists():
            # Another folder, as every run on a SuperLink has: the chain goes on in a second file.
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("xb")
            self.n, self.head = n, head
        else:
            self._open_at_end(least=n)
        self._add("resumed", {"to": n, "head": head, "now": now} | changed)

    def state_dict(self) -> State:
        """Return what a checkpoint must hold; the lines so far are on the disk then."""
        self._flush(sync=True)
        where = {"n": self.n, "head": self.head, "bytes": self._n_bytes, "about": self._about}
        return where | {"candidates": self._candidates.ids}

    def end(self, problem: BaseException | None, version: int) -> None:
        """Write the last line, for a run that ended by itself or by an exception, and close."""
        how, reason = "finished", ""
        if problem is not None:
            how = "stopped" if isinstance(problem, RunEnded) else "failed"
            reason = f"{type(problem).__name__}: {problem}" if how == "failed" else str(problem)
        assert self._file is not None, "lines follow the beginning"
        with closing(self._file):
            if not self._is_unwritable:
                self._add("end", {"how": how, "reason": reason[:MOST_REASON], "version": version})
                self._flush(sync=True)
        self._file = None
        logger.info("record %s: %d lines, head %s", self.path, self.n, self.head)

    @property
    def is_open(self) -> bool:
        """Whether it has begun and not ended."""
        return self._file is not None

    def summary(self) -> State:
        """Return how many lines there are, and the head."""
        return {"lines": self.n, "head": self.head}

    # What happens.

    def picked(  # noqa: PLR0917 - what a selector is given, and what it returns
        self,
        free: NodeSet,
        k: int,
        now: float,
        situation: Situation,
        state: Mapping[str, Any],
        picks: list[int],
    ) -> None:
        """Note what a selector was given and what it picked.

        Args:
            free: the candidates, in ascending order.
            k: how many were to be picked.
            now: the instant in s.
            situation: where the run stands.
            state: of the generator before it was drawn from.
            picks: ids of nodes.
        """
        joined, left = self._changes(free)
        self._add(
            "pick",
            {
                "now": now,
                "k": k,
                **({"joined": joined} if joined else {}),
                **({"left": left} if left else {}),
                "candidates": len(free),
                "in_flight": situation.n_in_flight,
                "version": situation.version,
                "deadline_s": plain(situation.deadline_s),
                "rng": plain_state(state),
                "picks": picks,
            },
        )
        if not self._repeats:
            self._flush()

    def heard(self, node_id: int, forecast: Forecast, now: float) -> None:
        """Note what a device states of itself, as it was received."""
        self._add("heard", {"node": node_id, "now": now, "forecast": forecast})

    def evaluators(self, n_online: int, k: int) -> None:
        """Note that k of the online nodes were drawn to evaluate, from the same generator."""
        self._add("evaluate", {"online": n_online, "k": k})

    def sends(self, node_id: int) -> None:
        """Note that a job goes to a node; `sent` writes the line of all that go at once."""
        self._sending.append(node_id)

    def sent(self, first_job: int, now: float) -> None:
        """Note that jobs went to the nodes that have been picked."""
        if self._sending:
            unsent = {"unsent": self._unsent} if self._unsent else {}
            self._add("sent", {"now": now, "job": first_job, "nodes": self._sending} | unsent)
            self._sending, self._unsent = [], []

    def ended(self, job: SentJob, how: Ending, reason: str) -> None:
        """Note how a training job ended; what is learnt of its node comes next, if anything is."""
        ending: State = {"job": job.job_id, "node": job.node_id, "how": how}
        if reason:
            ending["reason"] = reason[:MOST_REASON]
        if how == "cancelled":
            self._add("ended", ending)
        else:
            self._ending = ending

    def left_out(self, job_id: int, reason: str) -> None:
        """Note that the update of an accepted reply was not aggregated."""
        self._add("left-out", {"job": job_id, "reason": reason[:MOST_REASON]})

    def learnt(self, node_id: int, facts: Mapping[str, float] | None) -> None:
        """Note what a reply says of a node; None for none, or for a job that could not be sent."""
        ending, self._ending = self._ending, None
        if ending is None:
            self._unsent.append(node_id)
            return
        learnt = {} if facts is None else {name: plain(value) for name, value in facts.items()}
        self._add("ended", ending | learnt)

    # The candidates, as changes since the last pick.

    def _changes(self, free: NodeSet) -> tuple[list[int], list[int]]:
        """Return the nodes that have become candidates since the last pick, and that no longer are.

        The bits of one grid are compared; of two sets of nodes their ids.
        """
        before, self._candidates = self._candidates, free
        if free.everyone is before.everyone:
            ids, changed = free.everyone.ids, places_of(free.words ^ before.words)
            has_joined = bits_at(free.words, changed)
            joined, left = ids[changed[has_joined]], ids[changed[~has_joined]]
        else:
            joined = np.setdiff1d(free.ids, before.ids, assume_unique=True)
            left = np.setdiff1d(before.ids, free.ids, assume_unique=True)
        return joined.tolist(), left.tolist()

    # The file.

    def _add(self, kind: str, facts: Mapping[str, object]) -> None:
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
            f"record = {str(self.path)!r} cannot be written: {problem.strerror}; the run ends, "
            "because what follows could not be checked"
        )

    def _open_at_end(self, least: int) -> None:
        """Go on behind the last line; a line that a crash tore off is removed.

        Args:
            least: number that the last line has at least.
        """
        try:
            data = self.path.read_bytes()
        except OSError as problem:
            raise ResumeError(
                f"record = {str(self.path)!r} cannot be read: {problem.strerror}"
            ) from None
        n_bytes = data.rfind(b"\n") + 1
        last = _last_line(data[:n_bytes])
        try:
            n = int(json.loads(last)["n"]) if last else 0
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ResumeError(
                f"record = {str(self.path)!r}: its last line cannot be read; fedstale audit "
                "--verify says what is wrong with it"
            ) from None
        if n < least:
            raise ResumeError(
                f"record = {str(self.path)!r} has {n} lines, and the run has written {least}: it "
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
            found = self.path.read_bytes()[:n_bytes]
        except OSError:
            found = b""
        if len(found) != n_bytes or sha256(_last_line(found)).hexdigest() != head:
            raise ResumeError(
                f"record = {str(self.path)!r} is not the record beside which the checkpoint was "
                "written: expected its lines up to the checkpoint as they were"
            )
        self._open_after(n_bytes)
        self.n, self.head = n, head

    def _open_after(self, n_bytes: int) -> None:
        try:
            file = self.path.open("r+b")
        except OSError as problem:
            raise self._unwritable(problem) from None
        file.truncate(n_bytes)
        file.seek(n_bytes)
        self._file, self._n_bytes = file, n_bytes


class RecordedHistory(History):
    """A history whose changes are in a record."""

    def __init__(self, record: Record) -> None:
        """Start empty."""
        super().__init__()
        self._record = record

    def forecast(self, node_id: int, forecast: Forecast, now: float) -> None:
        """Note what a device expects of itself."""
        super().forecast(node_id, forecast, now)
        self._record.heard(node_id, forecast, now)

    def picked(self, node_id: int, now: float) -> None:
        """Note that a job was sent."""
        super().picked(node_id, now)
        self._record.sends(node_id)

    def failed(self, node_id: int) -> None:
        """Note that a job ended without a good reply."""
        super().failed(node_id)
        self._record.learnt(node_id, None)

    def finished(self, node_id: int, **facts: Any) -> None:  # noqa: ANN401 - those of `History`
        """Note a good reply."""
        super().finished(node_id, **facts)
        self._record.learnt(node_id, facts)


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


def _finite(value: Any) -> Any:  # noqa: ANN401 - any leaf
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return plain(value) if isinstance(value, float) else value
