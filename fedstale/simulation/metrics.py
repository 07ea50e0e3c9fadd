"""What was measured in a run, whether that is enough, and how it stands in the run's folder.

Strategies report their rounds. What an app does without one, `MessageRounds` reads off its
messages.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import pyarrow.compute as pc
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedstale.errors import FedstaleError, RunEnded, first_line, nearest, quoted
from fedstale.flower import entries, round_of
from fedstale.machine import processor, system, versions
from fedstale.reports import BOOKKEEPING, Run, report_at_end
from fedstale.runs import (
    COST_COLUMNS,
    ERROR_COLUMNS,
    RunFolder,
    by_kind,
    client_errors,
    in_words,
    ledger,
    rejected_devices,
    rejections,
)
from fedstale.strategies.server import (
    CLIENT_ERROR,
    REJECTED,
    Callback,
    Limit,
    Runtime,
    Sums,
    add_metrics,
    means_of,
    numbers,
)
from fedstale.strategies.types import (
    FORECAST_RECORD,
    MOST_EXAMPLES,
    ClientUpdate,
    Stateful,
    n_cores,
)
from fedstale.until import Until

logger = logging.getLogger(__name__)

_SOURCES = ("train", "evaluate", "query")
_BY = {
    "server": "the server",
    "train": "clients that train",
    "evaluate": "clients that evaluate",
    "query": "clients that answer queries",
}
_EXAMPLES = "num-examples"
_NONE_GOOD = 50
"""Jobs that may fail before the first good one, where there are more devices than that."""
_MOST_NAMES = 1024
"""Names of metrics that are kept besides the server's: devices choose them."""
_OLDER = ("fitres.metrics", "evaluateres.metrics")
"""Records of the older API with metrics, which are ConfigRecords."""


@dataclass(eq=False)
class RunMetrics(Stateful, Callback):
    """Keeps metrics and the latest model, and ends the run when its limit is reached."""

    saved = (
        *("rounds", "server_evaluates", "rows", "latest", "not_numbers", "limits"),
        *("n_forecasts", "no_forecast"),
    )

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
    not_numbers: dict[str, int] = field(default_factory=dict)
    """How often each metric was NaN or infinite, by source and name: in replies of clients, or in
    evaluations by the server."""
    limits: dict[Limit, dict[int, int]] = field(
        default_factory=lambda: {"capped": {}, "clipped": {}}
    )
    """How often numbers of examples were capped, norms clipped and metrics dropped, by node."""
    n_forecasts: int = 0
    """Forecasts in replies."""
    no_forecast: str = ""
    """What the first reply says that has none although it should."""
    _has_warned: bool = False

    def reply(self, run: Runtime, message_id: str, reply: Message, status: str) -> None:
        """Count the metrics of a reply that are no numbers, and whether it has a forecast."""
        if not reply.has_error():
            forecast = entries(reply.content).get(FORECAST_RECORD)
            if isinstance(forecast, ConfigRecord) and "error" not in forecast:
                self.n_forecasts += 1
            elif isinstance(forecast, ConfigRecord):
                self.no_forecast = self.no_forecast or first_line(quoted(forecast["error"]))
            source = reply.metadata.message_type.split(".")[0]
            for name in _not_numbers(reply.content):
                self._count_not_number(f"{source} {name}")

    def _count_not_number(self, metric: str) -> None:
        name = quoted(metric)
        if name not in self.not_numbers and len(self.not_numbers) >= _MOST_NAMES:
            name = "other"
        self.not_numbers[name] = self.not_numbers.get(name, 0) + 1

    def new_version(
        self, run: Runtime, version: int, arrays: ArrayRecord, updates: Sequence[ClientUpdate]
    ) -> None:
        """Keep the new model."""
        self.arrays = arrays

    def metrics(self, run: Runtime, version: int, source: str, values: Mapping[str, float]) -> None:
        """Keep metrics of a version.

        Raises:
            RunEnded: the limit of the run is reached.
        """
        now = run.now()
        for name, value in values.items():
            key = f"{source} {name}"
            if source != "server" and key not in self.latest and len(self.latest) >= _MOST_NAMES:
                run.hint(f"of more than {_MOST_NAMES:,} names of metrics the others are left out")
                continue
            self.rows.append((now, version, source, name, value))
            self.latest[key] = value
            if source == "server" and not isfinite(value):
                self._count_not_number(f"{source} {name}")
        self.rounds, self.limits = run.rounds, run.limits
        self.server_evaluates |= source == "server" and bool(values)
        # A client's own metric decides only where the server evaluates nothing.
        of_clients = source in ("evaluate", "query") and not self.server_evaluates
        decides = source == "server" or of_clients
        if self.until.is_reached(self.rounds, values if decides else {}):
            goal = self.until.metric
            done = in_rounds(self.rounds) if goal is None else f"{goal} {values[goal]:g}"
            raise RunEnded(f"reached {done}")
        if decides and values and not self._has_warned and (why := self.unmeasured()):
            self._has_warned = True
            logger.warning("%s; the run goes on, since it may still come", why)

    def without_forecasts(self) -> str:
        """Return in words that no device made the forecast that it should; nothing if one did."""
        if self.n_forecasts or not self.no_forecast:
            return ""
        return f"no device made a forecast; the first says: {self.no_forecast}"

    def unmeasured(self) -> str:
        """Return in words that no metric that decides is the limit's, so far; nothing if one is."""
        metric = self.until.metric
        if metric is None:
            return ""
        names: dict[str, set[str]] = {}
        for source, _, name in (key.partition(" ") for key in self.latest):
            names.setdefault(source, set()).add(name)
        deciding = ("server",) if self.server_evaluates else ("evaluate", "query")
        known = set[str]().union(*(names.get(source, ()) for source in deciding)) - BOOKKEEPING
        if metric in known:
            return ""
        limit = f"until = '{metric} {self.until.target:g}'"
        others = [_BY[source] for source, own in names.items() if metric in own]
        if others:
            who = "the server's" if self.server_evaluates else "only"
            why = f"{metric!r} is measured by {others[0]}, and {who} evaluations decide"
        else:
            why = f"no evaluation has measured {metric!r}"
        if known:
            return f"{limit}: {why}: expected {nearest(metric, sorted(known))}"
        return f"{limit}: {why}; nothing has been evaluated"


