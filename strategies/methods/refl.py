"""REFL: devices that will rarely be online come first, and stale updates by what they add."""

from typing import Unpack

from fedstale.strategies.schedule import k_async
from fedstale.strategies.selection import LeastAvailable
from fedstale.strategies.server import Options, StaleStrategy
from fedstale.strategies.types import Count, Share
from fedstale.strategies.weighting import RelevanceAware


class REFL(StaleStrategy):
    """Picks devices that will rarely be online, steps without the last, and weighs those later.

    Args:
        concurrency: jobs in flight, >= 1.
        buffer_size: updates of a server step, >= 1.
        beta: share of the deviation in the weight of a stale update, in [0, 1].
        **options: of `StaleStrategy`.

    Differences from the paper:
        A node that took part may be asked again at once; the paper's holds off for some rounds.
        As many are asked however many stale updates are expected; the paper asks for fewer.

    Reference:
        Abdelmoniem, Sahu, Canini, Fahmy. REFL: Resource-Efficient Federated Learning.
        EuroSys 2023.
    """

    def __init__(
        self,
        concurrency: Count,
        buffer_size: Count = 10,
        *,
        beta: Share = 0.35,
        **options: Unpack[Options],
    ) -> None:
        parts = Options(
            selector=LeastAvailable(),
            schedule=k_async(concurrency, buffer_size),
            weighting=RelevanceAware(beta),
            normalise="weights",
        )
        super().__init__(**(parts | options))
