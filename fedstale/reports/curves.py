"""Metrics against device time and against bytes, for one run or for several together."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from fedstale.reports.figure import (
    DASHES,
    Array,
    Figure,
    byte_unit,
    curve,
    plain,
    thinned,
    time_unit,
)

if TYPE_CHECKING:
    from fedstale.reports.run import Run

POINTS = 1000
"""Points of one curve that a page shows at most."""
_OTHERS = 6
_SOURCES = {"server": "central", "evaluate": "clients", "train": "clients, training"}
BOOKKEEPING = {"num-examples", "num_examples"}
"""Names among the metrics of a run that measure nothing."""


def figures(runs: "Sequence[Run]") -> list[Figure]:
    """Return two figures for accuracy, for loss, and for each of a few other metrics.

    Args:
        runs: the runs to overlay; of several runs, the source that decides is shown: a central
            evaluation if there is one, else evaluation by clients.
    """
    names = sorted({name for run in runs for name in run.metrics["name"]} - BOOKKEEPING)
    accuracies = [name for name in names if "acc" in name.lower()]
    losses = [name for name in names if "loss" in name.lower() and name not in accuracies]
    others = [name for name in names if name not in accuracies + losses]
    groups = [("Accuracy", accuracies), ("Loss", losses)]
    groups += [(name, [name]) for name in others[:_OTHERS]]
    found: list[Figure] = []
    for number, (title, members) in enumerate(groups):
        if members:
            found += metric(runs, title, members, number)
    return found


def hidden(runs: "Sequence[Run]") -> str:
    """Return a sentence on the metrics for which there is no figure, or nothing."""
    names = {name for run in runs for name in run.metrics["name"]} - BOOKKEEPING
    others = [n for n in names if "acc" not in n.lower() and "loss" not in n.lower()]
    left = len(others) - _OTHERS
    return f"{left} further metrics are in metrics.parquet only." if left > 0 else ""


def bytes_at(run: "Run", instants: Array) -> Array:
    """Return the bytes that all devices had moved by each instant.

    Args:
        run: the run.
        instants: in s; shape (k,).

    Returns:
        Bytes, shape (k,). A job's bytes count from the instant at which its device is done.
    """
    ended = run.jobs["ended_at"].to_numpy(np.float64)
    order = np.argsort(ended, kind="stable")
    total = np.concatenate(([0.0], np.cumsum(run.moved_bytes[order])))
    return total[np.searchsorted(ended[order], instants, side="right")]


def metric(
    runs: "Sequence[Run]", title: str, members: Sequence[str], number: int = 2
) -> tuple[Figure, Figure]:
    """Return some metrics in one figure against device time, and in one against bytes.

    Args:
        runs: the runs to overlay.
        title: of the figures.
        members: the metrics.
        number: of the figures in a page: 0 for accuracy and 1 for loss.
    """
    unit, length_s = time_unit(max(run.end_s for run in runs))
    lines = [line for i, run in enumerate(runs) for line in _lines(run, i, members, len(runs))]
    most = max((float(line.moved.max()) for line in lines), default=0.0)
    size_unit, size = byte_unit(most)
    is_accuracy = all("acc" in name.lower() for name in members)
    about = "Share of correct answers" if is_accuracy else f"{title}, as the app reports it"
    if any(len(line.times) > POINTS for line in lines):
        about += f"; each curve is thinned to {POINTS} evenly spread points"
    is_share = is_accuracy and all(line.values.max(initial=0.0) <= 1.0 for line in lines)
    layout = {"yaxis": {"tickformat": ".0%"}} if is_share else {}
    by_time = [line.times / length_s for line in lines]
    by_bytes = [line.moved / size for line in lines]

    def against(key: str, what: str, in_unit: str, positions: Sequence[Array]) -> Figure:
        return Figure(
            id=f"metric-{number}-{key}",
            title=f"{title} against {what}",
            about=about + ".",
            traces=[_trace(line, x) for line, x in zip(lines, positions, strict=True)],
            x_title=f"{what} ({in_unit})",
            y_title=plain(title.lower()) if number < 2 else plain(title),
            layout=layout,
        )

    return (
        against("time", "device time", unit, by_time),
        against("bytes", "traffic", size_unit, by_bytes),
    )


class _Line(NamedTuple):
    """One curve: its label, its number, and its points."""

    label: str
    number: int
    times: Array
    moved: Array
    values: Array


def _lines(run: "Run", position: int, members: Sequence[str], n_runs: int) -> list[_Line]:
    """Return the curves of one run."""
    rows = run.metrics[run.metrics["name"].isin(members)]
    if n_runs > 1:
        first = next((s for s in _SOURCES if (rows["source"] == s).any()), None)
        rows = rows[rows["source"] == first]
    lines: list[_Line] = []
    groups: list[tuple[Any, pd.DataFrame]] = list(rows.groupby(["source", "name"], sort=True))
    groups.sort(key=lambda group: (_rank(group[0][0]), group[0][1]))
    for number, ((source, name), group) in enumerate(groups):
        what = f"{_SOURCES.get(source, source)}: {name}"
        label, colour = (what, number) if n_runs == 1 else (run.name, position)
        times = group["time_s"].to_numpy(np.float64)
        values = group["value"].to_numpy(np.float64)
        lines.append(_Line(label, colour, times, bytes_at(run, times), values))
    return lines


def _trace(line: _Line, x: Array) -> dict[str, Any]:
    kept = thinned(len(x), POINTS)
    return curve(
        line.label,
        f"series-{line.number % 7}",
        x[kept],
        line.values[kept],
        mode="lines+markers" if len(kept) <= 60 else "lines",
        line={"width": 2, "dash": DASHES[line.number % len(DASHES)]},
        marker={"size": 5},
    )


def _rank(source: str) -> int:
    known = list(_SOURCES)
    return known.index(source) if source in known else len(known)
