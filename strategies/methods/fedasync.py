"""FedAsync: each reply is mixed into the model as it comes."""

from typing import Unpack

from fedstale.strategies.methods.fedbuff import INVERSE_ROOT, buffered
from fedstale.strategies.server import Options, StaleStrategy
from fedstale.strategies.server_optimizer import SGD, Rate
from fedstale.strategies.types import Count
from fedstale.strategies.weighting import AgeCurve, ByAge


class FedAsync(StaleStrategy):
    """Mixes each reply into the model: theta <- (1 - a s(tau)) theta + a s(tau) theta_i.

    Args:
        mix: a, > 0, or a function of the number of the step.
        staleness: s, a function of the staleness tau, exactly 1 at 0.
        **options: of `StaleStrategy`; other arguments as for `FedBuff`.

    Differences from the paper:
        Clients train on their own loss, without rho/2 |w - w_received|^2; an app that wants it
        adds it itself, as for `FedProx`.

    Reference:
        Xie, Koyejo, Gupta. Asynchronous Federated Optimization. 2019.
    """

    def __init__(
        self,
        concurrency: Count,
        *,
        mix: Rate = 0.6,
        staleness: AgeCurve = INVERSE_ROOT,
        **options: Unpack[Options],
    ) -> None:
        parts = buffered(concurrency, 1, ByAge(staleness), SGD(mix))
        super().__init__(**(parts | Options(update="model") | options))
