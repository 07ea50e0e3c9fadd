"""The live page and its server, for this machine alone.

A board is a callback of a run, simulated or on real devices. The thread of the run writes to it and
others read; a lock keeps them apart. A run may last for weeks, and its board never grows: series
are thinned to every second point when they get long, so that they always span the whole run.

Starlette and uvicorn answer, in a thread of their own: some files and one JSON document. Nothing is
fetched from anywhere else, and nothing that a browser sends is used but the path.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from typing import Any

import uvicorn
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fedstale.compat import report_stock_strategies
from fedstale.errors import ConfigError, first_line
from fedstale.live.watching import NO_LIMIT, Watcher
from fedstale.reports import (
    FROM_ZERO,
    SOURCES,
    Figure,
    accuracy_axis,
    curve,
    line_mode,
    metric_text,
    stepped,
    time_text,
    time_unit,
)
from fedstale.strategies.server import REJECTED, Callback, Runtime, RuntimeGrid, connected
from fedstale.strategies.types import ClientUpdate
from fedstale.until import Until

_HERE = "127.0.0.1"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src data: blob:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_SERVER: dict[str, Any] = {
    "headers": [*_HEADERS.items()],
    "log_config": None,
    "log_level": "warning",
    "access_log": False,
    "server_header": False,
    "lifespan": "off",
    "ws": "none",
    "timeout_graceful_shutdown": 1,
}
_FILES = {
    "/": ("fedstale.live", "page.html", "text/html"),
    "/live.js": ("fedstale.live", "live.js", "text/javascript"),
    "/page.js": ("fedstale.reports", "page.js", "text/javascript"),
    "/page.css": ("fedstale.reports", "page.css", "text/css"),
    "/chart.js": ("fedstale.reports", "vendor/chart.js", "text/javascript"),
}
POINTS = 600
"""Points of a series that are kept at most."""
FAILURES = 20
"""Failures that are listed, the latest first."""
_METRICS = 64
_CURVES = 8
_REASON = 200
_NAMES = 100_000


class _Series:
    """Points of a curve: all of them at first, then every second, every fourth, and so on."""

    def __init__(self) -> None:
        self.kept: list[tuple[float, float]] = []
        self._stride, self._skipped = 1, 0
        self.last: tuple[float, float] = (0.0, 0.0)

    def add(self, x: float, y: float) -> None:
        self.last = (x, y)
        self._skipped += 1
        if self._skipped < self._stride and self.kept:
            return
        self._skipped = 0
        self.kept.append(self.last)
        if len(self.kept) > POINTS:
            self.kept = self.kept[::2]
            self._stride *= 2

    def points(self, length_s: float) -> dict[str, list[float]]:
        """Return instants in units of `length_s` and values, always with the last point."""
        points = self.kept
        if points and points[-1][0] != self.last[0]:
            points = [*points, self.last]
        return {"x": [x / length_s for x, _ in points], "y": [y for _, y in points]}


class Board(Watcher):
    """Remembers what a page shows of a run."""

    def __init__(
        self,
        title: str,
        *,
        until: Until = NO_LIMIT,
        settings: str = "",
        time_name: str = "time",
        every_s: float = 0.25,
    ) -> None:
        """Begin with an empty board.

        Args:
            title: what is watched, in a few words.
            until: limit of the run, or the app's rounds, to show how much of it is done.
            settings: of the run, as text.
            time_name: what its instants are, such as virtual time.
            every_s: seconds of wall time from one look at the clock to the next.
        """
        super().__init__(until, every_s=every_s)
        self.title, self.settings, self.time_name = title, settings, time_name
        self._share: float | None = None
        self._began_at = time.perf_counter()
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}
        self._online, self._in_flight = _Series(), _Series()
        self._metrics: dict[tuple[str, str], _Series] = {}
        self._staleness = self._n_used = self._n_trained = self._n_lost = 0
        """Trainings that were answered: Flower's strategies do not say what they use."""
        self._failures: deque[tuple[float, str, str, str]] = deque(maxlen=FAILURES)
        """Instant in s, node, ending and reason."""
        self._ended = ""

    # What a run tells.

    def job_sent(self, run: Runtime, message_id: str, message: Message) -> None:
        """Remember which node a message went to."""
        self._names[message_id] = run.name_of(message.metadata.dst_node_id)
        if len(self._names) > _NAMES:
            del self._names[next(iter(self._names))]

    def reply(self, run: Runtime, message_id: str, reply: Message, status: str) -> None:
        """Count a training, or a failure."""
        if not reply.has_error():
            self._n_trained += reply.metadata.message_type.startswith("train")
        else:
            self._failed(run, message_id, status, reply.error.reason or "")

    def new_version(
        self, run: Runtime, version: int, arrays: ArrayRecord, updates: Sequence[ClientUpdate]
    ) -> None:
        """Count the updates that were used."""
        for update in updates:
            self._names.pop(update.message_id, None)
        with self._lock:
            self._n_used += len(updates)
            self._staleness += sum(update.staleness for update in updates)

    def rejected(self, run: Runtime, message_id: str, *, reason: str) -> None:
        """Count a reply that was not used."""
        self._failed(run, message_id, REJECTED, reason)

    def metrics(self, run: Runtime, version: int, source: str, values: Mapping[str, float]) -> None:
        """Note metrics."""
        with self._lock:
            super().metrics(run, version, source, values)
            for name, value in values.items():
                if (source, name) in self._metrics or len(self._metrics) < _METRICS:
                    self._metrics.setdefault((source, name), _Series()).add(run.now(), value)

    def look(self, run: Runtime) -> None:
        """Note where the run is."""
        now, online, in_flight = run.now(), run.n_online(), run.n_in_flight()
        with self._lock:
            self._share = self.share(run)
            self._online.add(now, online)
            self._in_flight.add(now, in_flight)

    def ended(self, run: Runtime, status: str, reason: str) -> None:
        """Note that the run is over, and how."""
        super().ended(run, status, reason)
        with self._lock:
            self._ended = f"{status}: {reason}" if reason else status

    def _failed(self, run: Runtime, message_id: str, ending: str, reason: str) -> None:
        # What was given up may fail later, and an error is rejected when it has come.
        if (name := self._names.pop(message_id, None)) is None:
            return
        with self._lock:
            self._n_lost += 1
            why = first_line(reason)[:_REASON]
            self._failures.appendleft((run.now(), name[:80], ending[:40], why))

    # What a page shows.

    def snapshot(self) -> dict[str, Any]:
        """Collect the page's present content, as JSON can hold it."""
        with self._lock:
            now = self._online.last[0]
            unit, length_s = time_unit(now)
            return {
                "title": self.title,
                "ended": self._ended,
                "cards": self._cards(f"{now / length_s:.3g} {unit}"),
                "share": self._share,
                "left": self._left(),
                "settings": self.settings,
                "figures": [
                    {**figure.plot(), "about": figure.about}
                    for figure in self._figures(unit, length_s)
                    if figure.traces
                ],
                "failures": [
                    [f"{at / length_s:.3g} {unit}", *words] for at, *words in self._failures
                ],
            }

    def _left(self) -> str:
        """Estimate the time left from the time taken so far."""
        if not self._share or self._ended:
            return ""
        left_s = (time.perf_counter() - self._began_at) * (1.0 - self._share) / self._share
        return f"about {time_text(left_s)} left"

    def _cards(self, now: str) -> list[list[str]]:
        if not self._online.kept:
            return [[self.time_name, "not started"]]
        used = [["trained", f"{self._n_trained:,}"]]
        if self._n_used:
            mean = f"{self._staleness / self._n_used:.3g}"
            used = [["aggregated", f"{self._n_used:,}"], ["mean staleness", mean]]
        cards = [
            [self.time_name, now],
            ["rounds", f"{self.rounds:,}"],
            ["online", f"{self._online.last[1]:,}"],
            ["in flight", f"{self._in_flight.last[1]:,}"],
            *used,
            ["came to nothing", f"{self._n_lost:,}"],
        ]
        for (source, name), series in sorted(self._metrics.items()):
            if source == "server":
                cards.append([name[:40], metric_text(name, series.last[1])])
        return cards[:10]

    def _figures(self, unit: str, length_s: float) -> list[Figure]:
        """Return the figures of metrics and of devices over time."""

        def named(key: str) -> list[dict[str, Any]]:
            chosen = [names for names in sorted(self._metrics) if key in names[1].lower()]
            return [
                curve(
                    f"{SOURCES.get(source, source)}: {name}",
                    i,
                    **series.points(length_s),
                    mode=line_mode(len(series.kept)),
                )
                for i, (source, name) in enumerate(chosen[:_CURVES])
                for series in (self._metrics[source, name],)
            ]

        devices = (("online", 2, self._online), ("jobs in flight", 1, self._in_flight))
        counted = [
            stepped(name, look, **series.points(length_s))
            for name, look, series in devices
            if series.kept
        ]
        as_reported = "as the app reports it."
        in_use = "Devices that are online, and jobs whose end the server has not seen."
        accuracies, x_title = named("acc"), f"{self.time_name} ({unit})"
        percent = accuracy_axis(accuracies)
        return [
            Figure(id=key, title=title, about=about, traces=traces, x_title=x_title, layout=layout)
            for key, title, about, traces, y_axis in (
                ("acc", "Accuracy", f"Accuracy, {as_reported}", accuracies, percent),
                ("loss", "Loss", f"Loss, {as_reported}", named("loss"), {}),
                ("devices", "Devices", in_use, counted, FROM_ZERO),
            )
            for layout in ({"xaxis": FROM_ZERO, "yaxis": y_axis},)
        ]


