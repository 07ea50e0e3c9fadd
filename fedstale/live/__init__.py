"""Watching a run while it goes on: a live page, metrics for Prometheus, scalars for TensorBoard."""

from typing import TYPE_CHECKING

from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.live.prometheus import exported
    from fedstale.live.server import PORT, Board, observed, parse_address, serving
    from fedstale.live.watching import (
        EventLog,
        ProgressLine,
        ProgressNotes,
        RepeatedInterrupt,
        TensorBoard,
        Watcher,
        duration,
        event_writer,
        progress_line,
    )
else:
    __getattr__, __dir__ = names_of(
        __name__,
        {
            "prometheus": "exported",
            "server": "PORT Board observed parse_address serving",
            "watching": (
                "EventLog RepeatedInterrupt ProgressLine ProgressNotes TensorBoard Watcher "
                "duration event_writer progress_line"
            ),
        },
    )

__all__ = [
    "PORT",
    "Board",
    "EventLog",
    "ProgressLine",
    "ProgressNotes",
    "RepeatedInterrupt",
    "TensorBoard",
    "Watcher",
    "duration",
    "event_writer",
    "exported",
    "observed",
    "parse_address",
    "progress_line",
    "serving",
]
