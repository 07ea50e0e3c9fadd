"""How unevenly devices are online and fast: Gini coefficients, and measures of two papers.

FLHetBench plays rounds with 20 of the devices that are ready (metric.py at 633c071, of which all
constants are). DevMC knows links alone, StatMC alone when devices are ready, InterMC both. Compute
counts in none, and a job waits for its device to come back. FLASH asks for the top 30 % of devices.

Reference:
    Zhang et al. FLHetBench: Benchmarking Device and State Heterogeneity in Federated Learning. CVPR
    2024. Yang et al. FLASH: Heterogeneity-Aware Federated Learning at Scale. IEEE TMC 2022.
"""

from collections.abc import Sequence

import numpy as np

from fedstale.traces import Array, Availability, Series, TraceSet

PER_ROUND, PAUSE_S, ROUNDS, JOBS = 20, 20.0, 3000, 10_000
MODEL_BYTES = 343_200_776  # ViT-B/16 in float32


def unevenness(
    traces: TraceSet, *, model_bytes: int = MODEL_BYTES, deadline_s: int = 120, seed: int = 42
) -> dict[str, float]:
    """Measure how uneven devices are, in what is known of them; their logs repeat, each by itself.

    Args:
        traces: of devices; the downlink serves both ways where no uplink is known.
        model_bytes: what is sent each way.
        deadline_s: end of a round of -R in s; StatMC-R is the mean over jobs of 10, 20, ... s.
        seed: of all draws.

    Returns:
        Values by name. -R: log of the jobs in time, a device's share of all draws at most, over
        that of all draws. -T, whose rounds end without their slowest fifth: duration over that of
        the pauses between rounds alone; inf if no device ever comes.
    """
    found, n, on = {}, traces.n_devices, None
    if traces.availability is not None:
        begin, end, known_s = logs_of(traces.availability)
        each = windows_between(traces.availability, begin, end)
        share = np.array([np.diff(windows).sum() for windows in each])
        share = share[known_s > 0] / known_s[known_s > 0]
        found = {"Gini of time online": gini(share), "top 30 % of time online": top_share(share)}
        rows, length = [], np.where(end > begin, end - begin, 1.0)
        for windows, first, last in zip(each, begin, length, strict=True):
            at = np.append(0.0, windows.ravel() - first)
            kept = np.diff(at, append=last) > 0
            rows.append((at[kept], np.arange(at.size)[kept] % 2.0))
        on = Series.irregular(rows, length).shifted(-begin)
    if traces.compute is not None and not traces.compute.is_instant:
        found["Gini of speeds"] = gini(mean_rates(traces.compute))
    links = [link for link in (traces.downlink, traces.uplink or traces.downlink) if link]
    every, fair = np.arange(0.0, 250.0, 10.0), ROUNDS * min(PER_ROUND, n) / n
    waits = {deadline_s: every[(every > 0) & (every <= deadline_s)], np.inf: every}
    for name, when, over in (("DevMC", None, links), ("StatMC", on, []), ("InterMC", on, links)):
        if (name == "DevMC") == (when is not None) or (name == "StatMC") == bool(over):
            continue
        jobs, ends = (
            _played(when, over, every[:1] if over else costs_s, until, (model_bytes, seed))[k]
            for k, (until, costs_s) in enumerate(waits.items())
        )
        scores = np.log1p(np.minimum(jobs, fair).sum(axis=1)) / np.log1p(fair * n)
        found[f"{name}-R"] = float(scores.mean())
        found[f"{name}-T"] = float(ends.mean()) / (JOBS * PAUSE_S / PER_ROUND)
        found["top 30 % of jobs in time"] = top_share(jobs.sum(axis=0))
    return found


def gini(x: Array) -> float:
    """Return the Gini coefficient of numbers >= 0, which is 0 if all are equal; NaN of nothing.

    Example:
        >>> gini(np.array([0.0, 1.0, 3.0]))
        0.5
    """
    at = 2.0 * np.arange(1, x.size + 1) - x.size - 1
    return float((at * np.sort(x)).sum() / (x.size * x.sum())) if x.sum() > 0 else np.nan


