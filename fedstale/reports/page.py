"""The page of a run: one HTML file that opens without a network.

Plotly.js, the numbers and the style are inside the file, and its content security policy forbids
every request. Whatever comes from a run is escaped: in HTML, in what plotly.js reads as HTML, and
in the embedded JSON. The same run gives the same bytes.
"""

import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from copy import copy
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from fedstale import __version__
from fedstale.errors import ConfigError
from fedstale.reports import aggregation, costs, curves, devices
from fedstale.reports.figure import Figure, plotly_js
from fedstale.reports.text import cards, clock, comparison, lead

if TYPE_CHECKING:
    from fedstale.reports.run import Run

REPORT = "report.html"
_MOVES = (
    ("in", "Zoom in"),
    ("out", "Zoom out"),
    ("left", "←"),
    ("right", "→"),
    ("all", "Show all"),
)
_NAMES = {"left": "Earlier", "right": "Later"}


def write_run(run: "Run", out: Path) -> Path:
    """Write the page of a run, and return the file.

    Raises:
        ConfigError: the file cannot be written.
        ProtocolError: a table of the run cannot be read.
    """
    figures = [
        *curves.figures([run]),
        devices.timeline(run),
        devices.working(run),
        costs.failures(run),
        *costs.figures(run),
        devices.participation(run),
        *aggregation.figures(run),
        devices.reliability(run),
    ]
    drawn = [figure for figure in figures if figure is not None]
    body = [_cards(cards(run)), _figures(drawn), _silent(run, drawn), _again(run)]
    title = f"{run.summary['app']}: {run.name}"
    return write_text(_page(title, lead(run), body, drawn, clock([run])), out)


def write_comparison(runs: "Sequence[Run]", out: Path) -> Path:
    """Write a page on several runs: their metrics overlaid, and a table.

    Args:
        runs: the runs; two whose folders are called alike are told apart by their parents.
        out: file to write.

    Returns:
        The file.

    Raises:
        ConfigError: the file cannot be written.
        ProtocolError: a table of a run cannot be read.
    """
    runs = _told_apart(runs)
    drawn = curves.figures(runs)
    header, rows = comparison(runs)
    body = [
        f"<section><h2>The runs</h2>{_table(header, rows, 'The runs')}</section>",
        _figures(drawn),
        *(_again(run) for run in runs),
    ]
    title = f"{len(runs)} runs compared"
    first = "Metrics of each run against device time and against bytes moved."
    first = f"{first} {curves.hidden(runs)}".strip()
    return write_text(_page(title, first, body, drawn, clock(runs)), out)


def write_figures(
    title: str,
    first: str,
    figures: Sequence[Figure],
    out: Path,
    *,
    tables: Mapping[str, tuple[Sequence[str], Sequence[Sequence[str]]]] | None = None,
    texts: Mapping[str, str] | None = None,
) -> Path:
    """Write a page of figures that belong to no run.

    Args:
        title: heading of the page.
        first: what the page shows, in a sentence or two; plain text.
        figures: what is drawn, in this order.
        out: file to write.
        tables: header and rows of tables above the figures, by title.
        texts: texts below the figures that are shown as they are, by title.

    Returns:
        The file.

    Raises:
        ConfigError: the file cannot be written.
    """
    body = [
        f"<section><h2>{html.escape(name)}</h2>{_table(header, rows, name)}</section>"
        for name, (header, rows) in (tables or {}).items()
    ]
    body.append(_figures(figures))
    body += [
        f"<section><h2>{html.escape(name)}</h2><pre>{html.escape(text)}</pre></section>"
        for name, text in (texts or {}).items()
    ]
    return write_text(_page(title, first, body, figures), out)


