"""Gap-Aware: an update is divided by how far the model has moved since its base version."""

from typing import Unpack

from fedstale.strategies.methods.fedbuff import buffered
from fedstale.strategies.schedule import Updates
from fedstale.strategies.server import Options, StaleStrategy
from fedstale.strategies.server_optimizer import SGD, Rate
from fedstale.strategies.types import Count, Share
from fedstale.strategies.weighting import DirectionalGap, Gap, Grain


class GapAware(StaleStrategy):
    """Runs FedBuff with updates divided by the gap instead of the root of their age.

    Args:
        of: one gap for each "parameter", for each "layer" or for the "model".
        **options: of `StaleStrategy`; other arguments as for `FedBuff`.

    Reference:
        Barkai, Hakimi, Schuster. Gap-Aware Mitigation of Gradient Staleness. ICLR 2020.
    """

    def __init__(
        self,
        concurrency: Count,
        buffer_size: Updates = 10,
        *,
        of: Grain = "parameter",
        eta: Rate = 1.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**(buffered(concurrency, buffer_size, Gap(of=of), SGD(eta)) | options))


class DirectionAware(StaleStrategy):
    """Runs FedBuff with updates divided by the directional gap; fedstale's own.

    Args:
        share: of the plain gap that counts in any direction, in [0, 1].
        **options: of `StaleStrategy`; other arguments as for `FedBuff`.
    """

    def __init__(
        self,
        concurrency: Count,
        buffer_size: Updates = 10,
        *,
        share: Share = 0.1,
        eta: Rate = 1.0,
        **options: Unpack[Options],
    ) -> None:
        parts = buffered(concurrency, buffer_size, DirectionalGap(share=share), SGD(eta))
        super().__init__(**(parts | options))
