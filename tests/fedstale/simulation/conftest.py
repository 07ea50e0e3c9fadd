"""Grids on tiny fleets, and small runs that are interrupted."""

import pytest
from buffered_app import buffered
from interruptions import every_version_kept, no_pages
from local_workers import local_workers
from missing_names import without
from tiny import COSTS, counting_app, fleet

from fedstale.simulation import TraceGrid

__all__ = ["buffered", "every_version_kept", "local_workers", "no_pages", "without"]


@pytest.fixture
def make_grid():
    """Return a function that makes a running grid on some windows."""
    running = []

    def make(windows, *, app=None, costs=COSTS, length=1000.0, compute=1.0, repeat=True, **options):
        traces = fleet(windows, length=length, compute=compute, repeat=repeat)
        grid = TraceGrid(traces, app or counting_app(), costs=costs, **options)
        context = grid.running()
        context.__enter__()
        running.append(context)
        return grid

    yield make
    for context in reversed(running):
        context.__exit__(None, None, None)
