"""The page of a run: its figures and words in one HTML file that opens without a network.

Chart.js, the numbers and the style are inside the file, and its content security policy forbids
every request. Whatever comes from a run is escaped: in HTML by the template, and in the embedded
JSON; scripts show it as text. The same run gives the same bytes.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from jinja2 import Environment, FileSystemLoader, Template

from fedstale import __version__
from fedstale.errors import ConfigError, FedstaleError, not_loaded
from fedstale.reports import costs, devices, learning
from fedstale.reports.devices import Timeline, used_jobs
from fedstale.reports.figure import (
    SOURCES,
    Figure,
    byte_text,
    cell_text,
    metric_text,
    time_text,
    without_folders,
)
from fedstale.runs import DEPLOYED
from fedstale.traces.io import replacing

if TYPE_CHECKING:
    from fedstale.reports.run import Run

logger = logging.getLogger(__name__)

REPORT = "report.html"
_HERE = Path(__file__).parent
_ENDINGS = {
    "stopped": "stopped at its limit",
    "stuck": "got stuck",
    "interrupted": "was interrupted",
}


@dataclass(frozen=True, slots=True)
class Link:
    """A cell of a table that leads to another page."""

    text: str
    href: str
    """Address relative to the page, quoted."""


def write_run(run: "Run", out: Path) -> Path:
    """Write the page of a run, and return the file.

    Raises:
        ConfigError: the file cannot be written.
        ProtocolError: a table of the run cannot be read.
    """
    figures = [
        *learning.metrics(run),
        devices.states(run),
        costs.failures(run),
        *costs.figures(run),
        devices.participation(run),
        *learning.aggregation(run),
        devices.reliability(run),
        *_added(run),
    ]
    drawn = [figure for figure in figures if figure is not None]
    return write_figures(
        f"{run.summary['app']}: {run.name}",
        lead(run),
        drawn,
        out,
        cards=cards(run),
        tables=_tables(run),
        timeline=devices.timeline(run),
        hidden=learning.hidden(run),
        run=run,
    )


def _added(run: "Run") -> list[Figure | None]:
    """Return the figures of other packages, without those that fail."""
    found = []
    for point in sorted(entry_points(group="fedstale.reports")):
        try:
            found.append(point.load()(run))
        except FedstaleError:
            raise
        except Exception as problem:
            logger.warning("the page lacks the section %s: it %s", point.name, not_loaded(problem))
    return found


def write_figures(
    title: str,
    first: str,
    figures: Sequence[Figure],
    out: Path,
    *,
    cards: Sequence[tuple[str, str]] = (),
    tables: Mapping[str, pd.DataFrame] | None = None,
    notes: str = "",
    timeline: Timeline | None = None,
    hidden: str = "",
    run: "Run | None" = None,
    texts: Mapping[str, str] | None = None,
) -> Path:
    """Write a page of figures, and of what stands around them; page.html has the order.

    Args:
        title: heading of the page.
        first: what the page shows, in a few sentences or lines; plain text. Here and in cards,
            tables, notes and texts whole paths are shown by their last part.
        figures: what is drawn, in this order.
        out: file to write.
        cards: names and values at the head of the page.
        tables: tables of texts, numbers and `Link`s above the figures, by title.
        notes: how the tables are to be read, in sentences.
        timeline: what devices did, before all figures.
        hidden: what has no figure, in sentences.
        run: whose settings stand below the figures.
        texts: texts below the figures that are shown as they are, by title.

    Returns:
        The file.

    Raises:
        ConfigError: the file cannot be written.
    """
    scripts = ["vendor/chart.js", "page.js", *(["timeline.js"] if timeline else [])]
    page = _template().render(
        heading=title,
        lead=without_folders(first),
        cards=[(name, without_folders(value)) for name, value in cards],
        tables={name: frame.map(_shown) for name, frame in (tables or {}).items()},
        notes=without_folders(notes),
        figures=figures,
        timeline=timeline,
        hidden=hidden,
        run=run,
        texts={name: without_folders(text) for name, text in (texts or {}).items()},
        version=__version__,
        clock=_clock(run) if run else "",
        made_on=_made_on,
        without_folders=without_folders,
        plots=[figure.plot() for figure in figures],
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        scripts=[(_HERE / name).read_text(encoding="utf-8") for name in scripts],
    )
    return write_text(page, out)


def _shown(cell: object) -> object:
    return cell if isinstance(cell, Link) else without_folders(cell_text(cell))


@cache
def _template() -> Template:
    """Return the template of all pages, compiled once a process."""
    templates = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, keep_trailing_newline=True
    )
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return templates.get_template("page.html")


def write_text(text: str, out: Path) -> Path:
    """Write a file whole or not at all, and return it.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        with replacing(out) as file:
            file.write(text.encode())
    except OSError as problem:
        raise ConfigError(
            f"out = {str(out)!r} cannot be written: {problem.strerror}"
            f"{'' if out.parent.is_dir() else '; expected a file in a folder that exists'}"
        ) from None
    return out


