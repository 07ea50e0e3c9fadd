"""Some of many nodes, as a mask: who is online, who is free, without a list of a million ids.

A server that sends one job after each reply needs to know how many nodes it may choose from, and
the ids of the few that it drew. A mask tells both in a fraction of a millisecond, where an array of
the ids of all who are free takes several, and a list of them a hundred.
"""

from collections.abc import Collection
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

NodeIds = npt.NDArray[np.uint64]
Index = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_WORD = 64


class Places:
    """Where nodes are in an array of distinct ids, found for few at a time.

    Example:
        >>> Places(np.array([9, 5], dtype=np.uint64)).of([5, 7])
        array([1])
    """

    def __init__(self, ids: NodeIds) -> None:
        """Take ids, shape (m,)."""
        self.ids = ids
        # Grids mostly answer in ascending order, which makes sorting superfluous.
        self.is_ascending = bool((ids[1:] > ids[:-1]).all())
        """Whether the ids stand in ascending order."""
        self._order: Index | None = None if self.is_ascending else np.argsort(ids)

    def of(self, nodes: Collection[int]) -> Index:
        """Return the places of those nodes that are among the ids."""
        wanted = np.fromiter(nodes, dtype=np.uint64, count=len(nodes))
        found = np.searchsorted(self.ids, wanted, sorter=self._order)
        inside = found < self.ids.size
        found, wanted = found[inside], wanted[inside]
        found = found if self._order is None else self._order[found]
        return found[self.ids[found] == wanted]


class NodeSet:
    """Some of the nodes that have a place, in the order of their places; it never changes.

    Example:
        >>> everyone = Places(np.array([3, 5, 9], dtype=np.uint64))
        >>> online = NodeSet(everyone, np.array([True, False, True]))
        >>> len(online), online.at(np.array([1]))
        (2, array([9], dtype=uint64))
    """

    def __init__(self, everyone: Places, is_in: Mask) -> None:
        """Take the nodes of a mask of shape (m,), which must not be written to any more."""
        self.everyone, self.is_in = everyone, is_in

    @classmethod
    def of(cls, node_ids: NodeIds) -> "NodeSet":
        """Return a set of all of some distinct nodes."""
        return cls(Places(node_ids), np.ones(node_ids.size, dtype=np.bool_))

    @cached_property
    def ids(self) -> NodeIds:
        """Ids of the nodes, shape (n,)."""
        return self.everyone.ids[np.flatnonzero(self.is_in)]

    def __len__(self) -> int:
        _, n_until = self._words
        return int(n_until[-1]) if n_until.size else 0

    def at(self, which: npt.NDArray[Any] | slice) -> NodeIds:
        """Return `ids[which]`; of few positions, without looking for the ids of all others."""
        if not isinstance(which, np.ndarray) or which.dtype.kind != "i":
            return self.ids[which]
        if _WORD * which.size > self.is_in.size or (which < 0).any():
            return self.ids[which]
        words, n_until = self._words
        word = np.searchsorted(n_until, which, side="right")
        bits = np.unpackbits(words[word].view(np.uint8), bitorder="little").reshape(-1, _WORD)
        counted = bits.cumsum(axis=1, dtype=np.int64)
        n_before = n_until[word] - counted[:, -1]
        bit = (counted > (which - n_before)[:, None]).argmax(axis=1)
        return self.everyone.ids[word * _WORD + bit]

    def n_of(self, nodes: Collection[int]) -> int:
        """Return how many of some nodes are among these."""
        return int(np.count_nonzero(self.is_in[self.everyone.of(nodes)]))

    @cached_property
    def _words(self) -> tuple[npt.NDArray[np.uint64], Index]:
        """The mask in words of 64 bits, and how many nodes there are up to the end of each."""
        packed = np.packbits(self.is_in, bitorder="little")
        words = np.zeros(-(-packed.size // 8), dtype=np.uint64)
        words.view(np.uint8)[: packed.size] = packed
        return words, np.cumsum(np.bitwise_count(words), dtype=np.int64)
