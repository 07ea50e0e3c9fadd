"""Metrics of a run on real devices for Prometheus, and its health and readiness.

`Exporter` is a callback of the run, and its numbers live in this process alone: each run counts
from zero, also one that resumes another. The text format, counters and histograms are those of
Prometheus's client library.
"""

import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version as version_of
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from fedstale import __version__
from fedstale.compat import report_stock_strategies
from fedstale.errors import ConfigError, needs
from fedstale.flower import content_bytes
from fedstale.live.server import listening
from fedstale.live.watching import Watcher
from fedstale.strategies.server import (
    REPORTED,
    Runtime,
    SuperLinkGrid,
    connected,
)
from fedstale.strategies.types import ClientUpdate, next_job_in

PHASES = ("send", "train", "evaluate", "query", "other", "buffer", "aggregate", "test", "version")
"""What `fedstale_phase_seconds` times.

send: the SuperLink takes the messages. train, evaluate, query, other: from a message of this type
to its reply. buffer: from an update's arrival to the version that it went into. aggregate: from
the event before a server step to its end. test: the server evaluates a version. version: from one
version to the next.
"""
TURN_LIMIT_S = 300.0
"""A loop that has not turned for longer is not healthy; while it waits, it turns each second."""

_TYPES = PHASES[1:4]
_SECONDS = (0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_STALENESS = (0, 1, 2, 4, 8, 16, 32, 64)
_JOBS, _METRICS, _NAME = 100_000, 64, 40


class _Sent(NamedTuple):
    """A message that has had no reply."""

    type: str
    at: float
    node_id: int
    p_finish: float | None


class Exporter(Watcher):
    """Counts what happens in a run, for Prometheus.

    Attributes:
        registry: of the client library, with all metrics of this run.
    """

    def __init__(
        self, *, app: str = "", run_id: int = 0, turn_limit_s: float = TURN_LIMIT_S
    ) -> None:
        """Start at zero.

        Args:
            app: name of the app, as a label.
            run_id: Flower's id of the run, as a label.
            turn_limit_s: after how long without a turn the run counts as stuck, in s.

        Raises:
            ConfigError: the client library is not installed.
        """
        super().__init__()
        try:
            # An extra.
            from prometheus_client import (  # noqa: PLC0415
                CollectorRegistry,
                Gauge,
                Histogram,
                ProcessCollector,
            )
            from prometheus_client import Counter as Count  # noqa: PLC0415
        except ImportError:
            raise ConfigError(f"metrics-port {needs('prometheus_client')}") from None
        registry: CollectorRegistry = CollectorRegistry()
        self.registry, self._turn_limit_s = registry, turn_limit_s
        ProcessCollector(registry=registry)

        def made(kind: type, name: str, about: str, *labels: str, **options: Any) -> Any:  # noqa: ANN401
            return kind(f"fedstale_{name}", about, labels, registry=registry, **options)

        about = {"app": app, "run_id": str(run_id), "fedstale": __version__}
        made(Gauge, "run_info", "Constant 1.", *about, "flwr").labels(
            **about, flwr=version_of("flwr")
        ).set(1)
        made(Gauge, "turn_age_seconds", "Since the loop has last turned.").set_function(
            self.turn_age_s
        )
        self._version = made(Gauge, "model_version", "Number of the latest version.")
        self._versions = made(Count, "versions", "Versions made.")
        self._buffered = made(Gauge, "buffered_updates", "Updates that wait for a server step.")
        self._online = made(Gauge, "nodes_online", "Nodes online, when last looked for.")
        self._in_flight = made(Gauge, "jobs_in_flight", "Messages without a reply.")
        self._n_sent = made(Count, "jobs_sent", "Messages sent.", "type")
        self._n_ended = made(
            Count, "jobs_ended", "Jobs by their end, as the server saw it.", "type", "ending"
        )
        self._n_rejected = made(Count, "rejections", "Replies that were not aggregated.", "reason")
        self._n_limited = made(Count, "updates_limited", "Updates capped or clipped.", "kind")
        self._staleness = made(
            Histogram, "update_staleness", "Of aggregated updates.", buckets=_STALENESS
        )
        self._sent_bytes = made(Count, "sent_bytes", "Bytes to nodes.", "type")
        self._received_bytes = made(Count, "received_bytes", "Bytes from nodes.", "type")
        self._foretold = made(Count, "forecast_jobs", "Ended trainings of a known forecast.")
        self._p_finish = made(Count, "forecast_p_finish", "Sum of their chances to finish.")
        self._finished = made(Count, "forecast_finished", "How many of them have finished.")
        self._seconds = made(
            Histogram, "phase_seconds", "Duration of a phase.", "phase", buckets=_SECONDS
        )
        self._metric = made(Gauge, "metric", "Latest value of a metric.", "source", "name")
        self._jobs: dict[str, _Sent] = {}
        self._arrived: dict[str, float] = {}
        """When updates came that wait for a server step, by message."""
        self._forecasts: dict[int, float] = {}
        self._kinds: Counter[str] | None = None
        self._named: set[tuple[str, str]] = set()
        self._has_model = self._has_nodes = self._counts_updates = False
        self._sending_at: float | None = None
        self._stepped_at: float | None = None
        self._made_at: float | None = None
        self._turned_at = time.perf_counter()

    # What a run tells.

    def started(self, run: Runtime) -> None:
        """Note that there is a model to send."""
        self._turned()
        # What a resumed run has rejected before is no news.
        self._has_model, self._kinds = True, None

    def sending(self, run: Runtime, messages: Sequence[Message]) -> None:
        """Note when messages are handed to the SuperLink."""
        self._note_kinds(run)
        self._turned()
        self._sending_at = self._turned_at

    def job_sent(self, run: Runtime, message_id: str, message: Message) -> None:
        """Count a message."""
        if self._sending_at is not None:
            self._turned()
            self._time("send", self._turned_at - self._sending_at)
            self._sending_at = None
        about, self._has_model = message.metadata, True
        kind = _type(about.message_type)
        if not message_id:
            self._n_ended.labels(kind, "not sent").inc()
            return
        self._n_sent.labels(kind).inc()
        self._sent_bytes.labels(kind).inc(content_bytes(message.content))
        node = about.dst_node_id
        p_finish = self._forecasts.get(node) if kind == "train" else None
        self._jobs[message_id] = _Sent(kind, run.now(), node, p_finish)
        if len(self._jobs) > _JOBS:
            del self._jobs[next(iter(self._jobs))]

    def reply(self, run: Runtime, message_id: str, reply: Message, status: str) -> None:
        """Count a reply, or the error in its place."""
        self._turned()
        sent = self._jobs.get(message_id)
        kind = sent.type if sent else _type(reply.metadata.message_type)
        if not reply.has_error():
            self._received_bytes.labels(kind).inc(content_bytes(reply.content))
        if sent is None:
            return
        self._end(message_id, status, finished=status == REPORTED)
        if reply.has_error():
            return
        self._time(kind, run.now() - sent.at)
        if (reported := next_job_in(reply).p_finish) is not None:
            self._forecasts[sent.node_id] = reported
        if kind == "train":
            self._arrived[message_id] = run.now()
            self._count_buffered()

    def rejected(self, run: Runtime, message_id: str, *, reason: str) -> None:
        """Count a reply that was not used, or a job that was given up."""
        found = self._note_kinds(run)
        self._turned()
        if message_id in self._jobs:
            self._end(message_id, "timed out", finished=False)
        elif message_id in self._arrived and not found:
            self._n_rejected.labels("not aggregated").inc()
        for kind, n in found.items():
            self._n_rejected.labels(kind.removeprefix("rejected: ")).inc(n)
        self._arrived.pop(message_id, None)
        self._count_buffered()

    def new_version(
        self, run: Runtime, version: int, arrays: ArrayRecord, updates: Sequence[ClientUpdate]
    ) -> None:
        """Count a version, and the updates that were used."""
        self._step()
        for update in updates:
            self._counts_updates = True
            self._staleness.observe(update.staleness)
            arrived = self._arrived.pop(update.message_id, None)
            if arrived is not None:
                self._time("buffer", run.now() - arrived)
        self._stepped_at = None
        self._versions.inc()
        self._version.set(version)
        if self._made_at is not None:
            self._time("version", run.now() - self._made_at)
        self._made_at = run.now()
        if not self._counts_updates:
            # Flower's strategies name no update; a round takes all that have come.
            self._arrived.clear()
        self._count_buffered()

    def metrics(self, run: Runtime, version: int, source: str, values: Mapping[str, float]) -> None:
        """Note metrics, and how long the server took for its own."""
        super().metrics(run, version, source, values)
        before = self._turned_at
        self._turned()
        if source == "server":
            self._time("test", self._turned_at - before)
        for name, value in values.items():
            key = source, name[:_NAME]
            if key in self._named or len(self._named) < _METRICS:
                self._named.add(key)
                self._metric.labels(*key).set(value)

    def time_moved(self, run: Runtime) -> None:
        """Note that the loop has turned."""
        self._note_kinds(run)
        self._turned()
        super().time_moved(run)

    def look(self, run: Runtime) -> None:
        """Note where the run is."""
        n_online = run.n_online()
        self._has_nodes = n_online > 0
        self._online.set(n_online)
        self._in_flight.set(run.n_in_flight())

    # What is asked of it.

    def turn_age_s(self) -> float:
        """Return how long ago the loop has last turned, in s."""
        return time.perf_counter() - self._turned_at

    def unhealthy(self) -> str:
        """Return why the run counts as stuck; empty if it does not."""
        age = self.turn_age_s()
        if age <= self._turn_limit_s:
            return ""
        return f"the loop has not turned for {age:.0f} s: expected {self._turn_limit_s:g} at most"

    def unready(self) -> str:
        """Name the obstacles to training; empty without any."""
        missing = {"no model yet": self._has_model, "no node online": self._has_nodes}
        return ", ".join(name for name, is_there in missing.items() if not is_there)

    # How it counts.

    def _turned(self) -> None:
        self._turned_at = time.perf_counter()

    def _time(self, phase: str, seconds: float) -> None:
        self._seconds.labels(phase).observe(seconds)

    def _step(self) -> None:
        """Time a server step, at the first event that tells of it."""
        if self._stepped_at is None:
            before, self._stepped_at = self._turned_at, time.perf_counter()
            self._time("aggregate", self._stepped_at - before)
        self._turned()

    def _end(self, message_id: str, ending: str, *, finished: bool) -> None:
        sent = self._jobs.pop(message_id)
        self._n_ended.labels(sent.type, ending).inc()
        if sent.p_finish is not None:
            self._foretold.inc()
            self._p_finish.inc(sent.p_finish)
            self._finished.inc(finished)

    def _count_buffered(self) -> None:
        while len(self._arrived) > _JOBS:
            del self._arrived[next(iter(self._arrived))]
        self._buffered.set(len(self._arrived))

    def _note_kinds(self, run: Runtime) -> Counter[str]:
        """Return the rejections by kind since the last look, and count what was limited."""
        kinds = Counter(run.rejections)
        found = kinds - self._kinds if self._kinds is not None else Counter[str]()
        self._kinds = kinds
        for kind in run.limits:
            if n := found.pop(kind, 0):
                self._n_limited.labels(kind).inc(n)
        return found


def _routes(exporter: Exporter) -> list[Route]:
    """Answer with metrics, or with whether something is amiss."""
    from prometheus_client import exposition  # noqa: PLC0415 - an extra

    async def metrics(request: Request) -> Response:
        encode, kind = exposition.choose_encoder(request.headers.get("accept", ""))
        return Response(encode(exporter.registry), media_type=kind)

    def told(amiss: Callable[[], str]) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def answer(request: Request) -> Response:
            why = amiss()
            return PlainTextResponse(f"{why or 'ok'}\n", 503 if why else 200)

        return answer

    return [
        Route("/metrics", metrics),
        Route("/healthz", told(exporter.unhealthy)),
        Route("/readyz", told(exporter.unready)),
    ]


@contextmanager
def exported(
    grid: Grid,
    port: int,
    *,
    app: str = "",
    run_id: int = 0,
    turn_limit_s: float = TURN_LIMIT_S,
) -> Iterator[Grid]:
    """Export a run on real devices to Prometheus on this machine while the block runs.

    `/metrics`, `/healthz` and `/readyz` are at 127.0.0.1. A simulation, whose seconds are not those
    of a clock on a wall, is left as it is.

    Args:
        grid: of a ServerApp.
        port: TCP port; 0 exports nothing.
        app: name of the app, as a label.
        run_id: Flower's id of the run, as a label.
        turn_limit_s: after how long without a turn of its loop the run counts as stuck, in s. A
            server step and an evaluation on the server must take less.

    Yields:
        The grid to start the strategy on.

    Raises:
        ConfigError: the port is not free, or the client library is not installed.
    """
    own = connected(grid) if port else None
    if not isinstance(own, SuperLinkGrid):
        yield grid
        return
    exporter = Exporter(app=app, run_id=run_id, turn_limit_s=turn_limit_s)
    with listening(_routes(exporter), "127.0.0.1", port, setting="metrics-port"):
        own.runtime.add(exporter)
        report_stock_strategies()
        yield own


def _type(message_type: str) -> str:
    """Return the type of a message as a label, of which there are few.

    Example:
        >>> _type("query.forecast"), _type("system")
        ('query', 'other')
    """
    kind = message_type.split(".", maxsplit=1)[0]
    return kind if kind in _TYPES else "other"