class MessageRounds(Callback):
    """Tells the rounds, metrics and models of an app that no strategy tells, from its messages.

    An app may push and pull messages itself, with no strategy or one whose `start` calls none of
    Flower's verbs. A round is then what the messages say (a number as their group id, or
    `server-round` in a config). Where they say nothing, a round is over when the app sends another
    message of a type, with its action, to which it has had a reply, unless with the same arrays as
    the last of the type: an asynchronous app has as many rounds as it sends models. The same arrays
    begin a round as well where all replies have come and a node gets them once more.

    Metrics of a round are means over its replies of whatever numbers are in their MetricRecords, by
    `num-examples` where there are any. The model of a round is what is sent next, to be evaluated
    or trained; that of the last round is never seen unless it is evaluated. Rounds of queries are
    counted apart; where clients return arrays to them, and nothing is trained, what they are sent
    is the model. In a loop that tells its rounds this is silent.
    """

    reads_messages = True

    def __init__(self) -> None:
        """Start before the first message."""
        self._model: ArrayRecord | None = None
        self._end: RunEnded | None = None
        self._sent: dict[str, dict[str, ArrayRecord]] = {}
        """The arrays that were sent last, by source."""
        self._query_trains = False
        """Whether clients return arrays to queries, in an app that sends nothing to be trained."""
        self._forget()

    def _forget(self) -> None:
        """Begin no round yet; the number of the one that goes on is kept by source."""
        self._n_open: Counter[str] = Counter()
        self._nodes: dict[str, set[int]] = {}
        """Whom messages of the round went to, by source."""
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
        """Keep the model, and end a round if these messages begin another.

        Raises:
            RunEnded: the limit of the run was reached by the replies before.
        """
        if run.tells:
            if self._numbers:
                self._forget()
            return
        by_kind: dict[str, list[Message]] = {}
        for message in messages:
            by_kind.setdefault(message.metadata.message_type, []).append(message)
        # Messages that are sent together are of one round, each type for itself.
        for kind, together in by_kind.items():
            source = kind.split(".")[0]
            if source in _SOURCES:
                self._send(run, source, kind, together)
        if self._end is not None:
            raise self._end

    def _send(self, run: Runtime, source: str, kind: str, messages: Sequence[Message]) -> None:
        """Count messages of one type that are sent together."""
        message, nodes = messages[0], {one.metadata.dst_node_id for one in messages}
        arrays = dict(message.content.array_records)
        is_same = bool(arrays) and arrays == self._sent.get(source)
        begins = self._begins(source, kind, round_of(message), nodes, is_same=is_same)
        self._sent[source] = arrays
        model = next(iter(arrays.values()), None)
        trains = "train" if source == "evaluate" else source
        if model is not None and (source != "query" or self._query_trains) and model != self._model:
            self._model = model
            # What is sent in the midst of a round to be trained was made in the one before.
            made_in = self._numbers.get(trains, 0) - (source == trains and not begins)
            if made_in > 0:
                run.new_version(made_in - (run.before if trains == "train" else 0), model)
        if begins:
            self._end_round(run, source)
            self._replied = {one for one in self._replied if not one.startswith(source)}
            self._stated[source], self._nodes[source] = round_of(message), set()
            done = {"train": run.trained, "query": run.queried}.get(source, 0)
            self._numbers[source] = max(self._numbers.get(source, 0), done) + 1
        self._nodes.setdefault(source, set()).update(nodes)
        self._n_open[source] += len(messages)

    def _begins(
        self, source: str, kind: str, stated: int, nodes: set[int], *, is_same: bool
    ) -> bool:
        """Return whether messages begin a round; evaluations are of the round that trained."""
        if source == "evaluate" and "train" in self._numbers:
            return False
        if source not in self._numbers:
            return True
        if stated >= 0:
            return stated != self._stated[source]
        # The same arrays to the same nodes once more, when all have replied: a round left them as
        # they were, or devices keep their model themselves.
        is_again = not self._n_open[source] and not nodes.isdisjoint(self._nodes[source])
        return kind in self._replied and (is_again or not is_same)

    def reply(self, run: Runtime, message_id: str, reply: Message, status: str) -> None:
        """Add the metrics of a client."""
        if run.tells:
            return
        kind = reply.metadata.message_type
        source = kind.split(".")[0]
        self._n_open[source] -= 1
        if source == "query" and not reply.has_error() and reply.content.array_records:
            self._query_trains = "train" not in self._numbers
        if source in self._numbers or (source == "evaluate" and "train" in self._numbers):
            self._replied.add(kind)
            sums = self._sums.setdefault(source, {})
            for record in [] if reply.has_error() else reply.content.metric_records.values():
                add_metrics(sums, *_measured(record))
        if self._n_open.total() <= 0 and not run.n_loops:
            # The app gets its last replies, and ends with what it next sends.
            try:
                self._tell(run)
            except RunEnded as end:
                self._end = end

    def finish(self, run: Runtime) -> None:
        """Report the metrics of the last replies, now that the app is over."""
        for source in () if run.tells else tuple(self._numbers):
            # A limit that it reaches just now ends it no more.
            with suppress(RunEnded):
                self._end_round(run, source)

    def _end_round(self, run: Runtime, source: str) -> None:
        """Report the rest of a round, and its end if there was any reply."""
        self._tell(run)
        if any(kind.startswith(source) for kind in self._replied):
            before = 0 if source == "query" else run.before
            run.metrics(self._numbers[source] - before, source, {})

    def _tell(self, run: Runtime) -> None:
        """Report the metrics of the rounds that go on, as far as they are known."""
        known, self._sums = self._sums, {}
        for source in _SOURCES:
            if source in known:
                of = "train" if source == "evaluate" and "train" in self._numbers else source
                before = 0 if source == "query" else run.before
                number = self._numbers[of] - before
                run.metrics(number, source, means_of(known[source]), is_over=False)


