"""CA2FL: buffered updates, calibrated by the last update of every device."""

from typing import Unpack

from fedstale.strategies.methods.fedbuff import buffered
from fedstale.strategies.schedule import Updates
from fedstale.strategies.server import Options, StaleStrategy
from fedstale.strategies.server_optimizer import SGD, Rate
from fedstale.strategies.types import Count
from fedstale.strategies.weighting import CachedUpdates


class CA2FL(StaleStrategy):
    """Runs FedBuff, whatever the age, with updates calibrated by the last one of every device.

    Args:
        n_clients: number of devices that there are, if it is known; >= 1.
        **options: of `StaleStrategy`; other arguments as for `FedBuff`.

    Reference:
        Wang, Cao, Wu, Chen, Chen. Tackling the Data Heterogeneity in Asynchronous Federated
        Learning with Cached Update Calibration. ICLR 2024.
    """

    def __init__(
        self,
        concurrency: Count,
        buffer_size: Updates = 10,
        *,
        eta: Rate = 1.0,
        n_clients: Count | None = None,
        **options: Unpack[Options],
    ) -> None:
        cached = CachedUpdates(1.0, n_clients=n_clients)
        super().__init__(**(buffered(concurrency, buffer_size, cached, SGD(eta)) | options))
