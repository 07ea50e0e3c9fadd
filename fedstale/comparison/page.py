"""The files of a comparison: its numbers, and a page of curves, times and differences.

Every variant has a colour, a dash and a marker of its own, so that no reader needs to
distinguish colours.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedstale.comparison.analysis import Comparison, Variant, as_json
from fedstale.comparison.statistics import Estimate, estimate
from fedstale.comparison.table import between, markdown, notes, ratio, words
from fedstale.reports.figure import (
    DASHES,
    MARKERS,
    Array,
    Figure,
    curve,
    plain,
    time_unit,
)
from fedstale.reports.page import write_figures, write_text
from fedstale.reports.run import Run

PAGE, NUMBERS, LINES, MARKDOWN = (f"comparison.{end}" for end in ("html", "json", "csv", "md"))
_INSTANTS = 201
_ROW_PX = 34
# More bands than these hide one another.
_BANDS = 4


def write(comparison: Comparison, folder: Path, *, plan: str = "") -> dict[str, Any]:
    """Write the page of a comparison, and its numbers as JSON, CSV and Markdown.

    Args:
        comparison: what is written.
        folder: where; it exists.
        plan: what was asked for, as TOML; the page shows it as it is.

    Returns:
        What the JSON file holds.

    Raises:
        ConfigError: a file cannot be written.
    """
    plain = as_json(comparison, root=folder)
    write_text(json.dumps(plain, indent=2, allow_nan=False) + "\n", folder / NUMBERS)
    write_text(comparison.table.to_csv(index=False, lineterminator="\n"), folder / LINES)
    write_text(markdown(comparison), folder / MARKDOWN)
    n_runs = sum(len(one.runs) for one in comparison.variants)
    first = (
        f"{len(comparison.variants)} variants in {n_runs} runs, compared with "
        f"{comparison.reference}. {' '.join(notes(comparison))}"
    )
    write_figures(
        f"Compared with {comparison.reference}",
        first,
        figures(comparison),
        folder / PAGE,
        tables={"The variants": words(comparison)},
        texts={"What was compared": plan} if plan else {},
    )
    return plain


def figures(comparison: Comparison) -> list[Figure]:
    """Return the figures that the comparison holds something for."""
    found = [_curves(comparison, metric, i) for i, metric in enumerate(comparison.shown)]
    if comparison.target is not None:
        found += [_times(comparison), _speed_ups(comparison)]
    found += [_differences(comparison, metric, i) for i, metric in enumerate(comparison.shown)]
    return [figure for figure in found if figure.traces]


def _curves(comparison: Comparison, metric: str, number: int) -> Figure:
    """Return the mean over seeds of a metric against device time."""
    unit, length_s = time_unit(comparison.horizon_s)
    instants = np.linspace(0.0, comparison.horizon_s, _INSTANTS)
    has_bands = len(comparison.variants) <= _BANDS and any(
        len(one.runs) > 1 for one in comparison.variants
    )
    traces: list[dict[str, Any]] = []
    for i, one in enumerate(comparison.variants):
        if not one.runs:
            continue
        values = np.stack([_at(run, metric, comparison, instants) for run in one.runs])
        at = np.flatnonzero(np.isfinite(values).all(axis=0))
        if not at.size:
            continue
        means = [estimate(column.tolist()) for column in values[:, at].T]
        x, role = instants[at] / length_s, f"series-{i % 7}"
        if has_bands and len(one.runs) > 1:
            hidden = {"hoverinfo": "skip", "showlegend": False, "line": {"width": 0}}
            traces.append(curve("", role, x, [m.low for m in means], **hidden))
            band = {**hidden, "fill": "tonexty"}
            traces.append(curve("", role, x, [m.high for m in means], **band))
        line = {"width": 2, "dash": DASHES[i % len(DASHES)]}
        traces.append(curve(one.name, role, x, [m.mean for m in means], line=line))
    bands = (
        " Bands hold the mean with 95% confidence at each instant by itself." if has_bands else ""
    )
    return Figure(
        id=f"mean-{number}",
        title=f"{metric}, mean over seeds",
        about=f"{metric} from {comparison.sources[metric]}; a run that has ended keeps its last "
        f"value.{bands}",
        traces=traces,
        x_title=f"device time ({unit})",
        y_title=plain(metric),
        is_wide=True,
    )


def _at(run: Run, metric: str, comparison: Comparison, instants: Array) -> Array:
    """Return the last value measured until each instant, NaN before the first."""
    times, values = run.curve(metric, comparison.sources[metric])
    at = np.searchsorted(times, instants, side="right")
    return np.concatenate(([np.nan], values))[at]


def _times(comparison: Comparison) -> Figure:
    """Return when each run reached the target, one dot a run."""
    unit, length_s = time_unit(comparison.horizon_s)
    traces: list[dict[str, Any]] = []
    for i, one in enumerate(comparison.variants):
        for ever in (True, False):
            seeds = [seed for seed, time in one.times.items() if time.ever is ever]
            if seeds:
                symbol = MARKERS[i % len(MARKERS)] + ("" if ever else "-open")
                x = [one.times[seed].at_s / length_s for seed in seeds]
                notes = [f"seed {s}{'' if ever else ', never reached'}" for s in seeds]
                hover = {"text": notes, "hovertemplate": "%{x:.4~g}, %{text}"}
                traces.append(_marks(one, i, symbol, x, [i] * len(seeds), **hover))
    return Figure(
        id="times",
        title=f"Device time to {comparison.target}",
        about="One mark a run. A hollow one never reached the target, and stands where its time "
        "was over.",
        traces=traces,
        x_title=f"device time ({unit})",
        y_title="",
        layout={"yaxis": _names(comparison.variants), "xaxis": {"rangemode": "tozero"}},
        height=130 + _ROW_PX * len(comparison.variants),
        header=["variant", "seed", f"device time ({unit})", "reached"],
        rows=[
            [one.name, str(seed), f"{time.at_s / length_s:.4g}", "yes" if time.ever else "no"]
            for one in comparison.variants
            for seed, time in one.times.items()
        ],
    )


def _speed_ups(comparison: Comparison) -> Figure:
    return _forest(
        "speed-up",
        f"Speed-up to {comparison.target}",
        f"How many times as fast as {comparison.reference}, by seed; 1 is as fast, right of it is "
        "faster.",
        [
            (i, one, one.speed_up.ratio, ratio(one.speed_up))
            for i, one in enumerate(comparison.variants)
            if one.speed_up is not None
        ],
        x_title="times as fast",
        level=1.0,
    )


def _differences(comparison: Comparison, metric: str, number: int) -> Figure:
    key = comparison.key(metric)
    found = [
        (i, one, one.differences[key], between(one.differences[key]))
        for i, one in enumerate(comparison.variants)
        if key in one.differences and one.differences[key].n
    ]
    return _forest(
        f"difference-{number}",
        f"{metric} at the end, difference",
        f"What {metric} is above that of {comparison.reference}, by seed.",
        found,
        x_title=f"difference in {plain(metric)}",
        level=0.0,
    )


def _forest(
    name: str,
    title: str,
    about: str,
    found: Sequence[tuple[int, Variant, Estimate, str]],
    *,
    x_title: str,
    level: float,
) -> Figure:
    """Return a mark and its interval for each variant, and a line at what means no difference.

    Args:
        name: of the figure.
        title: of the figure.
        about: what it shows, in a sentence.
        found: number of the variant, the variant, its value and the value in words.
        x_title: of the axis.
        level: what means no difference.
    """
    traces: list[dict[str, Any]] = []
    for i, (number, one, value, text) in enumerate(found):
        hover = {"text": [plain(text)], "hovertemplate": "%{text}"}
        symbol = MARKERS[number % len(MARKERS)]
        trace = _marks(one, number, symbol, [value.mean], [i], **hover)
        if np.isfinite(value.low):
            ends = {"array": [value.high - value.mean], "arrayminus": [value.mean - value.low]}
            trace["error_x"] = {"type": "data", "symmetric": False, **ends}
        traces.append(trace)
    if traces:
        still = {"hoverinfo": "skip", "showlegend": False, "line": {"width": 1}}
        span = [-0.5, len(found) - 0.5]
        traces.append(curve("no difference", "still", [level, level], span, **still))
    return Figure(
        id=name,
        title=title,
        about=f"{about} The bars are 95% intervals.",
        traces=traces,
        x_title=x_title,
        y_title="",
        layout={"yaxis": _names([one for _, one, _, _ in found])},
        height=130 + _ROW_PX * len(found),
        header=["variant", "mean and interval", "pairs"],
        rows=[[one.name, text, str(value.n)] for _, one, value, text in found],
    )


def _marks(
    one: Variant,
    number: int,
    symbol: str,
    x: Sequence[float],
    y: Sequence[int],
    **more: Any,  # noqa: ANN401 - plotly's
) -> dict[str, Any]:
    """Return marks of a variant, in its colour."""
    marker = {"size": 10, "symbol": symbol}
    role = f"series-{number % 7}"
    return curve(one.name, role, x, y, mode="markers", showlegend=False, marker=marker, **more)


def _names(variants: Sequence[Variant]) -> dict[str, Any]:
    """Return an axis with one row a variant, the first on top."""
    labels = [plain(one.name if len(one.name) <= 28 else one.name[:27] + "…") for one in variants]
    return {
        "range": [len(variants) - 0.4, -0.6],
        "tickvals": list(range(len(variants))),
        "ticktext": labels,
        "zeroline": False,
    }
