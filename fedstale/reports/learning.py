"""Figures of learning: metrics against time and costs, staleness and weights.

Metrics are drawn for one run or for several together; staleness and weights for one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from fedstale.reports.figure import (
    FROM_ZERO,
    SOURCES,
    Array,
    Figure,
    accuracy_axis,
    byte_unit,
    curve,
    line_mode,
    numbers,
    reference,
    thinned,
    time_unit,
)

if TYPE_CHECKING:
    from fedstale.reports.run import Run

POINTS = 600
"""Points of one curve that a page shows at most."""
PAIRS = 800
"""Pairs of staleness and weight that the figure of weights shows at most."""
AXES = {
    "time": "virtual time",
    "versions": "versions of the model",
    "bytes": "traffic",
    "device_s": "work of all devices",
}
"""What metrics can be drawn against."""
Against = Literal["time", "versions", "bytes", "device_s"]
ROWS = 100
"""Versions that a table lists at most."""
BOOKKEEPING = {"num-examples", "num_examples"}
"""Names among the metrics of a run that measure nothing."""
_OTHERS = 6
_NO_WEIGHT = "; such a value has no weight in a mean, unless the app averages itself"
_BARS, _ROWS = 60, 60


def metrics(run: "Run") -> list[Figure]:
    """Return a figure for accuracy, one for loss, and one for each of a few other metrics."""
    accuracies, losses, others = by_kind(measured_names([run]))
    groups = [("Accuracy", accuracies), ("Loss", losses)]
    groups += [(name, [name]) for name in others[:_OTHERS]]
    found = [
        metric(run, title, members, number)
        for number, (title, members) in enumerate(groups)
        if members
    ]
    if found:
        header, rows = versions(run)
        found[0] = replace(found[0], header=header, rows=rows)
    return found


def hidden(run: "Run") -> str:
    """Return a sentence on the metrics for which there is no figure, or nothing."""
    left = len(by_kind(measured_names([run]))[2]) - _OTHERS
    return f"{left} further metrics are in metrics.parquet only." if left > 0 else ""


def measured_names(runs: "Sequence[Run]") -> list[str]:
    """Return the names of all metrics of some runs, but of those that measure nothing."""
    return sorted({str(name) for run in runs for name in run.metrics["name"]} - BOOKKEEPING)


def last_values(run: "Run") -> pd.DataFrame:
    """Return the last row of each source and name among the metrics of a run, by these."""
    # What pandas calls the last of a group is not NaN.
    rows = run.metrics.drop_duplicates(["source", "name"], keep="last")
    return rows.sort_values(["source", "name"])


def not_numbers_in_words(run: "Run") -> str:
    """Return in a sentence which metrics of a run were NaN or infinite, or nothing."""
    counts: Mapping[str, int] = run.summary.get("not_numbers", {})
    told = []
    for metric, n in counts.items():
        source, _, name = metric.partition(" ")
        kind = "central evaluation" if source == "server" else f"{source} reply"
        kinds = f"{kind}s" if source == "server" else f"{source} replies"
        told.append(f"{name} in {n:,} {kind if n == 1 else kinds}")
    rows = run.metrics[~np.isfinite(run.metrics["value"]) & (run.metrics["source"] != "server")]
    for source, name in sorted(set(zip(rows["source"], rows["name"], strict=True))):
        if f"{source} {name}" not in counts:
            told.append(f"{name}, as no {source} reply with it states examples")
    if len(told) > _OTHERS:
        told[_OTHERS:] = [f"{len(told) - _OTHERS} other metrics"]
    if not told:
        return ""
    means = "" if all(metric.startswith("server ") for metric in counts) else _NO_WEIGHT
    return f"NaN or infinite: {', '.join(told)}{means}."


def by_kind(names: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the names of accuracies, of losses and of other metrics.

    Example:
        >>> by_kind(["eval_loss", "accuracy", "lag"])
        (['accuracy'], ['eval_loss'], ['lag'])
    """
    accuracies = [name for name in names if "acc" in name.lower()]
    losses = [name for name in names if "loss" in name.lower() and name not in accuracies]
    return accuracies, losses, [n for n in names if n not in accuracies and n not in losses]


