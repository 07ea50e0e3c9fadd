"""The figures of a run in words: its first sentence, its cards, its row in a comparison."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fedstale.reports.devices import gini, used_jobs
from fedstale.reports.figure import byte_unit, time_unit
from fedstale.reports.folder import DEPLOYED

if TYPE_CHECKING:
    from fedstale.reports.run import Run

_SOURCES = {"server": 0, "evaluate": 1, "train": 2}
_ENDINGS = {
    "finished": "finished",
    "stopped": "stopped at its limit",
    "stuck": "got stuck",
    "interrupted": "was interrupted",
    "failed": "failed",
}


def lead(run: "Run") -> str:
    """Return in one or two sentences what happened in a run."""
    summary = run.summary
    ending = _ENDINGS.get(summary["status"], summary["status"])
    reason = f" ({summary['reason']})" if summary.get("reason") else ""
    best = "".join(f", {name} {value}" for name, value in _last_values(run)[:2])
    text = (
        f"{summary['app']} on {summary['devices']:,} devices {ending}{reason} after "
        f"{_time(run.end_s)} of device time and {summary['rounds']:,} rounds{best}."
    )
    if run.busy_s.sum():
        text += (
            f" Of the device time {_wasted(run)} was wasted;"
            f" {int((used_jobs(run) > 0).sum()):,} devices had training used."
        )
    return text


def clock(runs: "Sequence[Run]") -> str:
    """Return what time means in some runs, in a sentence."""
    virtual, real = "the devices' virtual time", "that of the server's clock since the run began"
    are_real = [run.summary.get("executor") == DEPLOYED for run in runs]
    if not any(are_real):
        return f"Time is {virtual}."
    return f"Time is {real}." if all(are_real) else f"Time is {virtual}, in deployed runs {real}."


def cards(run: "Run") -> list[tuple[str, str]]:
    """Return the figures at the head of the page as names and values."""
    n_used = int((used_jobs(run) > 0).sum())
    return [
        *_last_values(run)[:2],
        ("device time", _time(run.end_s)),
        ("rounds", f"{run.summary['rounds']:,}"),
        ("jobs", f"{len(run.jobs):,}"),
        ("devices used", f"{n_used:,} of {run.summary['devices']:,}"),
        *([("device time wasted", _wasted(run))] if run.busy_s.any() else []),
        ("traffic", _size(float(run.moved_bytes.sum()))),
    ]


def comparison(runs: "Sequence[Run]") -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table with one row a run."""
    metrics = list(dict.fromkeys(name for run in runs for name, _ in _last_values(run)))[:6]
    header = ["run", "app", "seed", "ended", *metrics, "device time", "rounds", "jobs"]
    header += ["device time wasted", "traffic", "devices used", "Gini"]
    rows = []
    for run in runs:
        last, counts = dict(_last_values(run)), used_jobs(run)
        rows.append(
            [
                *(run.name, str(run.summary["app"]), str(run.summary["seed"])),
                str(run.summary["status"]),
                *(last.get(name, "-") for name in metrics),
                *(_time(run.end_s), f"{run.summary['rounds']:,}", f"{len(run.jobs):,}"),
                *(_wasted(run), _size(float(run.moved_bytes.sum()))),
                *(f"{int((counts > 0).sum()):,}", f"{gini(counts):.2f}" if counts.any() else "-"),
            ]
        )
    return header, rows


def _wasted(run: "Run") -> str:
    return f"{run.costs['device_time_wasted']:.0%}"


def _last_values(run: "Run") -> list[tuple[str, str]]:
    """Return the last accuracies and losses, evaluation before training, accuracy first."""
    last = run.metrics.groupby(["source", "name"], sort=True).last().reset_index()
    found = list(_ranked(list(zip(last["source"], last["name"], last["value"], strict=True))))
    return [(name, value) for _, name, value in sorted(found)]


def _ranked(rows: Sequence[tuple[str, str, float]]) -> Iterator[tuple[int, str, str]]:
    n_named = {name: sum(other == name for _, other, _ in rows) for _, name, _ in rows}
    for source, name, value in rows:
        is_accuracy, is_loss = "acc" in name.lower(), "loss" in name.lower()
        if not (is_accuracy or is_loss):
            continue
        shown = f"{value:.1%}" if is_accuracy and 0 <= value <= 1 else f"{value:.3g}"
        rank = 2 * _SOURCES.get(source, len(_SOURCES)) + int(is_loss)
        yield rank, name if n_named[name] == 1 else f"{name} ({source})", shown


def _time(seconds: float) -> str:
    unit, length_s = time_unit(seconds)
    return f"{seconds / length_s:.3g} {unit}"


def _size(n_bytes: float) -> str:
    unit, size = byte_unit(n_bytes)
    return f"{n_bytes / size:.3g} {unit}"