def lead(run: "Run") -> str:
    """Return in one or two sentences what happened in a run."""
    summary = run.summary
    ending = _ENDINGS.get(run.status, run.status)
    reason = f" ({run.reason})" if run.reason else ""
    is_said = not summary["rounds"] or "round" in reason
    rounds = "" if is_said else f" and {summary['rounds']:,} rounds"
    best = "".join(f", {name} {value}" for name, value in _last_values(run)[:2])
    text = f"{parts_in_words([run])} ".lstrip()
    text += (
        f"{summary['app']} on {summary['devices']:,} devices {ending}{reason} after "
        f"{time_text(run.end_s)} of {run.time_name}{rounds}{best}."
    )
    if run.jobs["busy_s"].any():
        text += (
            f" Of {run.costs['device_s'] / 3600.0:,.3g} device-hours"
            f" {run.costs['device_time_wasted']:.0%} were wasted;"
            f" {int((used_jobs(run) > 0).sum()):,} devices had training used."
        )
    hint = str(summary.get("hint", ""))
    more = [f"{x[0].upper()}{x[1:]}." for x in (costs.besides_training(run), hint) if x]
    if run.advised:
        taken = "{do}: {promised:.0%} promised, {achieved:.0%} saved".format(**run.advised)
        text = f"{taken}. {text}"
    return " ".join(filter(None, (text, *more, learning.not_numbers_in_words(run))))


def parts_in_words(runs: "Sequence[Run]") -> str:
    """Return in a sentence the strategies, selectors and traces of runs; nothing if none is known.

    Example:
        >>> from types import SimpleNamespace as Run
        >>> runs = [Run(parts={"strategy": name, "traces": "synthetic:9"}) for name in "AB"]
        >>> parts_in_words(runs)
        'Strategy: A, B; traces: synthetic:9.'
    """
    known: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, part in run.parts.items():
            known.setdefault(name, {})[part] = None
    told = "; ".join(f"{name}: {', '.join(parts)}" for name, parts in known.items())
    return f"{told[0].upper()}{told[1:]}." if told else ""


def cards(run: "Run") -> list[tuple[str, str]]:
    """Return the figures at the head of the page, and what they were before advice was taken."""
    facts = _facts(run)
    if not run.jobs["busy_s"].any():
        del facts["device-hours wasted"]
    if not run.summary["rounds"]:
        del facts["rounds"]
    shown = [*_last_values(run)[:2], *facts.items(), *_limits(run)]
    if (taken := run.advised) and taken["before"].is_dir():
        earlier = dict(cards(type(run)(taken["before"])))
        pairs = [(name, earlier.get(name, now).split(" → ")[-1], now) for name, now in shown]
        shown = [(name, now if was == now else f"{was} → {now}") for name, was, now in pairs]
    return shown


