"""Which nodes are online and free, kept up as jobs start and end and not looked for at each reply.

A reply changes one node, so with ten thousand jobs out a walk over all nodes for each of them would
be most of the server's work. Only when the grid knows other nodes is everything looked up again.
"""

from collections.abc import Collection
from typing import Protocol, runtime_checkable

import numpy as np
from flwr.serverapp import Grid

from fedstale.strategies.server.jobs import Ledger
from fedstale.strategies.server.node_set import Mask, NodeSet, Places


@runtime_checkable
class Register(Protocol):
    """A grid that need not make a Python object for each node to say who is online."""

    def online_nodes(self) -> NodeSet:
        """Return the nodes that `get_node_ids` does, each time among the same everyone."""
        ...


class Roster:
    """The nodes of a grid, and which of them have a training job."""

    def __init__(self, grid: Grid, ledger: Ledger) -> None:
        """Follow the jobs of a ledger on a grid; one that is a `Register` is asked as such."""
        self._grid, self._register = grid, grid if isinstance(grid, Register) else None
        self._ledger = ledger
        self._everyone = Places(np.zeros(0, dtype=np.uint64))
        self._is_idle: Mask = np.zeros(0, dtype=np.bool_)

    def online(self) -> NodeSet:
        """Return the nodes that are online, in the order of the grid."""
        if self._register is not None:
            return self._register.online_nodes()
        return NodeSet.of(np.array(list(self._grid.get_node_ids()), dtype=np.uint64))

    def free(self, but: Collection[int] = ()) -> NodeSet:
        """Return the nodes that are online and have no training job, but for some others."""
        online, busy, moved = self.online(), self._ledger.busy_nodes, self._ledger.take_moved()
        known, everyone = self._everyone, online.everyone
        if everyone is known or np.array_equal(everyone.ids, known.ids):
            # Not `moved - busy`, which would walk over all that are busy.
            self._is_idle[known.of([node for node in moved if node not in busy])] = True
            self._is_idle[known.of([node for node in moved if node in busy])] = False
        else:
            self._everyone = everyone
            self._is_idle = np.ones(everyone.ids.size, dtype=np.bool_)
            self._is_idle[everyone.of(busy)] = False
        is_free = online.is_in & self._is_idle
        if but:
            is_free[everyone.of(but)] = False
        return NodeSet(everyone, is_free)