class NoneGood(Callback):
    """Ends a run in which nothing is good: every client fails, or every reply is rejected.

    It is told once each device has failed, or after fifty jobs, as long as none was good before.
    """

    def __init__(self, n_devices: int) -> None:
        """Start before the first message.

        Args:
            n_devices: that are enrolled.
        """
        self._n_devices = n_devices
        self._nodes: dict[str, int] = {}
        """The node of each reply that is not rejected yet."""
        self._failed: set[int] = set()
        self._n_failed, self._first = 0, ""

    def reply(self, run: Runtime, message_id: str, reply: Message, status: str) -> None:
        """Note a reply, which may still be rejected.

        Raises:
            FedstaleError: every client has failed.
        """
        if not reply.metadata.message_type.startswith("train"):
            return
        node_id = reply.metadata.src_node_id
        if status == CLIENT_ERROR:
            self._fail(node_id, f"error {reply.error.code}: {first_line(reply.error.reason)}")
        elif not reply.has_error():
            self._nodes[message_id] = node_id

    def sending(self, run: Runtime, messages: Sequence[Message]) -> None:
        """Count replies as good that were not rejected by now."""
        if self._nodes:
            run.remove(self)

    def rejected(self, run: Runtime, message_id: str, *, reason: str) -> None:
        """Note a rejection.

        Raises:
            FedstaleError: every reply has been rejected.
        """
        if message_id in self._nodes:
            self._fail(self._nodes.pop(message_id), reason)

    def _fail(self, node_id: int, reason: str) -> None:
        self._first = self._first or reason
        self._failed.add(node_id)
        self._n_failed += 1
        if self._nodes:
            # Replies that are looked at next may be good.
            return
        if self._n_failed >= _NONE_GOOD or len(self._failed) == self._n_devices:
            raise FedstaleError(
                f"none of the {self._n_failed} replies from {len(self._failed)} devices was good; "
                f"the first: {self._first}"
            )


