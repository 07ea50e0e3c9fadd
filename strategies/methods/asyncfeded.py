"""AsyncFedED: each update counts by the distance that the model has moved in the meantime."""

from typing import Unpack

from fedstale.strategies.methods.fedbuff import buffered
from fedstale.strategies.server import Options, StaleStrategy
from fedstale.strategies.server_optimizer import SGD
from fedstale.strategies.types import Count, Positive
from fedstale.strategies.weighting import EuclideanStaleness


class AsyncFedED(StaleStrategy):
    """Steps by each update as it comes, times lambda / (gamma + epsilon).

    Args:
        lam: lambda, > 0.
        epsilon: number > 0; gamma is how far the model has moved, in lengths of the update.
        **options: of `StaleStrategy`; other arguments as for `FedBuff`.

    Reference:
        Wang, Yang, He, Shi, Chen. AsyncFedED: Asynchronous Federated Learning with Euclidean
        Distance based Adaptive Weight Aggregation. 2022.
    """

    def __init__(
        self,
        concurrency: Count,
        *,
        lam: Positive = 1.0,
        epsilon: Positive = 1.0,
        **options: Unpack[Options],
    ) -> None:
        parts = buffered(concurrency, 1, EuclideanStaleness(epsilon), SGD(lam / epsilon))
        super().__init__(**(parts | options))
