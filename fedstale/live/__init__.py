"""Watching a run while it goes on: a live page, progress lines, and metrics for Prometheus."""

from typing import TYPE_CHECKING

from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.live.prometheus import exported
    from fedstale.live.server import Board, observed, serving
    from fedstale.live.watching import (
        ProgressNotes,
        RepeatedInterrupt,
        Watcher,
        progress_line,
        watched,
    )
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = [
    "Board",
    "ProgressNotes",
    "RepeatedInterrupt",
    "Watcher",
    "exported",
    "observed",
    "progress_line",
    "serving",
    "watched",
]
