"""FedASMU, its server: models are mixed in by age, and less as training goes on.

A model theta_o that was trained from version o and comes as version t is made is mixed in,

    theta <- (1 - alpha) theta + alpha theta_o,    alpha = mu xi / (1 + mu xi),
    xi = lambda / (sqrt(t) (t - o + 1)^sigma) + iota,

with mu the rate here. That is FedAsync with a weight that also falls with the square root of the
versions made, and that stays below 1 whatever the rate.

Differences from the paper:
    lambda, sigma and iota stay as they are. The paper moves them for each device by gradients of
    its loss, which a server does not have.
    Devices do not ask for a fresher model while they train, to mix it into their own; Flower's
    messages know no such request. This is half of the method, and its title says so.

Checked: both equations, lambda = 1, sigma = 1/2 and iota = 0 in a third party's implementation.
Not checked: the paper's text.

Reference:
    Liu, Jia, Che, Huo, Ren, Zhou, Dai, Dou. FedASMU: Efficient Asynchronous Federated Learning with
    Dynamic Staleness-Aware Model Update. AAAI 2024.
"""

from math import sqrt
from typing import Any

from fedstale.strategies import FedBuff
from fedstale.strategies.types import ClientUpdate, scale
from fedstale.strategies.weighting import Weighting

RATES = (1.0, 3.0, 10.0, 30.0)


class DynamicStaleness(Weighting):
    """Weighs an update by alpha, from its age and the number of the version that is made."""

    def __init__(
        self, mu: float, *, lam: float = 1.0, sigma: float = 0.5, iota: float = 0.0
    ) -> None:
        """Set mu > 0, and lambda, sigma and iota >= 0."""
        self.mu, self.lam, self.sigma, self.iota = mu, lam, sigma, iota

    def weigh(self, update: ClientUpdate) -> float:
        """Scale the update by alpha."""
        t = update.base_version + update.staleness + 1
        xi = self.lam / (sqrt(t) * (update.staleness + 1) ** self.sigma) + self.iota
        alpha = self.mu * xi / (1.0 + self.mu * xi)
        scale(update.delta, alpha)
        return alpha


def strategy(scenario: Any, rate: float) -> FedBuff:
    """Return FedBuff with one model a step, mixed in as a whole."""
    jobs, seed = scenario.concurrency, scenario.seed
    return FedBuff(jobs, 1, weighting=DynamicStaleness(rate), update="model", seed=seed)
