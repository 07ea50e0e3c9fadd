"""What was measured in a run, whether that is enough, and how it stands in the run's folder.

Strategies report their rounds. What an app does without one, `MessageRounds` reads off its
messages.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord

from fedstale.config import Until
from fedstale.errors import FedstaleError, RunEnded
from fedstale.machine import processor, system, versions
from fedstale.reports import LEVEL_COLUMNS, Run, levels, report_at_end
from fedstale.runs import (
    COST_COLUMNS,
    ERROR_COLUMNS,
    RunFolder,
    by_kind,
    client_errors,
    ledger,
    rejected_devices,
    rejections,
)
from fedstale.simulation.devices import round_of
from fedstale.simulation.stock_strategies import numbers
from fedstale.strategies.server import (
    CLIENT_ERROR,
    REJECTED,
    Callback,
    Limit,
    Runtime,
    Sums,
    add_metrics,
    means_of,
)
from fedstale.strategies.types import Stateful, n_cores

_SOURCES = ("train", "evaluate", "query")
_EXAMPLES = "num-examples"


@dataclass(eq=False)
class RunMetrics(Stateful, Callback):
    """Keeps metrics and the latest model, and ends the run when its limit is reached."""

    saved = ("rounds", "server_evaluates", "rows", "latest", "limits")

    until: Until
    """Limit of the run."""
    rounds: int = 0
    """Rounds or versions so far; rounds of queries in an app that trains nothing."""
    server_evaluates: bool = False
    """Whether a central evaluation has measured anything."""
    arrays: ArrayRecord | None = None
    rows: list[tuple[float, int, str, str, float]] = field(default_factory=list)
    """Instant in s, version, source, name and value of each measurement."""
    latest: dict[str, float] = field(default_factory=dict)
    """The latest value of each metric, by source and name."""
    limits: dict[Limit, dict[int, int]] = field(
        default_factory=lambda: {"capped": {}, "clipped": {}}
    )
    """How often numbers of examples were capped and norms clipped, of each node."""
    began: float | None = None
    """Instant of `time.perf_counter` at which the run began; None measures no wall time."""
    wall_s: list[float] = field(default_factory=list)
    """Wall time in s of each of the rows, if it is measured; no checkpoint holds it."""

    def limited(self, run: Runtime, node_id: int, kind: Limit) -> None:
        """Count what validation has limited."""
        by_node = self.limits[kind]
        by_node[node_id] = by_node.get(node_id, 0) + 1

    def new_version(self, run: Runtime, version: int, arrays: ArrayRecord) -> None:
        """Keep the new model."""
        self.arrays = arrays

    def metrics(self, run: Runtime, version: int, source: str, values: Mapping[str, float]) -> None:
        """Keep metrics of a version.

        Raises:
            RunEnded: the limit of the run is reached.
        """
        now = run.now()
        for name, value in values.items():
            self.rows.append((now, version, source, name, value))
            self.latest[f"{source} {name}"] = value
        if self.began is not None:
            self.wall_s += [round(time.perf_counter() - self.began, 3)] * len(values)
        self.rounds = run.rounds
        self.server_evaluates |= source == "server" and bool(values)
        # A client's own metric decides only where the server evaluates nothing.
        of_clients = source in ("evaluate", "query") and not self.server_evaluates
        decides = source == "server" or of_clients
        if self.until.is_reached(self.rounds, values if decides else {}):
            goal = self.until.metric
            done = in_rounds(self.rounds) if goal is None else f"{goal} {values[goal]:g}"
            raise RunEnded(f"reached {done}")


class MessageRounds(Callback):
    """Tells the rounds, metrics and models of an app that no strategy tells, from its messages.

    An app may push and pull messages itself, with no strategy or one whose `start` calls none of
    Flower's verbs. A round is then what the messages say (a number as their group id, or
    `server-round` in a config). Where they say nothing, a round is over when the app sends another
    message of a type, with its action, to which it has had a reply, unless with the same model:
    an asynchronous app has as many rounds as it sends models.

    Metrics of a round are means over its replies of whatever numbers are in their MetricRecords, by
    `num-examples` where there are any. The model of a round is what is sent next, to be evaluated
    or trained; that of the last round is never seen unless it is evaluated. Rounds of queries are
    counted apart. In a loop that tells its rounds this is silent.
    """

    def __init__(self) -> None:
        """Start before the first message."""
        self._model: ArrayRecord | None = None
        self._end: RunEnded | None = None
        self._forget()

    def _forget(self) -> None:
        """Begin no round yet; the number of the one that goes on is kept by source."""
        self._n_open = 0
        self._numbers: dict[str, int] = {}
        self._stated: dict[str, int] = {}
        self._replied: set[str] = set()
        self._sums: dict[str, Sums] = {}

    def started(self, run: Runtime) -> None:
        """End the rounds before a strategy was started."""
        for source in () if run.tells else tuple(self._numbers):
            self._end_round(run, source)
        self._forget()

    def sending(self, run: Runtime, messages: Sequence[Message]) -> None:
        """Take the model, and end a round if these messages begin another.

        Raises:
            RunEnded: the limit of the run was reached by the replies before.
        """
        if run.tells:
            if self._numbers:
                self._forget()
            return
        self._n_open += len(messages)
        # Messages that are sent together are of one round, each type for itself.
        for kind, message in {m.metadata.message_type: m for m in reversed(messages)}.items():
            source = kind.split(".")[0]
            if source not in _SOURCES:
                continue
            model = next(iter(message.content.array_records.values()), None)
            is_same = model is not None and model == self._model
            begins = self._begins(source, kind, round_of(message), is_same=is_same)
            if model is not None and source != "query" and not is_same:
                self._model = model
                # What is sent in the midst of a round to be trained was made in the one before.
                made_in = self._numbers.get("train", 0) - (source == "train" and not begins)
                if made_in > 0:
                    run.new_version(made_in - run.before, model)
            if begins:
                self._end_round(run, source)
                self._replied = {one for one in self._replied if not one.startswith(source)}
                self._stated[source] = round_of(message)
                done = {"train": run.trained, "query": run.queried}.get(source, 0)
                self._numbers[source] = max(self._numbers.get(source, 0), done) + 1
        if self._end is not None:
            raise self._end

    def _begins(self, source: str, kind: str, stated: int, *, is_same: bool) -> bool:
        """Return whether a message begins a round; evaluations are of the round that trained."""
        if source == "evaluate" and "train" in self._numbers:
            return False
        if source not in self._numbers:
            return True
        if stated >= 0:
            return stated != self._stated[source]
        return kind in self._replied and not is_same

    def reply(self, run: Runtime, message_id: str, reply: Message, status: str) -> None:
        """Take in what a client measured."""
        if run.tells:
            return
        self._n_open -= 1
        kind = reply.metadata.message_type
        source = kind.split(".")[0]
        if source in self._numbers or (source == "evaluate" and "train" in self._numbers):
            self._replied.add(kind)
            sums = self._sums.setdefault(source, {})
            for record in [] if reply.has_error() else reply.content.metric_records.values():
                add_metrics(sums, *_measured(record))
        if self._n_open <= 0 and not run.n_loops:
            # The app gets its last replies, and ends with what it next sends.
            try:
                self._tell(run)
            except RunEnded as end:
                self._end = end

    def finish(self, run: Runtime) -> None:
        """Tell what the last replies brought, now that the app is over."""
        for source in () if run.tells else tuple(self._numbers):
            # A limit that it reaches just now ends it no more.
            with suppress(RunEnded):
                self._end_round(run, source)

    def _end_round(self, run: Runtime, source: str) -> None:
        """Tell what is left of a round, and that it is over if there was any reply."""
        self._tell(run)
        if any(kind.startswith(source) for kind in self._replied):
            before = 0 if source == "query" else run.before
            run.metrics(self._numbers[source] - before, source, {})

    def _tell(self, run: Runtime) -> None:
        """Tell the metrics of the rounds that go on, as far as they are known."""
        known, self._sums = self._sums, {}
        for source in _SOURCES:
            if source in known:
                of = "train" if source == "evaluate" and "train" in self._numbers else source
                before = 0 if source == "query" else run.before
                number = self._numbers[of] - before
                run.metrics(number, source, means_of(known[source]), is_over=False)


def _measured(record: MetricRecord) -> tuple[float, dict[str, float]]:
    """Return by how many examples a record counts, and its metrics."""
    values = numbers(record)
    examples = values.pop(_EXAMPLES, 1.0)
    return max(examples, 0.0), values


def in_rounds(n: int) -> str:
    """Return a number of rounds in words."""
    return f"{n:,} round" if n == 1 else f"{n:,} rounds"


def end_of_app(run: Runtime) -> str:
    """Return why a run ended whose app came to its end by itself."""
    return f"{in_rounds(run.rounds)} of the app" if run.rounds else "the app came to its end"


def write_run(
    folder: RunFolder, run: Runtime, metrics: RunMetrics, facts: Mapping[str, Any]
) -> Run:
    """Write what came of a run.

    Args:
        folder: of the run, in which its events are written already.
        run: that has ended.
        metrics: what was measured.
        facts: for the summary: status, reason, app, devices, seed and the like.
    """
    folder.write_metrics(metrics.rows)
    folder.write_wall(metrics.wall_s)
    if metrics.arrays is not None:
        folder.write_model(metrics.arrays)
    folder.write_summary(
        {
            **facts,
            "versions": versions(),
            "machine": {"processor": processor(), "cores": n_cores(), "system": system()},
            "virtual_s": run.now(),
            "rounds": metrics.rounds,
            **ledger(events := folder.read_events((*COST_COLUMNS, *LEVEL_COLUMNS))),
            "messages": by_kind(events),
            **levels(events),
            "client_errors": client_errors(folder.read_events(ERROR_COLUMNS, status=CLIENT_ERROR)),
            "rejected": rejections(rejected := folder.read_events(ERROR_COLUMNS, status=REJECTED)),
            "rejected_devices": rejected_devices(rejected),
            **{
                kind: {"replies": sum(by_node.values()), "nodes": len(by_node)}
                for kind, by_node in metrics.limits.items()
            },
            "metrics": metrics.latest,
            **{name: value for stage in run.stages for name, value in stage.summary().items()},
        }
    )
    return report_at_end(folder.path)


def ending(problem: BaseException) -> tuple[str, str]:
    """Return how a run ended that an exception has ended, as a status and a reason."""
    if isinstance(problem, RunEnded):
        return ("stuck" if problem.stuck else "stopped"), problem.reason
    if isinstance(problem, FedstaleError):
        return "failed", str(problem)
    return "failed", f"{type(problem).__name__}: {problem}"
