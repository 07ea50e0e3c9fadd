"""Metrics of a run on real devices for Prometheus.

`Exporter` is a callback of the run, and its numbers live in this process alone: each run counts
from zero, also one that resumes another. The text format, counters and histograms are those of
Prometheus's client library.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version as version_of
from typing import Any

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fedstale import __version__
from fedstale.errors import ConfigError, needs
from fedstale.flower import content_bytes
from fedstale.live.server import listening, observed
from fedstale.live.watching import Watcher
from fedstale.strategies.server import Runtime, SuperLinkGrid, connected
from fedstale.strategies.types import ClientUpdate

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
        self.registry, self._turned_at = registry, time.perf_counter()
        ProcessCollector(registry=registry)

        def made(kind: type, name: str, about: str, *labels: str, **options: Any) -> Any:
            return kind(f"fedstale_{name}", about, labels, registry=registry, **options)

        about = {"app": app, "run_id": str(run_id), "fedstale": __version__}
        made(Gauge, "run_info", "Constant 1.", *about, "flwr").labels(
            **about, flwr=version_of("flwr")
        ).set(1)
        made(Gauge, "turn_age_seconds", "Since the loop has last turned.").set_function(
            lambda: time.perf_counter() - self._turned_at
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

    # What a run tells.

    def started(self, run: Runtime) -> None:
        """Begin to count what is rejected."""
        self._turned()
        # What a resumed run has rejected before is no news.
        self._checks = None

    def job_sent(self, run: Runtime, message_id: str, message: Message) -> None:
        """Count a message."""
        self._turned()
        kind = _type(message.metadata.message_type)
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
        self._online.set(run.n_online())
        self._in_flight.set(run.n_in_flight())

    def _turned(self) -> None:
        self._turned_at = time.perf_counter()


@contextmanager
def exported(grid: Grid, port: int, *, app: str = "", run_id: int = 0) -> Iterator[Grid]:
    """Export a run on real devices to Prometheus on this machine while the block runs.

    `/metrics` is at 127.0.0.1. A simulation, whose seconds are not those of a clock on a wall, is
    left as it is.

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
    from prometheus_client import exposition  # noqa: PLC0415 - an extra

    async def metrics(request: Request) -> Response:
        encode, kind = exposition.choose_encoder(request.headers.get("accept", ""))
        return Response(encode(exporter.registry), media_type=kind)

    with listening([Route("/metrics", metrics)], port, setting="metrics-port"):
        yield observed(own, exporter)


def _type(message_type: str) -> str:
    """Return the type of a message as a label, of which there are few.

    Example:
        >>> _type("query.forecast"), _type("system")
        ('query', 'other')
    """
    kind = message_type.split(".", maxsplit=1)[0]
    return kind if kind in _TYPES else "other"