def observed(grid: Grid, *callbacks: Callback) -> RuntimeGrid:
    """Attach callbacks to a run on real devices, or a simulated one.

    Args:
        grid: what the ServerApp was given.
        callbacks: for instance a `Board` that is being served.

    Returns:
        The grid to start the strategy on; the same one for everyone who connects to `grid`.
    """
    own = connected(grid)
    for callback in callbacks:
        own.runtime.add(callback)
    report_stock_strategies()
    return own


@contextmanager
def serving(board: Board, port: int = 0) -> Iterator[str]:
    """Serve a board to users of this machine while the block runs; yields the address to open.

    Args:
        board: what is shown.
        port: TCP port; 0 takes a free one.

    Raises:
        ConfigError: another program has the port.
    """

    async def data(request: Request) -> Response:
        return JSONResponse(board.snapshot())

    routes = [Route("/data.json", data), *(Route(path, _file) for path in _FILES)]
    with listening(routes, port, setting="live") as bound:
        yield f"http://{_HERE}:{bound}/"


async def _file(request: Request) -> Response:
    package, name, kind = _FILES[request.url.path]
    return Response((resources.files(package) / name).read_bytes(), media_type=kind)


@contextmanager
def listening(routes: Sequence[Route], port: int, *, setting: str) -> Iterator[int]:
    """Answer users of this machine in a thread of its own while the block runs; yields the port.

    Args:
        routes: what is answered.
        port: TCP port; 0 takes a free one.
        setting: that the port comes from, for errors.

    Raises:
        ConfigError: another program has the port.
    """
    try:
        listener = socket.create_server((_HERE, port))
    except OSError as problem:
        # Python adds the address, which the sentence has.
        why = str(problem.strerror).split(" (")[0]
        raise ConfigError(
            f"{setting} = {port} cannot be listened at ({why}): expected a free port, or 0 for any"
        ) from None
    # Another site that makes its name point here would read what only users here may.
    here = Middleware(TrustedHostMiddleware, allowed_hosts=[_HERE, "localhost"])
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes, middleware=[here]), **_SERVER))
    thread = threading.Thread(
        target=server.run, args=([listener],), name="fedstale-live", daemon=True
    )
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