def spent_by(run: "Run", column: str, instants: Array) -> Array:
    """Sum the work of all devices up to each instant.

    Args:
        run: the run.
        column: of its jobs: `moved_bytes`, or `busy_s`.
        instants: in s; shape (k,).

    Returns:
        The sums, shape (k,). A job counts from the instant at which its device is done.
    """
    ended = run.jobs["ended_at"].to_numpy(np.float64)
    order = np.argsort(ended, kind="stable")
    total = np.append(0.0, np.cumsum(run.jobs[column].to_numpy(np.float64)[order]))
    return total[np.searchsorted(ended[order], instants, side="right")]


def metric(
    run: "Run",
    title: str,
    members: Sequence[str],
    number: int = 2,
    *,
    against: Against = "time",
) -> Figure:
    """Return some metrics in one figure, whose horizontal axis can be chosen.

    Args:
        run: the run.
        title: of the figure.
        members: the metrics.
        number: of the figure in a page: 0 for accuracy and 1 for loss.
        against: the horizontal axis that is shown first.
    """
    lines = _lines(run, members)
    is_accuracy = all("acc" in name.lower() for name in members)
    about = "Share of correct answers" if is_accuracy else f"{title}, as the app reports it"
    if any(len(points) > POINTS for *_, points in lines):
        about += f"; each curve is thinned to {POINTS} evenly spread points"
    kept = [(n, look, points.iloc[thinned(len(points), POINTS)]) for n, look, points in lines]
    # Where the run aims at a value of the metric, a line shows it.
    has_target = run.until.metric in members
    drawn = [points for *_, points in kept]
    names = {**AXES, "time": run.time_name}
    axes = {by: _axis(by, name, drawn, has_target=has_target) for by, name in names.items()}
    x_axis, positions = axes.pop(against)
    traces = [
        curve(name, look, x, points["value"], mode=line_mode(len(x)))
        for (name, look, points), x in zip(kept, positions, strict=False)
    ]
    if has_target:
        traces.append(reference("target", positions[-1], [run.until.target] * 2))
    return Figure(
        id=f"metric-{number}",
        title=title,
        about=about + ".",
        traces=traces,
        x_title=x_axis["title"]["text"],
        y_title=title.lower() if number < 2 else title,
        others=[(axis, [numbers(x) for x in each]) for axis, each in axes.values()],
        layout={"xaxis": x_axis, "yaxis": accuracy_axis(traces) if is_accuracy else {}},
    )


def _axis(
    which: str, name: str, lines: Sequence[pd.DataFrame], *, has_target: bool
) -> tuple[dict[str, Any], list[Array]]:
    """Return a horizontal axis in the words of plotly, and the positions of each line's points."""
    largest = max((float(points[which].max()) for points in lines), default=0.0)
    unit, size = {
        "time": time_unit(largest),
        "versions": ("", 1.0),
        "bytes": byte_unit(largest),
        "device_s": ("device-hours", 3600.0),
    }[which]
    positions = [points[which].to_numpy(np.float64) / size for points in lines]
    ends = [np.array([0.0, largest / size])] if has_target else []
    text = f"{name} ({unit})" if unit else name
    return {"title": {"text": text}, **FROM_ZERO}, [*positions, *ends]


def _lines(run: "Run", members: Sequence[str]) -> list[tuple[str, int, pd.DataFrame]]:
    """Return the curves of some metrics: label, number, and points with a column for each axis."""
    rows = run.metrics[run.metrics["name"].isin(members)]
    ranks = {source: rank for rank, source in enumerate(SOURCES)}
    groups: list[tuple[Any, pd.DataFrame]] = list(rows.groupby(["source", "name"]))
    groups.sort(key=lambda group: (ranks.get(group[0][0], len(ranks)), group[0][1]))
    lines = []
    for number, ((source, name), group) in enumerate(groups):
        at = group["time_s"].to_numpy(np.float64)
        moved, busy = (spent_by(run, column, at) for column in ("moved_bytes", "busy_s"))
        points = group.assign(time=at, versions=group["version"], bytes=moved, device_s=busy)
        lines.append((f"{SOURCES.get(source, source)}: {name}", number, points))
    return lines


