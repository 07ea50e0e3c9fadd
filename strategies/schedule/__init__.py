"""When jobs are sent, and how many updates a step of the server waits for."""

from fedstale.strategies.schedule.base import (
    RECHECK_S,
    AdaSync,
    LearntDeadline,
    Schedule,
    Slots,
    SmoothedLoss,
    Stragglers,
    k_async,
    k_batch_async,
    k_batch_sync,
    k_sync,
    over_selection,
    semi_synchronous,
)

__all__ = [
    "RECHECK_S",
    "AdaSync",
    "LearntDeadline",
    "Schedule",
    "Slots",
    "SmoothedLoss",
    "Stragglers",
    "k_async",
    "k_batch_async",
    "k_batch_sync",
    "k_sync",
    "over_selection",
    "semi_synchronous",
]
