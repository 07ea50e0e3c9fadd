"""FedStale: rounds to which absent nodes contribute their last update."""

from typing import Unpack

from fedstale.strategies.methods.fedavg import FedAvg, RoundOptions
from fedstale.strategies.types import Count, Share
from fedstale.strategies.weighting import CachedUpdates


class FedStale(FedAvg):
    """Runs FedAvg, all devices alike, with the last update of those who do not take part.

    At beta = 1 this is FedVARP. It shares this package's name and nothing else.

    Args:
        beta: how far cached updates count, in [0, 1].
        n_clients: number of devices that there are, if it is known; >= 1.
        **options: of `FedAvg`; other arguments as for `FedAvg`.

    Reference:
        Rodio, Neglia. FedStale: Leveraging Stale Client Updates in Federated Learning. ECAI 2024.
    """

    def __init__(
        self,
        concurrency: Count | None = None,
        *,
        beta: Share = 0.5,
        n_clients: Count | None = None,
        **options: Unpack[RoundOptions],
    ) -> None:
        cached = CachedUpdates(beta, n_clients=n_clients)
        parts = RoundOptions(weighting=cached, normalise="buffer_size")
        super().__init__(concurrency, **(parts | options))
