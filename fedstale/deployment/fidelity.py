"""How far a replay with real processes is from a simulation of the same app on the same trace.

Jobs are matched by device and by how many the device had had before. Errors are in seconds of the
trace and in shares of a round, which is the median time between two versions in the simulation.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

Array = npt.NDArray[np.float64]

_INSTANTS = ("sent_at", "downloaded_at", "reported_at", "delivered_at")


def compare(simulated: pd.DataFrame, real: pd.DataFrame) -> dict[str, Any]:
    """Return how two timelines differ.

    Args:
        simulated: events of the simulation.
        real: events of the replay.

    Returns:
        `jobs` of both and matched ones; `round_s`; for each instant the `median` and `p90` of the
        absolute error, in s and in rounds; the same for the `duration` from sending to arrival;
        `same_status`, `same_base_version`, `same_aggregated_version` and `same_staleness`, shares
        of the matched jobs; and `merge_order`, the share of pairs of merged jobs whose order is the
        same, not counting pairs that either side merged together.
    """
    one, other = _numbered(simulated).add_suffix("_sim"), _numbered(real).add_suffix("_real")
    both = one.join(other, how="inner")
    round_s = _round_s(simulated)
    found: dict[str, Any] = {
        "jobs": {"simulated": len(simulated), "real": len(real), "matched": len(both)},
        "round_s": round_s,
    }
    for name in _INSTANTS:
        found[name] = _error(both[f"{name}_sim"], both[f"{name}_real"], round_s)
    found["duration"] = _error(
        both.reported_at_sim - both.sent_at_sim, both.reported_at_real - both.sent_at_real, round_s
    )
    for name in ("status", "base_version", "aggregated_version", "staleness"):
        expected, seen = both[f"{name}_sim"], both[f"{name}_real"]
        same = (expected == seen) | (expected.isna() & seen.isna())
        found[f"same_{name}"] = float(same.mean())
    merged = both[(both.aggregated_version_sim >= 0) & (both.aggregated_version_real >= 0)]
    found["merge_order"] = order(
        merged.aggregated_version_sim.to_numpy(np.float64),
        merged.aggregated_version_real.to_numpy(np.float64),
    )
    return found


def order(one: Array, other: Array) -> float:
    """Return the share of pairs that two rankings put in the same order; ties do not count.

    Example:
        >>> order(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0])) == 2 / 3
        True
    """
    first, second = (np.sign(ranks[:, None] - ranks[None, :]) for ranks in (one, other))
    counted = (first != 0) & (second != 0)
    return float((first == second)[counted].mean()) if counted.any() else float("nan")


def _numbered(events: pd.DataFrame) -> pd.DataFrame:
    numbers = events.groupby("device_id").cumcount().rename("number")
    return events.assign(number=numbers).set_index(["device_id", "number"])


def _round_s(events: pd.DataFrame) -> float:
    merged = events[events.aggregated_version >= 0]
    instants = merged.groupby("aggregated_version").delivered_at.max().to_numpy(np.float64)
    return float(np.median(np.diff(instants))) if instants.size > 1 else float("nan")


def _error(one: pd.Series, other: pd.Series, round_s: float) -> dict[str, float]:
    known = np.isfinite(one) & np.isfinite(other)
    error = np.abs(one[known] - other[known]).to_numpy(np.float64)
    if not error.size:
        return {"n": 0}
    middle, high = np.quantile(error, [0.5, 0.9])
    return {
        "n": int(error.size),
        "median_s": float(middle),
        "p90_s": float(high),
        "median_rounds": float(middle / round_s),
        "p90_rounds": float(high / round_s),
    }
