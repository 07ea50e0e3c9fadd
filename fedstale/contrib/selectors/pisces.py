"""Pisces: the utility of what a job brings, over the root of staleness.

Reference:
    Jiang, Wang, Li, Li. Pisces: Efficient Federated Learning via Guided Asynchronous Training.
    SoCC 2022.
"""

from fedstale.strategies.selection import Exponents

PISCES = Exponents(chance=0.0, staleness=0.5)
"""Of `ExpectedUtility`, with the paper's exponent.

Differences from the paper:
    Staleness is that of the last merged update, not a mean; a node without one has the largest
    utility known; no loss leaves a node out. Steps come by count, not by a bound on staleness.
"""
