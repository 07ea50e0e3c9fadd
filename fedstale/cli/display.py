"""What a person sees of a simulation: a progress line while it runs, and a table at its end."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedstale.config import SimulationConfig, Until
from fedstale.reports.run import Run
from fedstale.strategies.server.runtime import Callback, Pace, Runtime

_REFRESH_S = 0.2


class ProgressLine(Callback):
    """Draws a progress line."""

    def __init__(self, bar: Progress, until: Until) -> None:
        """Draw on a display that is shown."""
        self._bar, self._until, self._pace = bar, until, Pace(_REFRESH_S)
        self._task = bar.add_task("run", total=None, clock="starting", state="")
        self._rounds, self._accuracy = 0, ""

    def metrics(self, run: Runtime, version: int, source: str, values: Mapping[str, float]) -> None:
        """Note how far the run is."""
        if source == "train":
            self._rounds = max(self._rounds, version)
        for name, value in values.items():
            if "acc" in name:
                self._accuracy = f"acc {value:.3f}"

    def time_moved(self, run: Runtime) -> None:
        """Draw, a few times a second."""
        if not self._pace.is_due():
            return
        now = run.now()
        share = self._until.share(now, self._rounds)
        # Together with clock, bar and elapsed time this fits a terminal of 80 columns.
        counts = f"round {self._rounds}  {run.n_online()} online  {run.n_in_flight()} in flight"
        self._bar.update(
            self._task,
            total=None if share is None else 1.0,
            completed=share or 0.0,
            clock=duration(now),
            state=f"{counts}  {self._accuracy}".rstrip(),
        )


@contextmanager
def watching(
    config: SimulationConfig, *, shown: bool, live_at: str | None, tensorboard: Path | None
) -> Iterator[list[Callback]]:
    """Show a run as a progress line, on a live page or to TensorBoard; yields its callbacks."""
    callbacks: list[Callback] = []
    until = Until.parse(config.until)
    with ExitStack() as stack:
        if shown:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.fields[clock]}"),
                BarColumn(bar_width=10),
                TextColumn("{task.fields[state]}"),
                TimeElapsedColumn(),
            )
            # The ServerApp's thread sees virtual time in `time.monotonic`; the display must not.
            console = Console(stderr=True)
            bar = Progress(*columns, console=console, get_time=time.perf_counter)
            callbacks.append(ProgressLine(stack.enter_context(bar), until))
        # Only who asks for them waits for these.
        if tensorboard is not None:
            from fedstale.live.tensorboard import TensorBoard

            scalars = TensorBoard(tensorboard)
            stack.callback(scalars.close)
            callbacks.append(scalars)
        if live_at is not None:
            from fedstale.live import Board, serving
            from fedstale.live.server import parse_address

            board = Board(f"{config.app} on {config.traces}", until=until)
            url = stack.enter_context(serving(board, *parse_address(live_at)))
            Console(stderr=True).print(f"live page: {url}", soft_wrap=True, highlight=False)
            callbacks.append(board)
        yield callbacks


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
