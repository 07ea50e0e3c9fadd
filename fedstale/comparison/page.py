"""The files of a comparison: its numbers, and a page of tables and curves.

Every variant has a colour, a dash and a marker of its own, so that no reader needs to
distinguish colours.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from fedstale import __version__
from fedstale.comparison.analysis import Comparison, limits_of
from fedstale.comparison.statistics import LEAST, NOTHING, estimate
from fedstale.errors import ConfigError
from fedstale.reports import (
    FROM_ZERO,
    REPORT,
    Array,
    Figure,
    Link,
    Run,
    accuracy_axis,
    band,
    by_kind,
    curve,
    parts_in_words,
    time_unit,
    write_figures,
    write_text,
)

FORMAT = 2
PAGE, NUMBERS, LINES, MARKDOWN = (f"comparison.{end}" for end in ("html", "json", "csv", "md"))
_INSTANTS = 201
# More bands than these hide one another.
_BANDS = 4


def write(comparison: Comparison, folder: Path, *, plan: str = "") -> None:
    """Write the page of a comparison, and its numbers as JSON, CSV and Markdown.

    Args:
        comparison: what is written.
        folder: where; it exists.
        plan: what was asked for, as TOML; the page shows it as it is.

    Raises:
        ConfigError: a file cannot be written.
    """
    numbers = json.dumps(as_json(comparison, root=folder), indent=2, allow_nan=False)
    write_text(numbers + "\n", folder / NUMBERS)
    write_text(comparison.table.to_csv(index=False, lineterminator="\n"), folder / LINES)
    write_text(markdown(comparison), folder / MARKDOWN)
    runs = [run for one in comparison.variants for run in one.runs]
    write_figures(
        f"Compared with {comparison.reference}",
        f"{comparison.verdict}\n{parts_in_words(runs)}".rstrip(),
        figures(comparison),
        folder / PAGE,
        tables={"The variants": comparison.words, **_runs(comparison, folder)},
        notes=" ".join(comparison.notes),
        texts={"What was compared": plan} if plan else {},
    )


def check_free(folder: Path, runs: Iterable[Path]) -> None:
    """Refuse a folder that has a comparison of runs which the new one leaves out.

    Args:
        folder: of the comparison to be written.
        runs: the folders of its runs.

    Raises:
        ConfigError: what is there would be lost.
    """
    path, again = folder / NUMBERS, "choose another --out, or pass --overwrite"
    if not path.is_file():
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["runs"]
        before = {os.path.abspath(folder / run["folder"]) for run in found}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{str(path)!r} holds no comparison that can be read: {again}") from None
    left_out = sorted(before - {os.path.abspath(run) for run in runs})
    if left_out:
        raise ConfigError(
            f"out = {str(folder)!r} holds a comparison of other runs, such as "
            f"{_beside(Path(left_out[0]), folder)!r}: {again}"
        )


def as_json(comparison: Comparison, *, root: Path | None = None) -> dict[str, Any]:
    """Return a comparison as plain JSON; what is not a finite number is null.

    Args:
        comparison: what is written.
        root: the folders of runs are written relative to it.
    """
    table = comparison.table.astype(object)
    found = {
        "format": FORMAT,
        "fedstale": __version__,
        "verdict": comparison.verdict,
        "reference": comparison.reference,
        "target": comparison.target,
        "horizon_s": comparison.horizon_s,
        "sources": dict(comparison.sources),
        "table": table.where(table.notna(), None).to_dict("records"),
        "failed": [
            {"variant": variant, "seed": seed, "reason": reason}
            for variant, seed, reason in comparison.failures
        ],
        "runs": [
            {
                "variant": one.name,
                "seed": run.seed,
                "status": run.status,
                "folder": str(run.folder) if root is None else _beside(run.folder, root),
                **(
                    {
                        "time_to_target_s": time.at_s,
                        "device_s_to_target": time.device_s,
                        "reached": time.ever,
                    }
                    if (time := one.times.get(run.seed))
                    else {}
                ),
                "values": {
                    name: by_seed[run.seed]
                    for name, by_seed in one.values.items()
                    if run.seed in by_seed
                },
            }
            for one in comparison.variants
            for run in one.runs
        ],
    }
    plain: dict[str, Any] = json.loads(json.dumps(found), parse_constant=lambda name: None)
    return plain


def _beside(path: Path, folder: Path) -> str:
    """Return where a file or folder is, as seen from another."""
    try:
        return Path(os.path.relpath(path, folder)).as_posix()
    except ValueError:  # on another drive
        return path.as_posix()


def _runs(comparison: Comparison, folder: Path) -> dict[str, pd.DataFrame]:
    """Return a table of what each run came to, a row a seed, with links to their pages.

    Args:
        comparison: of the runs.
        folder: of the page.
    """
    metric = next(iter(comparison.shown), None)
    failed = {(name, seed): reason for name, seed, reason in comparison.failures}
    cells: dict[int, dict[str, object]] = {
        seed: {"seed": str(seed), **{one.name: NOTHING for one in comparison.variants}}
        for seed in sorted(
            {run.seed for one in comparison.variants for run in one.runs}
            | {seed for _, seed in failed}
        )
    }
    for one in comparison.variants:
        for run in one.runs:
            value = one.values.get(comparison.key(metric), {}).get(run.seed) if metric else None
            text = run.status if value is None else f"{value:.3f}"
            page = run.folder / REPORT
            href = quote(_beside(page, folder))
            cells[run.seed][one.name] = Link(text, href) if page.is_file() else text
    for (name, seed), reason in failed.items():
        cells[seed][name] = f"failed: {reason}"
    title = "Each run" if metric is None else f"Each run: {metric} at the end"
    return {title: pd.DataFrame(list(cells.values()))}


def markdown(comparison: Comparison) -> str:
    """Return the verdict, the table and its notes as Markdown."""
    words = comparison.words
    rows = [[_in_markdown(cell) for cell in line] for line in (words.columns, *words.to_numpy())]
    lines = [rows[0], ["---", *["---:"] * (len(rows[0]) - 1)], *rows[1:]]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    first = _in_markdown(comparison.verdict).replace("\n", "\n\n")
    return f"{first}\n\n{text}\n\n{' '.join(map(_in_markdown, comparison.notes))}\n"


def _in_markdown(text: str) -> str:
    """Return text that Markdown shows as it is."""
    backslash, entity = "\\|`*_[]", "&<>"
    found = {ord(mark): f"\\{mark}" for mark in backslash}
    return text.translate(found | {ord(mark): f"&#{ord(mark)};" for mark in entity})


def figures(comparison: Comparison) -> list[Figure]:
    """Return the figures that the comparison holds something for."""
    found = [_curves(comparison, metric, i) for i, metric in enumerate(comparison.shown)]
    return [figure for figure in found if figure.traces]


def _curves(comparison: Comparison, metric: str, number: int) -> Figure:
    """Return the mean over seeds of a metric against virtual time."""
    unit, length_s = time_unit(comparison.horizon_s)
    instants = np.linspace(0.0, comparison.horizon_s, _INSTANTS)
    has_bands = len(comparison.variants) <= _BANDS and any(
        len(one.runs) >= LEAST for one in comparison.variants
    )
    traces: list[dict[str, Any]] = []
    for i, one in enumerate(comparison.variants):
        if not one.runs:
            continue
        values = np.stack([_at(run, metric, comparison, instants) for run in one.runs])
        at = np.flatnonzero(np.isfinite(values).all(axis=0))
        if not at.size:
            continue
        limits = limits_of(comparison.key(metric), values[:, at].ravel().tolist())
        means = [estimate(column.tolist(), limits) for column in values[:, at].T]
        x = instants[at] / length_s
        if has_bands and len(one.runs) >= LEAST:
            traces += band("", i, x, [m.low for m in means], [m.high for m in means])
        traces.append(curve(one.name, i, x, [m.mean for m in means]))
    is_accuracy = bool(by_kind([metric])[0])
    bands = (
        " Bands hold the mean with 95% confidence at each instant by itself." if has_bands else ""
    )
    return Figure(
        id=f"mean-{number}",
        title=f"{metric}, mean over seeds",
        about=f"{metric} from {comparison.sources[metric]}; a run that has ended keeps its last "
        f"value.{bands}",
        traces=traces,
        x_title=f"virtual time ({unit})",
        y_title=metric,
        layout={"xaxis": FROM_ZERO, "yaxis": accuracy_axis(traces) if is_accuracy else {}},
        is_wide=True,
    )


def _at(run: Run, metric: str, comparison: Comparison, instants: Array) -> Array:
    """Return the last value measured until each instant, NaN before the first."""
    times, values = run.curve(metric, comparison.sources[metric])
    return np.append(np.nan, values)[np.searchsorted(times, instants, side="right")]