def top_share(x: Array) -> float:
    """Return which share of a sum the top 30 % have, linear between two; NaN of nothing."""
    sums = np.append(0.0, np.cumsum(np.sort(x)[::-1]))
    share = np.interp(0.3 * x.size, np.arange(x.size + 1), sums)
    return float(share / sums[-1]) if sums[-1] > 0 else np.nan


def mean_rates(series: Series) -> Array:
    """Return the mean rate of each device over its record; shape (devices,)."""
    return (series.row_totals / series.lengths)[series.rows] * series.scales


def logs_of(online: Availability) -> tuple[Array, Array, Array]:
    """Return when each device's log begins and ends, and how much of it has no gap; in s.

    What is no recording counts as logged for one record.
    """
    length, devices = online.record_s(), np.arange(online.n_devices)
    since = online.log_starts[online.rows] - online.shifts
    if online.repeat:
        since = np.mod(since, length)
        since = np.where(since < online.until, since, since - length)
    begin, end = np.maximum(since, 0.0), since + np.minimum(online.logs_s[online.rows], length)
    end = np.maximum(np.minimum(end, online.until), begin)
    who, low, high = online.stretches(devices)
    known = np.minimum(since[who] + high, end[who]) - np.maximum(since[who] + low, begin[who])
    return begin, end, np.bincount(who, np.maximum(known, 0.0), devices.size).astype(np.float64)


def windows_between(online: Availability, begin: Array, end: Array) -> list[Array]:
    """Return each device's windows, [start, end) in s, cut to between two instants of its own."""
    owner, starts, ends = online.windows_before(np.arange(begin.size), float(end.max()))
    windows = np.stack([np.maximum(starts, begin[owner]), np.minimum(ends, end[owner])], axis=1)
    kept = windows[:, 0] < windows[:, 1]
    return np.split(windows[kept], np.searchsorted(owner[kept], np.arange(1, begin.size)))


def _played(
    on: Series | None,
    links: Sequence[Series],
    costs_s: Array,
    deadline_s: float,
    of: tuple[int, int],
) -> tuple[Array, Array]:
    """Play rounds for several costs of a job at once, each on a fleet of its own.

    Transfers begin at instants of a link's record by chance. Returns the jobs in time, shape
    (costs, devices), and the ends in s, shape (costs,).
    """
    n, m = (on or links[0]).n_devices, costs_s.size
    whole, (model_bytes, seed) = deadline_s == np.inf, of
    fleets, on = np.arange(m * n).reshape(m, n), on and on.take(np.tile(np.arange(n), m))
    draws = [np.random.default_rng(seed) for _ in costs_s]
    jobs, t, done = np.zeros(m * n), np.zeros(m), np.zeros(m)
    while (live := np.flatnonzero((done < (JOBS if whole else ROUNDS)) & (t < np.inf))).size:
        t[live] += PAUSE_S
        ready = fleets[live].ravel()
        ready = ready if on is None else ready[on.value_at(ready, np.repeat(t[live], n)) > 0]
        asked = np.concatenate(
            [draws[k].permutation(ready[ready // n == k])[:PER_ROUND] for k in live]
        )
        took = costs_s[asked // n]
        for link in links:
            at = draws[0].random(asked.size) * link.record_s()[asked % n]
            took += link.time_to_accumulate(asked % n, 8.0 * model_bytes, at)
        took = took if on is None else on.time_to_accumulate(asked, took, t[asked // n])
        jobs[asked] += took <= deadline_s
        for k in live:
            ends = took[asked // n == k]
            done[k] += ends.size if whole else 1
            if ends.size:
                t[k] += np.quantile(ends, 0.8) if whole else min(ends.max(), deadline_s)
            elif on and not on.row_totals.any():
                t[k] = np.inf
    return jobs.reshape(m, n), t