def embedded(value: object) -> str:
    r"""Return JSON that can stand in a script element and can not end it.

    Example:
        >>> embedded({"name": "</script>"})
        '{"name":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _page(
    heading: str, first: str, body: Sequence[str], figures: Sequence[Figure], clock: str = ""
) -> str:
    here = resources.files("fedstale.reports")
    parts = {
        "title": html.escape(heading),
        "heading": html.escape(heading),
        "lead": html.escape(first),
        "body": "\n".join(body),
        "footer": html.escape(
            f"Written by fedstale {__version__}. {clock} Figures by plotly.js (MIT)."
        ),
        "plots": embedded([figure.plot() for figure in figures]),
        "plotly": re.sub(r"</(script)", r"<\\/\1", plotly_js(), flags=re.IGNORECASE),
        "style": (here / "page.css").read_text(encoding="utf-8"),
        "script": (here / "page.js").read_text(encoding="utf-8"),
    }
    template = (here / "page.html").read_text(encoding="utf-8")
    # One pass: what is put in is never searched for places again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _figures(figures: Sequence[Figure]) -> str:
    return f'<div class="figures">{"".join(_figure(figure) for figure in figures)}</div>'


def _figure(figure: Figure) -> str:
    name = html.escape(figure.title)
    tools = "".join(
        f'<button type="button" data-move="{move}" aria-label="{_NAMES.get(move, label)}: {name}">'
        f"{label}</button>"
        for move, label in _MOVES
    )
    zoom = f'<div class="tools" data-plot="plot-{figure.id}">{tools}</div>'
    table = ""
    if figure.header:
        inner = _table(figure.header, figure.rows, figure.title)
        table = f"<details><summary>Numbers: {name}</summary>{inner}</details>"
    return (
        f'<section class="{"wide" if figure.is_wide else "half"}"><h2>{name}</h2>'
        f"<p>{html.escape(figure.about)}</p>{zoom if figure.is_wide else ''}"
        f'<div class="plot" id="plot-{figure.id}" data-height="{figure.height}" role="img" '
        f'style="height:{figure.height}px" aria-label="{name}. {html.escape(figure.about)}"></div>'
        f"{table}</section>"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], name: str) -> str:
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in header)
    lines = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    kind = "words" if "reason" in header else "plain"
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table: {html.escape(name)}">'
        f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
    )


def _cards(pairs: Sequence[tuple[str, str]]) -> str:
    cells = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in pairs
    )
    return f'<dl class="cards">{cells}</dl>'


def _silent(run: "Run", figures: Sequence[Figure]) -> str:
    """Return what the run has no figure for, and why."""
    drawn = {figure.id for figure in figures}
    sentences = [
        (not any(name.startswith("metric-") for name in drawn), "The app measured no metric."),
        ("timeline" not in drawn, "No device ever started a job."),
        ("participation" not in drawn, "No device's training was used."),
        ("failures" not in drawn, "No job came to nothing."),
        ("staleness" not in drawn, "The strategy tells no staleness and no weights."),
    ]
    said = [sentence for holds, sentence in sentences if holds]
    said += [sentence] if (sentence := curves.hidden([run])) else []
    if not said:
        return ""
    text = html.escape(" ".join(said))
    return f"<section><h2>Not shown</h2><p>{text}</p></section>"


def _again(run: "Run") -> str:
    name = html.escape(run.name)
    return (
        f"<section><h2>Run {name} again</h2>"
        "<p>In the folder of the run; the same settings and seed repeat it.</p>"
        "<pre>fedstale simulate config.toml --out again</pre>"
        f"<details><summary>Resolved settings of {name}</summary>"
        f"<pre>{html.escape(run.config_text)}</pre></details></section>"
    )


def _told_apart(runs: "Sequence[Run]") -> "list[Run]":
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return list(runs)
    names = ["/".join(run.folder.resolve().parts[-2:]) for run in runs]
    if len(set(names)) < len(names):
        names = [f"{name} ({i})" for i, name in enumerate(names, start=1)]
    renamed = [copy(run) for run in runs]
    for run, name in zip(renamed, names, strict=True):
        run.name = name
    return renamed


def write_text(text: str, out: Path) -> Path:
    """Write a file whole or not at all, and return it.

    Raises:
        ConfigError: it cannot be written.
    """
    part = out.with_name(f".{out.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, out)
    except OSError as problem:
        raise ConfigError(
            f"out = {str(out)!r} cannot be written: {problem.strerror}; expected a file in a "
            "folder that exists"
        ) from None
    finally:
        part.unlink(missing_ok=True)
    return out
