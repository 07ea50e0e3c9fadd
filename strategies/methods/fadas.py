"""FADAS: buffered AMSGrad on the server, at a rate that falls with the delay."""

from typing import Unpack

from fedstale.strategies.methods.fedbuff import buffered
from fedstale.strategies.schedule import Updates
from fedstale.strategies.server import Options, StaleStrategy
from fedstale.strategies.server_optimizer import AMSGrad, DelayAdaptive, Rate
from fedstale.strategies.types import Count
from fedstale.strategies.weighting import ByAge, constant


class FADAS(StaleStrategy):
    """Steps after every few updates, whatever their age, by AMSGrad with a delay-adaptive rate.

    Args:
        tau_c: largest staleness that leaves eta alone, an integer >= 1.
        **options: of `StaleStrategy`; other arguments as for `FedBuff`.

    Reference:
        Wang, Wang, Lu, Chen. FADAS: Towards Federated Adaptive Asynchronous Optimization.
        ICML 2024.
    """

    def __init__(
        self,
        concurrency: Count,
        buffer_size: Updates = 10,
        *,
        eta: Rate = 0.1,
        tau_c: Count = 1,
        **options: Unpack[Options],
    ) -> None:
        optimizer = DelayAdaptive(AMSGrad(eta), tau_c)
        parts = buffered(concurrency, buffer_size, ByAge(constant()), optimizer)
        super().__init__(**(parts | options))