def _limits(run: "Run") -> list[tuple[str, str]]:
    """List the limits that validation has applied in a run, as names and values."""
    found = []
    for kind, what in ("capped", "examples"), ("clipped", "norms"), ("dropped", "metrics"):
        limits = run.summary.get(kind, {})
        if n := limits.get("replies"):
            found.append((f"{what} {kind}", f"{n:,}, of {limits['nodes']:,} devices"))
    return found


def _tables(run: "Run") -> dict[str, pd.DataFrame]:
    """Build the tables above the figures: largest costs, messages, errors."""
    tables = {}
    if run.advice:
        tables["What cost most, and what to do"] = pd.DataFrame(
            {"what to do": a.do, "why": str(a).removeprefix(a.do)[2:], "saves": f"{a.saves:.0%}"}
            for a in run.advice
        )
    kinds: Mapping[str, Mapping[str, float | None]] = run.summary.get("messages", {})
    if set(kinds) - {"train"}:
        rows = []
        for kind, found in kinds.items():
            text = "unknown" if (moved := found["bytes"]) is None else byte_text(moved)
            rows.append((kind, f"{found['sent']:,}", f"{found['reported']:,}", text))
        tables["Messages"] = pd.DataFrame(rows, columns=["type", "sent", "replies used", "traffic"])
    if errors := run.summary.get("client_errors", ()):
        rows = [(f"{e['jobs']:,}", f"{e['devices']:,}", e["where"], e["error"]) for e in errors]
        columns = ["jobs", "devices", "where", "reason"]
        tables["Commonest client errors"] = pd.DataFrame(rows, columns=columns)
    if rejected := run.summary.get("rejected_devices", ()):
        columns = ["device", "replies", "reason of the last"]
        table = pd.DataFrame(rejected).set_axis(columns, axis="columns")
        tables["Devices with most rejected replies"] = table
    return tables


def _facts(run: "Run") -> dict[str, str]:
    """Describe time, rounds and costs of a run in words, by name."""
    return {
        run.time_name: time_text(run.end_s),
        "rounds": f"{run.summary['rounds']:,}",
        "jobs": f"{len(run.jobs):,}",
        "devices used": f"{(used_jobs(run) > 0).sum():,} of {run.summary['devices']:,}",
        "device-hours wasted": f"{run.costs['device_time_wasted']:.0%}",
        "traffic": byte_text(float(run.jobs["moved_bytes"].sum())),
    }


def _made_on(run: "Run") -> str:
    """Describe the releases and the machine of a run in a sentence, if it states them."""
    releases, machine = (dict(run.summary.get(key) or {}) for key in ("versions", "machine"))
    parts = [
        ", ".join(f"{name} {release}" for name, release in releases.items()),
        ", ".join(
            f"{value} cores" if name == "cores" else str(value)
            for name, value in machine.items()
            if value
        ),
    ]
    words = [f"{word} {part}" for word, part in zip(("with", "on"), parts, strict=True) if part]
    return f" Made {' '.join(words)}." if words else ""


def _clock(run: "Run") -> str:
    """Describe the clock of a run in a sentence."""
    if run.summary.get("executor") == DEPLOYED:
        return "Time is that of the server's clock since the run began."
    return "Time is the devices' virtual time."


def _last_values(run: "Run") -> list[tuple[str, str]]:
    """Return the last accuracies and losses, evaluation before training, accuracy first."""
    last = learning.last_values(run)[["source", "name", "value"]]
    n_sources = last["name"].value_counts()
    ranks = {source: rank for rank, source in enumerate(SOURCES)}
    found = []
    for source, name, value in zip(*(last[key] for key in last), strict=True):
        is_loss = "acc" not in name.lower()
        if not is_loss or "loss" in name.lower():
            label = name if n_sources[name] == 1 else f"{name} ({source})"
            rank = ranks.get(source, len(ranks)), is_loss
            found.append((rank, label, metric_text(name, value)))
    return [(label, text) for _, label, text in sorted(found)]
