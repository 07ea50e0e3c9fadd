"""Ringleader ASGD: rounds of n steps by a table that holds every worker's updates.

G_i is the sum of the b_i updates that the table has of worker i, and a step is

    theta <- theta + (eta / n) sum over i of G_i / b_i.

A round has two phases. In the first the server collects, without a step, until every worker is in
the table. In the second it makes n steps: one by the table as it is, then one for each other
worker, when its next update has been added. What a worker sends after its step waits in a second
table, which becomes the first when the round ends. So no update is dropped, no worker counts more
for being fast, and of n workers none is more than 2 n - 2 steps behind.

Differences from the paper:
    A worker is a device, and n the number of jobs in flight: with as many devices, all of them
    there, it is the paper's algorithm. With more, the table holds the n that came first and those
    heard since, and the mean is over all of them.
    The server makes a version at each reply, those of the first phase without any change.
    Updates are those of whole local trainings, not single gradients.

Checked: phases, tables and mean in code with the paper's experiments, and in a summary of it.
Not checked: the paper's text.

Reference:
    Maranjyan, Richtarik. Ringleader ASGD: The First Asynchronous SGD with Optimal Time Complexity
    under Data Heterogeneity. ICLR 2026 (arXiv 2509.22860).
"""

from typing import Any

import numpy as np

from fedstale.strategies import FedBuff
from fedstale.strategies.types import ClientUpdate, Model, add_scaled, over_chunks, zeros_like
from fedstale.strategies.weighting import Weighting

RATES = (0.05, 0.1, 0.2, 0.4, 0.8)
Table = dict[int, tuple[Model, int]]
"""By worker, the sum of its updates in float64 and their number."""


class RingTable(Weighting):
    """Puts the mean over the table in the place of an update, or zeros where no step is due."""

    saved = ("table", "waiting", "stepped")

    def __init__(self, n: int) -> None:
        """Set the workers of a round, >= 1."""
        self.n = n
        self.table: Table = {}
        self.waiting: Table = {}
        """Updates for the next round."""
        self.stepped: dict[int, None] = {}
        """Workers that had their step in this round; none in the first phase."""

    def weigh(self, update: ClientUpdate) -> float:
        """Take the update into a table, and write the step that follows."""
        node, step = update.node_id, zeros_like(update.delta, np.float64)
        is_late = node in self.stepped
        added = self.waiting if is_late else self.table
        total, count = added.get(node) or (zeros_like(update.delta, np.float64), 0)
        add_scaled(total, update.delta, 1.0)
        added[node] = total, count + 1
        if not is_late and len(self.table) >= self.n:
            self.stepped[node] = None
            for total, count in self.table.values():
                add_scaled(step, total, 1.0 / (count * len(self.table)))
        if len(self.stepped) == self.n:
            self.table, self.waiting, self.stepped = self.waiting, {}, {}
        over_chunks(np.copyto, update.delta, step)
        return 1.0

    def discard(self) -> None:
        """Begin a round anew, as a table may hold what made the step impossible."""
        self.table, self.waiting, self.stepped = {}, {}, {}


def strategy(scenario: Any, rate: float) -> FedBuff:
    """Return Ringleader ASGD."""
    jobs, seed = scenario.concurrency, scenario.seed
    return FedBuff(jobs, 1, weighting=RingTable(jobs), eta=rate, seed=seed)
