"""Keeps a simulation on disk while it runs, so that one that was killed can go on.

A checkpoint holds the strategy, the grid with every job, what was measured, and the random streams
of the server. Going on from it gives the same events and metrics, byte for byte, as a run that was
never stopped. Checkpoints cost time in proportion to what has happened so far; they are written at
every version, or as seldom as keeps their cost small.
"""

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fedstale.errors import ResumeError
from fedstale.simulation.progress import Progress
from fedstale.simulation.trace_grid import TraceGrid
from fedstale.strategies.server.checkpoint import Checkpoints, State, read_checkpoint
from fedstale.strategies.server.versions import Snapshot

_LARGEST_SHARE = 0.05
"""Of the wall time of a run that may be spent on checkpoints."""


class SimulationCheckpointer:
    """Writes the checkpoints of a run, and takes a run back to the last one."""

    def __init__(self, folder: Path, grid: TraceGrid, progress: Progress, *, every: int) -> None:
        """Keep a run.

        Args:
            folder: of the checkpoints.
            grid: of the run.
            progress: of the run.
            every: versions from one checkpoint to the next; 0 writes none.
        """
        self._folder, self._grid, self._progress = folder, grid, progress
        self._due_at = 0.0
        if every:
            checkpoints = Checkpoints(folder, every=every)
            grid.on_kept = lambda version, state: self._keep(checkpoints, version, state)

    def _keep(self, checkpoints: Checkpoints, version: int, state: Callable[[], State]) -> None:
        started = time.perf_counter()
        if started < self._due_at:
            return
        checkpoints.keep(version, lambda: {**state(), **self._own_state()})
        now = time.perf_counter()
        self._due_at = now + (now - started) / _LARGEST_SHARE

    def restore(self) -> bool:
        """Let the run go on from its last whole checkpoint; return whether there is one."""
        try:
            state = read_checkpoint(self._folder)
        except ResumeError:
            return False
        self._grid.resume_from(state, then=lambda: self._restore(state))
        return True

    def _own_state(self) -> State:
        progress = self._progress
        return {
            "progress": {
                "rounds": progress.rounds,
                "server_evaluates": progress.server_evaluates,
                "rows": progress.rows,
                "latest": progress.latest,
            },
            "random": _random_streams(),
        }

    def _restore(self, state: State) -> None:
        saved, progress = state["progress"], self._progress
        progress.rounds, progress.latest = saved["rounds"], saved["latest"]
        progress.server_evaluates = saved["server_evaluates"]
        # In place: what was measured before the strategy started was measured before the crash.
        progress.rows[:] = [tuple(row) for row in saved["rows"]]
        progress.arrays = _current_model(state["strategy"]["versions"])
        _set_random_streams(state["random"])


def _current_model(versions: State) -> ArrayRecord:
    held = versions["held"][str(versions["version"])]
    return Snapshot(held["floats"], held["counts"], tuple(versions["names"])).record()


def _random_streams() -> State:
    """Return the global streams that apps and stock functions draw from on the server."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    state: State = {
        "python": [version, np.array(words, dtype=np.uint64), gauss],
        "numpy": [name, keys, *rest],
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        state["torch"] = torch.get_rng_state().numpy()
    return state


def _set_random_streams(state: State) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys, *rest))  # noqa: NPY002
    torch: Any = sys.modules.get("torch")
    if torch is not None and "torch" in state:
        torch.set_rng_state(torch.from_numpy(state["torch"].copy()))
