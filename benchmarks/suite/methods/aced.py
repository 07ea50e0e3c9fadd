"""ACED: ACE without the updates that began too many versions ago.

With A the clients whose last update began at most tau versions before the current one t, o_j its
version,

    theta <- theta + (eta / |A|) sum over j in A of u_j,    A = {j : t - o_j <= tau}.

The larger tau, the more clients are heard at each step, and the older is what they said.

Differences from the paper:
    Those of ACE. tau is the number of devices: with one step a reply, and devices asked alike,
    about two in three have been heard in that time. The paper's values are not known here.
    If no update is recent enough, as where the one that came is the only one, nothing moves.

Checked: that clients whose update is too old are left out, in reviews of the paper.
Not checked: the paper's text, and from when it counts age.

Reference:
    Chang, Yao, Krishnamurthy, Shelton, Chakraborty, Swami, Oymak, Roy-Chowdhury. Mitigating
    Participation Imbalance Bias in Asynchronous Federated Learning. arXiv 2511.19066, 2025.
"""

from typing import Any

from ace import RATES, LastOfEach  # the file beside this one

from fedstale.strategies import FedBuff

__all__ = ["RATES", "strategy"]


def strategy(scenario: Any, rate: float) -> FedBuff:
    """Return ACED with one step a reply."""
    jobs, seed, bound = scenario.concurrency, scenario.seed, scenario.n_devices
    return FedBuff(jobs, 1, weighting=LastOfEach(bound), eta=rate, seed=seed)
