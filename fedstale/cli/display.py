"""What a person sees of a simulation: a progress line while it runs, and a table at its end."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedstale.reports.run import Run
from fedstale.simulation.progress import Progress as Status
from fedstale.simulation.run import Watch
from fedstale.simulation.trace_grid import TraceGrid

_REFRESH_S = 0.2


@contextmanager
def progress(*, shown: bool) -> Iterator[Watch | None]:
    """Show a progress line; yields what `simulate` calls, or None when nothing is shown."""
    if not shown:
        yield None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[clock]}"),
        BarColumn(bar_width=10),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    # The ServerApp's thread sees virtual time in `time.monotonic`; the display must not.
    with Progress(*columns, console=Console(stderr=True), get_time=time.perf_counter) as bar:
        task = bar.add_task("run", total=None, clock="starting", state="")
        shown_at = 0.0

        def watch(grid: TraceGrid, run: Status) -> None:
            nonlocal shown_at
            now = time.perf_counter()
            if now - shown_at < _REFRESH_S:
                return
            shown_at = now
            total, completed = _share(grid, run)
            bar.update(
                task,
                total=total,
                completed=completed,
                clock=duration(grid.now()),
                state=_state(grid, run),
            )

        yield watch


@contextmanager
def watching(
    bar: Watch | None, *, title: str, live_at: str | None, tensorboard: Path | None
) -> Iterator[Watch | None]:
    """Show the run on a live page or to TensorBoard as well; yields what `simulate` calls."""
    if live_at is None and tensorboard is None:
        yield bar
        return
    # Only who asks for them waits for these.
    from fedstale.live import Board, RunWatch, Sink, serving
    from fedstale.live.scalars import Scalars
    from fedstale.live.server import parse_address

    sinks: list[Sink] = []
    with ExitStack() as stack:
        if tensorboard is not None:
            scalars = Scalars(tensorboard)
            stack.callback(scalars.close)
            sinks.append(scalars)
        if live_at is not None:
            board = Board(title)
            url = stack.enter_context(serving(board, *parse_address(live_at)))
            Console(stderr=True).print(f"live page: {url}", soft_wrap=True, highlight=False)
            sinks.append(board)
        watch = RunWatch(sinks)
        stack.callback(watch.close)

        def both(grid: TraceGrid, run: Status) -> None:
            watch(grid, run)
            if bar is not None:
                bar(grid, run)

        yield both


def table(run: Run) -> None:
    """Print the end of a run."""
    summary = run.summary
    console = Console()
    rows = Table(title=f"{summary['app']} on {summary['devices']} devices", title_justify="left")
    rows.add_column("")
    rows.add_column("", justify="right")
    for name, value in _rows(summary):
        rows.add_row(name, value)
    console.print(rows)
    if run.reason and run.status == "stopped":
        console.print(f"stopped: {run.reason}")
    console.print(f"run folder: {run.folder}", soft_wrap=True, highlight=False)


def duration(seconds: float) -> str:
    """Return a duration as days, hours and minutes.

    Example:
        >>> duration(100_000.0)
        '1d 03:46:40'
    """
    days, rest = divmod(round(seconds), 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    return f"{days}d {hours:02d}:{minutes:02d}:{left:02d}"


def _rows(summary: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - plain JSON
    yield "virtual time", duration(summary["virtual_s"])
    yield "wall time", f"{summary['wall_s']:.1f} s"
    yield "speed", f"{summary['virtual_s'] / max(summary['wall_s'], 1e-9):,.0f} virtual s per s"
    yield "rounds", str(summary["rounds"])
    for status, count in summary["jobs"].items():
        yield f"jobs {status}", f"{count:,}"
    for name, unit, scale in (("device_s", "h", 3600.0), ("bytes", "MB", 1e6)):
        parts = summary[name]
        share = parts["wasted"] / parts["total"] if parts["total"] else 0.0
        label = "device time" if name == "device_s" else "traffic"
        yield label, f"{parts['total'] / scale:,.1f} {unit}, {share:.0%} wasted"
    for name, value in summary["metrics"].items():
        yield name, f"{value:.4f}"


def _share(grid: TraceGrid, run: Status) -> tuple[float | None, float]:
    if run.until.rounds is not None:
        return float(run.until.rounds), float(run.rounds)
    if run.until.time_s < float("inf"):
        return run.until.time_s, grid.now()
    return None, 0.0


def _state(grid: TraceGrid, run: Status) -> str:
    # Together with clock, bar and elapsed time this fits a terminal of 80 columns.
    parts = [f"round {run.rounds}", f"{grid.n_online} online", f"{grid.n_in_flight} in flight"]
    accuracy = [f"acc {v:.3f}" for k, v in run.latest.items() if "acc" in k]
    return "  ".join(parts + accuracy[-1:])
