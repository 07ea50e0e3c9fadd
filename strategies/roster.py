"""Which nodes are online and free, kept up as jobs start and end and not looked for at each reply.

A reply changes one node, so with ten thousand jobs out a walk over all nodes for each of them would
be most of the server's work. Only when other nodes are online is everything looked up again.
"""

from collections.abc import Collection
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from flwr.serverapp import Grid

from fedstale.strategies.candidate import Index, NodeIds
from fedstale.strategies.ledger import Ledger


@runtime_checkable
class Register(Protocol):
    """A grid that need not make a Python object for each node to say who is online."""

    def online_nodes(self) -> NodeIds:
        """Return what `get_node_ids` does, as an array of shape (n,) that nobody writes to."""
        ...


def online_in(grid: Grid) -> NodeIds:
    """Return the nodes that are online, in the order of the grid."""
    if isinstance(grid, Register):
        return grid.online_nodes()
    return np.array(list(grid.get_node_ids()), dtype=np.uint64)


class Roster:
    """The nodes online when the grid was last asked, and which of them have a training job.

    Example:
        >>> roster = Roster(Ledger())
        >>> online = np.array([3, 5, 9], dtype=np.uint64)
        >>> roster.free(online)
        array([3, 5, 9], dtype=uint64)
        >>> roster.free(online, but={5})
        array([3, 9], dtype=uint64)
    """

    def __init__(self, ledger: Ledger) -> None:
        """Follow the jobs of a ledger."""
        self._ledger = ledger
        self._online = Places(np.zeros(0, dtype=np.uint64))
        self._is_free: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)

    def free(self, online: NodeIds, but: Collection[int] = ()) -> NodeIds:
        """Return the nodes that are online and have no training job, in the order of the grid.

        Args:
            online: what `online_in` returns now.
            but: nodes to leave out.
        """
        busy, moved = self._ledger.busy_nodes, self._ledger.take_moved()
        if online is self._online.ids or np.array_equal(online, self._online.ids):
            # Not `moved - busy`, which would walk over all that are busy.
            self._is_free[self._online.of([node for node in moved if node not in busy])] = True
            self._is_free[self._online.of([node for node in moved if node in busy])] = False
        else:
            self._online = Places(online)
            self._is_free = np.ones(online.size, dtype=np.bool_)
            self._is_free[self._online.of(busy)] = False
        if not but:
            return self._online.ids[self._is_free]
        is_free = self._is_free.copy()
        is_free[self._online.of(but)] = False
        return self._online.ids[is_free]


class Places:
    """Where nodes are in an array of distinct ids, found for few at a time."""

    def __init__(self, ids: NodeIds) -> None:
        """Take ids, shape (n,)."""
        self.ids = ids
        # Grids mostly answer in ascending order, which makes sorting superfluous.
        self._order: Index | None = None if (ids[1:] > ids[:-1]).all() else np.argsort(ids)

    def of(self, nodes: Collection[int]) -> Index:
        """Return the places of those nodes that are among the ids.

        Example:
            >>> Places(np.array([9, 5], dtype=np.uint64)).of([5, 7])
            array([1])
        """
        wanted = np.fromiter(nodes, dtype=np.uint64, count=len(nodes))
        found = np.searchsorted(self.ids, wanted, sorter=self._order)
        inside = found < self.ids.size
        found, wanted = found[inside], wanted[inside]
        found = found if self._order is None else self._order[found]
        return found[self.ids[found] == wanted]
