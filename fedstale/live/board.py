"""What the live page shows, kept small: a run may last for weeks, its board never grows.

One thread writes to it and others read; a lock keeps them apart. Series are thinned to every second
point when they get long, so that they always span the whole run.
"""

import threading
from collections import Counter, deque
from typing import Any, NamedTuple

from fedstale.live.watching import Moment
from fedstale.reports.figure import Figure, numbers, plain, time_unit

POINTS = 600
"""Points of a series that are kept at most."""
FAILURES = 20
"""Failures that are listed, the latest first."""
_METRICS = 64
_CURVES = 8
_BARS = 30
_REASON = 200
_SOURCES = {"server": "central", "evaluate": "clients", "train": "clients, training"}
_DASHES = ("solid", "dash", "dot", "dashdot")


class _Failure(NamedTuple):
    at: float
    who: str
    ending: str
    reason: str


class _Series:
    """Points of a curve: all of them at first, then every second, every fourth, and so on."""

    def __init__(self) -> None:
        self.x: list[float] = []
        self.y: list[float] = []
        self._stride, self._skipped = 1, 0
        self.last: tuple[float, float] = (0.0, 0.0)

    def add(self, x: float, y: float) -> None:
        self.last = (x, y)
        self._skipped += 1
        if self._skipped < self._stride and self.x:
            return
        self._skipped = 0
        self.x.append(x)
        self.y.append(y)
        if len(self.x) > POINTS:
            self.x, self.y = self.x[::2], self.y[::2]
            self._stride *= 2

    def points(self, length_s: float) -> dict[str, list[float | None]]:
        """Return the coordinates, always with the last point."""
        x, y = list(self.x), list(self.y)
        if x and x[-1] != self.last[0]:
            x.append(self.last[0])
            y.append(self.last[1])
        return {"x": numbers([value / length_s for value in x]), "y": numbers(y)}


