"""Sets of nodes as bits, such as the online ones, without a list of a million ids.

A server that sends one job after each reply needs to know how many nodes it may choose from, and
the ids of the few that it drew. Words of 64 bits tell both in some hundredths of a millisecond,
where an array of the ids of all who are free takes several, and a list of them a hundred.
"""

from collections.abc import Collection
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

NodeIds = npt.NDArray[np.uint64]
Index = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Bits = npt.NDArray[np.uint64]
"""A mask of shape (m,) as ceil(m / 64) words: bit i % 64 of word i // 64, the lowest first."""

_WORD = 64
_FEW = 4
"""Places for which Python is faster than NumPy: after a reply, one node or two have changed."""
_BIT = np.uint64(1) << np.arange(_WORD, dtype=np.uint64)


def packed(mask: Mask) -> Bits:
    """Return a mask as words; bits beyond its end are 0.

    Example:
        >>> packed(np.array([True, False, True]))
        array([5], dtype=uint64)
    """
    found = np.packbits(mask, bitorder="little")
    words = np.zeros(-(-found.size // 8), dtype=np.uint64)
    words.view(np.uint8)[: found.size] = found
    return words


def unpacked(words: Bits, n: int) -> Mask:
    """Return the first n bits of words as a mask."""
    bits = np.unpackbits(words.view(np.uint8), count=n, bitorder="little")
    mask: Mask = bits.view(np.bool_)
    return mask


def bits_at(words: Bits, places: Index) -> Mask:
    """Return the bits at some places."""
    return (words[places // _WORD] & _BIT[places % _WORD]) != 0


def set_bits(words: Bits, places: Index) -> None:
    """Write 1 at some places.

    Example:
        >>> words = packed(np.array([True, False, False]))
        >>> set_bits(words, np.array([2]))
        >>> words
        array([5], dtype=uint64)
    """
    if places.size > _FEW:
        # Several places may be in one word, of which an assignment would keep the last.
        np.bitwise_or.at(words, places // _WORD, _BIT[places % _WORD])
        return
    for place in places.tolist():
        words[place // _WORD] |= _BIT[place % _WORD]


def clear_bits(words: Bits, places: Index) -> None:
    """Write 0 at some places."""
    if places.size > _FEW:
        np.bitwise_and.at(words, places // _WORD, ~_BIT[places % _WORD])
        return
    for place in places.tolist():
        words[place // _WORD] &= ~_BIT[place % _WORD]


def places_of(words: Bits) -> Index:
    """Return the places of the bits that are 1, ascending."""
    word = np.flatnonzero(words)
    bits = np.unpackbits(words[word].view(np.uint8), bitorder="little").reshape(-1, _WORD)
    row, bit = bits.nonzero()
    places: Index = word[row] * _WORD + bit
    return places


class NodeIndex:
    """Where nodes are in an array of distinct ids, found for few at a time.

    Example:
        >>> NodeIndex(np.array([9, 5], dtype=np.uint64)).of([5, 7])
        array([1])
    """

    def __init__(self, ids: NodeIds) -> None:
        """Index ids, shape (m,)."""
        self.ids = ids
        # Grids mostly answer in ascending order, which makes sorting superfluous.
        self.is_ascending = bool((ids[1:] > ids[:-1]).all())
        """Whether the ids stand in ascending order."""
        self._order: Index | None = None if self.is_ascending else np.argsort(ids)

    def of(self, nodes: Collection[int]) -> Index:
        """Return the places of those nodes that are among the ids."""
        wanted = np.fromiter(nodes, dtype=np.uint64, count=len(nodes))
        found = self.ids.searchsorted(wanted, sorter=self._order)
        if found.size == 1 and self._order is None:
            place = found.item()
            is_here = place < self.ids.size and self.ids[place] == wanted[0]
            return found if is_here else found[:0]
        inside = found < self.ids.size
        found, wanted = found[inside], wanted[inside]
        found = found if self._order is None else self._order[found]
        return found[self.ids[found] == wanted]


class NodeSet:
    """Some of the nodes that have a place, in the order of their places; it never changes.

    Example:
        >>> everyone = NodeIndex(np.array([3, 5, 9], dtype=np.uint64))
        >>> online = NodeSet(everyone, packed(np.array([True, False, True])))
        >>> len(online), online.at(np.array([1]))
        (2, array([9], dtype=uint64))
    """

    def __init__(self, everyone: NodeIndex, words: Bits) -> None:
        """Hold the nodes of a mask in words, which must not be written to any more."""
        self.everyone, self.words = everyone, words
        self._n_until = np.bitwise_count(words).cumsum(dtype=np.int64)
        """How many nodes there are up to the end of each word."""

    @classmethod
    def of(cls, node_ids: NodeIds) -> "NodeSet":
        """Return a set of all of some distinct nodes."""
        return cls(NodeIndex(node_ids), packed(np.ones(node_ids.size, dtype=np.bool_)))

    @cached_property
    def ids(self) -> NodeIds:
        """Ids of the nodes, shape (n,)."""
        return self.everyone.ids[np.flatnonzero(unpacked(self.words, self.everyone.ids.size))]

    def __len__(self) -> int:
        return int(self._n_until[-1]) if self.words.size else 0

    def at(self, which: npt.NDArray[Any] | slice) -> NodeIds:
        """Return `ids[which]`; of few positions, without looking for the ids of all others."""
        if not isinstance(which, np.ndarray) or which.dtype.kind != "i":
            return self.ids[which]
        if _WORD * which.size > self.everyone.ids.size or (which < 0).any():
            return self.ids[which]
        words, n_until = self.words, self._n_until
        if which.size == 1:
            return self.everyone.ids[[self._place(which.item())]]
        word = n_until.searchsorted(which, side="right")
        bits = np.unpackbits(words[word].view(np.uint8), bitorder="little").reshape(-1, _WORD)
        counted = bits.cumsum(axis=1, dtype=np.int64)
        n_before = n_until[word] - counted[:, -1]
        bit = (counted > (which - n_before)[:, None]).argmax(axis=1)
        return self.everyone.ids[word * _WORD + bit]

    def _place(self, position: int) -> int:
        """Find the place of the node at a position among these."""
        word = int(self._n_until.searchsorted(position, side="right"))
        bits = int(self.words[word])
        for _ in range(position - int(self._n_until[word]) + bits.bit_count()):
            bits &= bits - 1
        return _WORD * word + (bits & -bits).bit_length() - 1

    def n_of(self, nodes: Collection[int]) -> int:
        """Return how many of some nodes are among these."""
        return int(np.count_nonzero(bits_at(self.words, self.everyone.of(nodes))))
