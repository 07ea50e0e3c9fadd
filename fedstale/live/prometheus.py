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
from typing import Any

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
from fedstale.strategies.server import Runtime, SuperLinkGrid, connected
from fedstale.strategies.types import ClientUpdate

TURN_LIMIT_S = 300.0
"""A loop that has not turned for longer is not healthy; while it waits, it turns each second. A
server step and an evaluation on the server must take less."""

_TYPES = ("train", "evaluate", "query")
_SECONDS = (0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_STALENESS = (0, 1, 2, 4, 8, 16, 32, 64)
_JOBS, _METRICS, _NAME = 100_000, 64, 40


class Exporter(Watcher):
    """Counts what happens in a run, for Prometheus.

    Attributes:
        registry: of the client library, with all metrics of this run.
    """

    def __init__(self, *, app: str = "", run_id: int = 0) -> None:
        """Start at zero.

        Args:
            app: name of the app, as a label.
            run_id: Flower's id of the run, as a label.

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
        self.registry = registry
        ProcessCollector(registry=registry)

        def made(kind: type, name: str, about: str, *labels: str, **options: Any) -> Any:
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
        self._online = made(Gauge, "nodes_online", "Nodes online, when last looked for.")
        self._in_flight = made(Gauge, "jobs_in_flight", "Messages without a reply.")
        self._n_sent = made(Count, "jobs_sent", "Messages sent.", "type")
        self._n_ended = made(
            Count, "jobs_ended", "Jobs by their end, as the server saw it.", "type", "ending"
        )
        self._n_checked = made(Count, "checks", "Replies rejected or limited.", "kind")
        self._staleness = made(
            Histogram, "update_staleness", "Of aggregated updates.", buckets=_STALENESS
        )
        self._sent_bytes = made(Count, "sent_bytes", "Bytes to nodes.", "type")
        self._received_bytes = made(Count, "received_bytes", "Bytes from nodes.", "type")
        self._seconds = made(
            Histogram, "reply_seconds", "From a message to its reply.", "type", buckets=_SECONDS
        )
        self._metric = made(Gauge, "metric", "Latest value of a metric.", "source", "name")
        self._jobs: dict[str, tuple[str, float]] = {}
        """Type of each message that has had no reply, and when it was sent."""
        self._checks: Counter[str] | None = None
        self._named: set[tuple[str, str]] = set()
        self._has_model = self._has_nodes = False
        self._turned_at = time.perf_counter()

    # What a run tells.

    def started(self, run: Runtime) -> None:
        """Note that there is a model to send."""
        self._turned()
        # What a resumed run has rejected before is no news.
        self._has_model, self._checks = True, None

    def job_sent(self, run: Runtime, message_id: str, message: Message) -> None:
        """Count a message."""
        self._turned()
        about, self._has_model = message.metadata, True
        kind = _type(about.message_type)
        if not message_id:
            self._n_ended.labels(kind, "not sent").inc()
            return
        self._n_sent.labels(kind).inc()
        self._sent_bytes.labels(kind).inc(content_bytes(message.content))
        self._jobs[message_id] = kind, run.now()
        if len(self._jobs) > _JOBS:
            del self._jobs[next(iter(self._jobs))]

    def reply(self, run: Runtime, message_id: str, reply: Message, status: str) -> None:
        """Count a reply, or the error in its place."""
        self._turned()
        kind, sent_at = self._jobs.pop(message_id, (_type(reply.metadata.message_type), None))
        if not reply.has_error():
            self._received_bytes.labels(kind).inc(content_bytes(reply.content))
        if sent_at is not None:
            self._n_ended.labels(kind, status).inc()
            self._seconds.labels(kind).observe(run.now() - sent_at)

    def rejected(self, run: Runtime, message_id: str, *, reason: str) -> None:
        """Count a job that was given up."""
        self._turned()
        if job := self._jobs.pop(message_id, None):
            self._n_ended.labels(job[0], "timed out").inc()

    def new_version(
        self, run: Runtime, version: int, arrays: ArrayRecord, updates: Sequence[ClientUpdate]
    ) -> None:
        """Count a version, and the updates that were used."""
        self._turned()
        for update in updates:
            self._staleness.observe(update.staleness)
        self._versions.inc()
        self._version.set(version)

    def metrics(self, run: Runtime, version: int, source: str, values: Mapping[str, float]) -> None:
        """Note metrics."""
        super().metrics(run, version, source, values)
        self._turned()
        for name, value in values.items():
            key = source, name[:_NAME]
            if key in self._named or len(self._named) < _METRICS:
                self._named.add(key)
                self._metric.labels(*key).set(value)

    def time_moved(self, run: Runtime) -> None:
        """Note that the loop has turned, and the checks of replies since it did before."""
        self._turned()
        checks = Counter(run.rejections)
        for kind, n in (checks - (checks if self._checks is None else self._checks)).items():
            self._n_checked.labels(kind.removeprefix("rejected: ")).inc(n)
        self._checks = checks
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
        if age <= TURN_LIMIT_S:
            return ""
        return f"the loop has not turned for {age:.0f} s: expected {TURN_LIMIT_S:g} at most"

    def unready(self) -> str:
        """Name the obstacles to training; empty without any."""
        missing = {"no model yet": self._has_model, "no node online": self._has_nodes}
        return ", ".join(name for name, is_there in missing.items() if not is_there)

    def _turned(self) -> None:
        self._turned_at = time.perf_counter()


def _routes(exporter: Exporter) -> list[Route]:
    """Answer with metrics, or with whether something is amiss."""
    from prometheus_client import exposition  # noqa: PLC0415 - an extra

    async def metrics(request: Request) -> Response:
        encode, kind = exposition.choose_encoder(request.headers.get("accept", ""))
        return Response(encode(exporter.registry), media_type=kind)

    def status_of(amiss: Callable[[], str]) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def answer(request: Request) -> Response:
            why = amiss()
            return PlainTextResponse(f"{why or 'ok'}\n", 503 if why else 200)

        return answer

    return [
        Route("/metrics", metrics),
        Route("/healthz", status_of(exporter.unhealthy)),
        Route("/readyz", status_of(exporter.unready)),
    ]


@contextmanager
def exported(grid: Grid, port: int, *, app: str = "", run_id: int = 0) -> Iterator[Grid]:
    """Export a run on real devices to Prometheus on this machine while the block runs.

    `/metrics`, `/healthz` and `/readyz` are at 127.0.0.1. A simulation, whose seconds are not those
    of a clock on a wall, is left as it is.

    Args:
        grid: of a ServerApp.
        port: TCP port; 0 exports nothing.
        app: name of the app, as a label.
        run_id: Flower's id of the run, as a label.

    Yields:
        The grid to start the strategy on.

    Raises:
        ConfigError: the port is not free, or the client library is not installed.
    """
    own = connected(grid) if port else None
    if not isinstance(own, SuperLinkGrid):
        yield grid
        return
    exporter = Exporter(app=app, run_id=run_id)
    with listening(_routes(exporter), port, setting="metrics-port"):
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
