"""AdaSync: the server waits for more and more of the devices as the loss falls.

How many is `fedstale.strategies.schedule.AdaSync`, which other methods take as a buffer size.
"""

from typing import Unpack

from fedstale.strategies.schedule import AdaSync, k_sync
from fedstale.strategies.server import Options, StaleStrategy
from fedstale.strategies.types import Count


class AdaptiveSync(StaleStrategy):
    """Waits for more and more of the devices as the loss falls, and cancels the others.

    Args:
        concurrency: devices to send to, >= 1.
        start: devices to wait for at the first loss, >= 1.
        **options: of `StaleStrategy`.

    Reference:
        Dutta, Wang, Joshi. Slow and Stale Gradients Can Win the Race. IEEE JSAIT 2021.
    """

    def __init__(self, concurrency: Count, start: Count = 1, **options: Unpack[Options]) -> None:
        size = AdaSync(start=start, most=concurrency, form="worker")
        parts = Options(schedule=k_sync(concurrency, size), normalise="buffer_size")
        super().__init__(**(parts | options))