def _not_numbers(content: RecordDict) -> list[str]:
    """Return the names of metrics in a reply that are NaN or infinite."""
    found = []
    for name, record in entries(content).items():
        if isinstance(record, MetricRecord) or name in _OLDER:
            for value in entries(record).values():
                # Most are finite, and to look for names takes longer than all the rest.
                if type(value) not in (int, float) or not isfinite(value):
                    found += [key for key, n in numbers(record).items() if not isfinite(n)]
                    break
    return found


def _measured(record: MetricRecord) -> tuple[float, dict[str, float]]:
    """Return by how many examples a record counts, and its metrics."""
    values = numbers(record)
    examples = values.pop(_EXAMPLES, 1.0)
    return (examples if 0 <= examples <= MOST_EXAMPLES else 0.0), values


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
        facts: for the summary: status, reason, app, devices, seed and the like. A run that came to
            its end, though the metric of its limit was never measured, has failed.
    """
    if facts["status"] in ("finished", "stuck") and (why := metrics.unmeasured()):
        reason = f"{facts['reason']}; {why}" if facts["reason"] else why
        status = "failed" if facts["status"] == "finished" else "stuck"
        facts = {**facts, "status": status, "reason": reason}
    events = folder.read_events(("kind", *COST_COLUMNS))
    kinds = by_kind(events)
    errors = client_errors(folder.read_events(ERROR_COLUMNS, status=CLIENT_ERROR))
    hints = [*run.hints, metrics.without_forecasts(), *_unanswered(folder, kinds)]
    folder.write_metrics(metrics.rows)
    if metrics.arrays is not None:
        folder.write_model(metrics.arrays)
    folder.write_summary(
        {
            **facts,
            "hint": "; ".join(filter(None, hints)),
            "versions": versions(),
            "machine": {"processor": processor(), "cores": n_cores(), "system": system()},
            "strategy": facts.get("strategy") or in_words(run.strategy),
            "selector": in_words(getattr(run.strategy, "selector", None)),
            "virtual_s": run.now(),
            "rounds": metrics.rounds,
            **ledger(events),
            "messages": kinds,
            "client_errors": errors,
            "rejected": rejections(rejected := folder.read_events(ERROR_COLUMNS, status=REJECTED)),
            "rejected_devices": rejected_devices(rejected),
            **{
                kind: {"replies": sum(by_node.values()), "nodes": len(by_node)}
                for kind, by_node in run.limits.items()
            },
            "metrics": metrics.latest,
            "not_numbers": metrics.not_numbers,
            **run.summary,
        }
    )
    return report_at_end(folder.path)


def _unanswered(folder: RunFolder, kinds: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield in words which kinds of messages no client has answered but with an error.

    A run in which every training fails has failed; other messages it may go on without.
    """
    for kind, found in kinds.items():
        if found["reported"] or kind.startswith("train"):
            continue
        jobs = folder.read_events(["kind", "reason"], status=CLIENT_ERROR)
        reasons = jobs.filter(pc.equal(jobs["kind"], kind))["reason"]
        if len(reasons):
            first = first_line(reasons[0])
            yield f"none of {found['sent']:,} messages {kind} was answered; the first: {first}"


def ending(problem: BaseException) -> tuple[str, str]:
    """Return how a run ended that an exception has ended, as a status and a reason."""
    if isinstance(problem, RunEnded):
        return ("stuck" if problem.stuck else "stopped"), problem.reason
    if isinstance(problem, FedstaleError):
        return "failed", str(problem)
    return "failed", quoted(f"{type(problem).__name__}: {problem}")
