"""FedBuff: a server step after every few updates, whichever devices they come from."""

from typing import Unpack

from fedstale.strategies.schedule import Updates, k_batch_async
from fedstale.strategies.server import Options, StaleStrategy
from fedstale.strategies.server_optimizer import SGD, Rate, ServerOptimizer
from fedstale.strategies.types import Count
from fedstale.strategies.weighting import AgeCurve, ByAge, Weighting, polynomial

INVERSE_ROOT = polynomial(0.5)


def buffered(
    concurrency: Count, buffer_size: Updates, weighting: Weighting, optimizer: ServerOptimizer
) -> Options:
    """Return the options of FedBuff and what is like it but for its weights and its steps."""
    return Options(
        schedule=k_batch_async(concurrency, buffer_size),
        weighting=weighting,
        server_optimizer=optimizer,
        normalise="buffer_size",
    )


class FedBuff(StaleStrategy):
    """Steps after every few updates, weighted by 1/sqrt(1 + tau) and divided by their number.

    Args:
        concurrency: jobs in flight, >= 1.
        buffer_size: updates of a server step, >= 1.
        staleness: weight of an update as a function of its staleness tau, exactly 1 at 0.
        eta: the server's learning rate, > 0, or a function of the number of the step.
        **options: of `StaleStrategy`.

    Reference:
        Nguyen et al. Federated Learning with Buffered Asynchronous Aggregation. AISTATS 2022.

    Example:
        >>> FedBuff(20, 5, seed=1)  # doctest: +NORMALIZE_WHITESPACE
        FedBuff(concurrency=20, buffer_size=5, send='after_reply', stragglers='keep',
        weighting=ByAge(polynomial(a=0.5)), normalise='buffer_size', seed=1)
    """

    def __init__(
        self,
        concurrency: Count,
        buffer_size: Updates = 10,
        *,
        staleness: AgeCurve = INVERSE_ROOT,
        eta: Rate = 1.0,
        **options: Unpack[Options],
    ) -> None:
        parts = buffered(concurrency, buffer_size, ByAge(staleness), SGD(eta))
        super().__init__(**(parts | options))