class Board:
    """A `Sink` that remembers what a page shows."""

    def __init__(self, title: str) -> None:
        """Begin with an empty board.

        Args:
            title: what is watched, in a few words.
        """
        self.title = title
        self._lock = threading.Lock()
        self._moment: Moment | None = None
        self._online, self._jobs_in_flight = _Series(), _Series()
        self._metrics: dict[tuple[str, str], _Series] = {}
        self._staleness: Counter[int] = Counter()
        self._endings: Counter[str] = Counter()
        self._failures: deque[_Failure] = deque(maxlen=FAILURES)
        self._ended = ""

    def moved(self, moment: Moment) -> None:
        """Note where the run is."""
        with self._lock:
            self._moment = moment
            self._online.add(moment.now, moment.online)
            self._jobs_in_flight.add(moment.now, moment.n_in_flight)

    def measured(self, at: float, version: int, source: str, name: str, value: float) -> None:
        """Note a metric."""
        with self._lock:
            if (source, name) in self._metrics or len(self._metrics) < _METRICS:
                self._metrics.setdefault((source, name), _Series()).add(at, value)

    def merged(self, at: float, staleness: float, weight: float) -> None:
        """Count a merged update."""
        with self._lock:
            self._staleness[int(staleness)] += 1

    def failed(self, at: float, who: str, ending: str, reason: str) -> None:
        """Note a job that came to nothing."""
        with self._lock:
            self._endings[ending[:40]] += 1
            self._failures.appendleft(_Failure(at, who[:80], ending[:40], reason[:_REASON]))

    def ended(self, how: str) -> None:
        """Note that the run is over, and how."""
        with self._lock:
            self._ended = how

    def snapshot(self) -> dict[str, Any]:
        """Return what the page shows now, as JSON can hold it."""
        with self._lock:
            now = 0.0 if self._moment is None else self._moment.now
            unit, length_s = time_unit(now)
            figures = [
                *self._curves(unit, length_s),
                self._devices(unit, length_s),
                self._late(),
                self._lost(),
            ]
            return {
                "title": self.title,
                "ended": self._ended,
                "cards": self._cards(unit, length_s),
                "share": None if self._moment is None else self._moment.share,
                "figures": [{**f.plot(), "about": f.about} for f in figures if f.traces],
                "failures": [
                    [f"{one.at / length_s:.3g} {unit}", one.who, one.ending, one.reason]
                    for one in self._failures
                ],
            }

    def _cards(self, unit: str, length_s: float) -> list[list[str]]:
        if self._moment is None:
            return [["device time", "not started"]]
        cards = [
            ["device time", f"{self._moment.now / length_s:.3g} {unit}"],
            ["rounds", f"{self._moment.rounds:,}"],
            ["online", f"{self._moment.online:,}"],
            ["in flight", f"{self._moment.n_in_flight:,}"],
            ["merged", f"{self._staleness.total():,}"],
            ["came to nothing", f"{self._endings.total():,}"],
        ]
        for (source, name), series in sorted(self._metrics.items()):
            is_share = "acc" in name.lower() and 0 <= series.last[1] <= 1
            if source == "server":
                value = f"{series.last[1]:.1%}" if is_share else f"{series.last[1]:.3g}"
                cards.append([name[:40], value])
        return cards[:10]

    def _curves(self, unit: str, length_s: float) -> list[Figure]:
        figures = []
        for key, title in (("acc", "Accuracy"), ("loss", "Loss")):
            chosen = [names for names in sorted(self._metrics) if key in names[1].lower()]
            traces: list[dict[str, Any]] = [
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": plain(f"{_SOURCES.get(source, source)}: {name}"),
                    "meta": f"series-{i % 7}",
                    "line": {"width": 2, "dash": _DASHES[i % len(_DASHES)]},
                    **self._metrics[source, name].points(length_s),
                }
                for i, (source, name) in enumerate(chosen[:_CURVES])
            ]
            about = f"{title}, as the app reports it."
            time = f"device time ({unit})"
            figures.append(
                Figure(id=key, title=title, about=about, traces=traces, x_title=time, y_title="")
            )
        return figures

    def _devices(self, unit: str, length_s: float) -> Figure:
        traces: list[dict[str, Any]] = [
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "meta": role,
                "line": {"width": 2, "dash": dash},
                **series.points(length_s),
            }
            for name, role, dash, series in (
                ("online", "series-2", "solid", self._online),
                ("jobs in flight", "series-1", "dash", self._jobs_in_flight),
            )
            if series.x
        ]
        return Figure(
            id="devices",
            title="Devices",
            about="Devices that are online, and jobs whose end the server has not seen.",
            traces=traces,
            x_title=f"device time ({unit})",
            y_title="",
            layout={"yaxis": {"rangemode": "tozero"}},
        )

    def _late(self) -> Figure:
        shown = sorted(self._staleness)[:_BARS]
        rest = sum(self._staleness[value] for value in sorted(self._staleness)[_BARS:])
        about = f"{self._staleness.total():,} merged updates"
        about += f"; {rest:,} more are staler than what is drawn." if rest else "."
        bar = {"type": "bar", "name": "updates", "meta": "series-0", "showlegend": False}
        return Figure(
            id="staleness",
            title="Staleness",
            about=about,
            traces=[{**bar, "x": shown, "y": [self._staleness[s] for s in shown]}] if shown else [],
            x_title="staleness (model versions)",
            y_title="updates",
        )

    def _lost(self) -> Figure:
        endings = self._endings.most_common(10)
        bar = {"type": "bar", "orientation": "h", "meta": "wasted", "showlegend": False}
        names, counts = [plain(ending) for ending, _ in endings], [count for _, count in endings]
        return Figure(
            id="failures",
            title="Jobs that came to nothing",
            about=f"{self._endings.total():,} jobs, as far as the server has seen.",
            traces=[{**bar, "name": "jobs", "x": counts, "y": names}] if endings else [],
            x_title="jobs",
            y_title="",
            layout={"yaxis": {"autorange": "reversed"}},
        )