def aggregation(run: "Run") -> list[Figure]:
    """Return the distributions of staleness and weight; nothing where the run states none."""
    staleness = run.jobs["staleness"].to_numpy(np.float64)
    weight = run.jobs["weight"].to_numpy(np.float64)
    known, both = np.isfinite(staleness), np.isfinite(weight) & np.isfinite(staleness)
    found = [_staleness(staleness[known])] if known.any() else []
    if both.any():
        found.append(_weights(staleness[both], weight[both]))
    return found


def _staleness(staleness: Array) -> Figure:
    step = max(1, int(np.ceil((staleness.max() + 1) / _BARS)))
    edges = np.arange(0, staleness.max() + 1 + step, step)
    counts = np.histogram(staleness, edges)[0]
    width = {"x": (edges[:-1] + (step - 1) / 2).tolist(), "width": [0.9 * step] * len(counts)}
    bar = {"type": "bar", "name": "updates", "meta": "series-0", "showlegend": False, **width}
    return Figure(
        id="staleness",
        title="Staleness of aggregated updates",
        about=f"{len(staleness):,} aggregated updates; median {np.median(staleness):g}, 90% at "
        f"most {np.quantile(staleness, 0.9):g}, largest {staleness.max():g}.",
        traces=[{**bar, "y": counts.tolist()}],
        x_title="staleness (model versions)",
        y_title="updates",
        layout={"xaxis": {"range": [-0.6, edges[-2] + step - 0.4]}},
        header=("staleness", "updates"),
        rows=[
            (f"{low:g}" if step == 1 else f"{low:g} to {low + step - 1:g}", f"{count:,}")
            for low, count in zip(edges[:-1], counts, strict=True)
        ],
    )


def versions(run: "Run") -> tuple[tuple[str, ...], list[list[str]]]:
    """Return the heads and rows of a table of versions: `ROWS` at most, evenly spread."""
    rows = run.metrics[run.metrics["source"] != "query"]
    last = rows.drop_duplicates(["version", "name"], keep="last")
    texts = last.assign(value=last["value"].map(_number))
    values = texts.pivot(index="version", columns="name", values="value").fillna("-")
    names = [name for name in values.columns if name not in BOOKKEEPING][:_OTHERS]
    at = rows.groupby("version")["time_s"].min()
    kept = values.index[thinned(len(values), ROWS)]
    unit, length_s = time_unit(run.end_s)
    lines = [
        [f"{version:,}", f"{at[version] / length_s:.4g}", *values.loc[version, names]]
        for version in kept
    ]
    return ("version", f"{run.time_name} ({unit})", *map(str, names)), lines


def _number(value: float) -> str:
    return "NaN" if np.isnan(value) else f"{value:.4g}"


def _weights(staleness: Array, weight: Array) -> Figure:
    # Most rules give all updates of one staleness one weight: a dot a pair, not a dot an update.
    pairs = np.stack([staleness, np.round(weight, 4)], axis=1)
    distinct, counts = np.unique(pairs, axis=0, return_counts=True)
    kept = thinned(len(distinct), PAIRS)
    about = (
        f"Weights from {weight.min():.3g} to {weight.max():.3g}, mean {weight.mean():.3g}. One dot "
        f"for each pair of staleness and weight, of {len(weight):,} updates."
    )
    if len(kept) < len(distinct):
        about += f" {PAIRS:,} of {len(distinct):,} pairs are drawn, evenly spread."
    trace = curve(
        "updates",
        "series-3",
        *distinct[kept].T,
        mode="markers",
        showlegend=False,
        marker={"size": 7, "opacity": 0.7},
        customdata=counts[kept].tolist(),
        hovertemplate="staleness %{x}, weight %{y}: %{customdata} updates<extra></extra>",
    )
    return Figure(
        id="weights",
        title="Weight against staleness",
        about=about,
        traces=[trace],
        x_title="staleness (model versions)",
        y_title="weight",
        layout={"xaxis": FROM_ZERO, "yaxis": FROM_ZERO},
        header=("staleness", "updates", "weight: 10%", "median", "90%"),
        rows=[
            (f"{age:g}", f"{len(of):,}", *(f"{q:.3f}" for q in np.quantile(of, (0.1, 0.5, 0.9))))
            for age in np.unique(staleness)[:_ROWS]
            for of in (weight[staleness == age],)
        ],
    )
