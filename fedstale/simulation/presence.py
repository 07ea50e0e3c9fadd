"""Who is online, kept up from change to change instead of looked up for everybody each time."""

import heapq

import numpy as np

from fedstale.traces.arrays import Array, Index, Mask
from fedstale.traces.availability import Availability

_AHEAD = 1 << 16
"""Devices whose next change is kept in order; of the others it is enough that it comes later."""


class Presence:
    """The devices that are available at an instant that mostly moves ahead.

    Example:
        >>> phones = Availability.of([[(0.0, 10.0)], [(5.0, 20.0)]], 60.0)
        >>> presence = Presence(phones)
        >>> presence.move(7.0)
        >>> presence.is_here, presence.next_change
        (array([ True,  True]), 10.0)
    """

    def __init__(self, availability: Availability) -> None:
        """Start at 0 s."""
        self._availability = availability
        self._everyone = np.arange(availability.n_devices)
        self._mask: Mask = np.zeros(availability.n_devices, dtype=np.bool_)
        self._until: Array = np.zeros(availability.n_devices)
        self._soon: list[tuple[float, int]] = []
        self._n_online, self._now, self._horizon = 0, 0.0, np.inf
        self._begin(0.0)

    @property
    def is_here(self) -> Mask:
        """Who is available, by position; the same array until one changes, then another."""
        return self._mask

    @property
    def n_online(self) -> int:
        """Number of devices that are available."""
        return self._n_online

    @property
    def next_change(self) -> float:
        """The next instant in s at which a device comes or goes; inf if none does."""
        return self._soon[0][0] if self._soon else np.inf

    def move(self, now: float) -> None:
        """Go to an instant in s."""
        if now < self._now or now > self._horizon:
            self._begin(now)
            return
        self._now = now
        due = []
        while self._soon and self._soon[0][0] <= now:
            due.append(heapq.heappop(self._soon)[1])
        if not due:
            return
        self._update(np.array(due))
        for device in due:
            until = float(self._until[device])
            if until <= self._horizon and until < np.inf:
                heapq.heappush(self._soon, (until, device))
        if not self._soon:
            self._order()

    def _begin(self, now: float) -> None:
        """Look everybody up."""
        self._now = now
        self._update(self._everyone)
        self._order()

    def _update(self, devices: Index) -> None:
        """Look up who of some devices is here now, and until when that holds."""
        start, end = self._availability.window_at_or_after(devices, self._now)
        is_here = start <= self._now
        self._n_online += int(is_here.sum()) - int(self._mask[devices].sum())
        self._mask = self._mask.copy()
        self._mask[devices] = is_here
        self._until[devices] = np.where(is_here, end, start)

    def _order(self) -> None:
        """Put the next changes in order, as far ahead as is worth it."""
        is_many = self._until.size > _AHEAD
        self._horizon = float(np.partition(self._until, _AHEAD)[_AHEAD]) if is_many else np.inf
        near = np.flatnonzero((self._until <= self._horizon) & (self._until < np.inf))
        self._soon = sorted(zip(self._until[near].tolist(), near.tolist(), strict=True))
