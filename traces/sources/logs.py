"""Spans of phones' logs, estimated from their windows alone."""

from collections import Counter

import numpy as np

from fedstale.traces import Array, Availability, Index, Mask, stretches_of


def longest_log(
    owner: Index, starts: Array, ends: Array, n: int, *, gap_s: float
) -> tuple[Mask, Array, Array]:
    """Estimate the span in which each device was logged from its windows alone.

    A log reaches from a first window to a last one, without any time longer than a gap in which
    nothing was seen. Of several logs of a device, the one with the most time online counts.

    Args:
        owner: device of each window, 0 to n - 1; shape (windows,).
        starts: in s; shape (windows,).
        ends: in s, none before its start; shape (windows,).
        n: number of devices.
        gap_s: the longest time without a window within a log, in s.

    Returns:
        Which windows are of the logs, shape (windows,), and start and end of each log in s, of
        shape (n,); for a device without windows the end, -inf, precedes the start, 0.

    Example:
        >>> owner, starts, ends = np.zeros(3, dtype=int), np.array([0, 5, 99]), np.array([1, 9, 99])
        >>> longest_log(owner, starts.astype(float), ends.astype(float), 1, gap_s=10.0)
        (array([ True,  True, False]), array([0.]), array([9.]))
    """
    began, ended = np.zeros(n), np.full(n, -np.inf)
    kept = np.zeros(owner.size, dtype=bool)
    if owner.size == 0:
        return kept, began, ended
    log, of, first, last = stretches_of(owner, starts, ends, gap_s=gap_s)
    online = np.bincount(log, ends - starts)
    # The last of a device's logs in this order has the most time online, the earlier on a tie.
    best = np.lexsort((-first, online, of))
    chosen = best[np.append(np.diff(of[best]) > 0, True)]
    began[of[chosen]], ended[of[chosen]] = first[chosen], last[chosen]
    return np.isin(log, chosen), began, ended


def of_logs(
    owner: Index,
    starts: Array,
    ends: Array,
    began: Array,
    logs_s: Array,
    *,
    join_s: float,
) -> tuple[Availability, Counter[str]]:
    """Build the availability of devices from windows of logs, which become whole days.

    Args:
        owner: device of each window, 0 to devices - 1; shape (windows,).
        starts: in s since a midnight; shape (windows,).
        ends: in s; shape (windows,).
        began: start of each device's log in s; shape (devices,).
        logs_s: for how long each device was logged, in s, >= 0; shape (devices,).
        join_s: longest gap that is not a gap, in s, >= 0.

    Returns:
        The devices, and counts of repairs by kind; see `Availability.folded` and `repaired`.
    """
    # A log without length holds no window, but a record has a length.
    lengths = np.where(logs_s > 0, logs_s, 1.0)
    logged, counts = Availability.repaired(
        owner, starts - began[owner], ends - began[owner], lengths, join_s=join_s
    )
    return logged.folded(began, logs_s), counts
