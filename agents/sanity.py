"""Two small trials that an agent must pass: it can do well in training and fail them.

Reward on windows of recorded devices says little of fleets that are otherwise: where nobody has
been asked yet, or where half of the devices claim what they never do. Here both are acted out.
"""

from typing import Any

import numpy as np

from fedstale.strategies.selection import Selector
from fedstale.strategies.server.clients import Candidates

MOST_LIARS = 0.1
"""Share of the picks that devices may get in the end which never finish what they claim to."""

_STEP_S, _STEPS, _PICKED = 600.0, 60, 8
_SIZES = (10, 40)
# What honest devices claim, and mean, and what the others claim.
_CLAIMS = ((0.7, 1.0), (0.9, 0.97))


def faults(selector: Selector) -> list[str]:
    """Return what is wrong with an agent, in sentences; nothing if it is sound.

    Args:
        selector: the agent; it must decide by its candidates alone, not by earlier calls.
    """
    found = []
    if not all(_asks_the_likely(selector, n, is_known=known) for n in _SIZES for known in (0, 1)):
        found.append("of devices alike in all else it does not ask those likeliest to finish")
    liars = max(share_of_liars(selector, *claims) for claims in _CLAIMS)
    if liars >= MOST_LIARS:
        found.append(f"devices that never finish what they claim get {liars:.0%} of its picks")
    return found


def share_of_liars(selector: Selector, honest: float, lying: float) -> float:
    """Return which part of the last picks goes to devices that never finish.

    Half of 40 devices that are alike otherwise claim one chance to finish and mean it, the others
    claim another and never finish; eight are asked every ten minutes, sixty times.

    Args:
        selector: decides who is asked.
        honest: chance that the first half claims.
        lying: chance that the second half claims.
    """
    n = 40
    is_lying, rng = np.arange(n) < n // 2, np.random.default_rng(1)
    claimed = np.where(is_lying, lying, honest)
    finished, failed, expected, picked_at = np.zeros((4, n))
    shares = []
    for step in range(_STEPS):
        now = _STEP_S * step
        nodes = Candidates.of(
            np.arange(n),
            forecast_p_finish=claimed,
            forecast_at=np.full(n, now),
            examples=np.full(n, 50.0),
            loss=np.ones(n),
            duration_s=np.where(finished > 0, 300.0, np.nan),
            picked_at=np.where(finished + failed > 0, picked_at, np.nan),
            expected_finishes=expected,
            times_picked=(finished + failed).astype(int),
            times_finished=finished.astype(int),
            times_failed=failed.astype(int),
        )
        chosen = np.array(selector.select(nodes, _PICKED, now, rng))
        shares.append(is_lying[chosen].mean())
        ends_well = ~is_lying[chosen] & (rng.random(_PICKED) < honest)
        finished[chosen] += ends_well
        failed[chosen] += ~ends_well
        expected[chosen] += claimed[chosen]
        picked_at[chosen] = now
    return float(np.mean(shares[_STEPS // 2 :]))


def _asks_the_likely(selector: Selector, n: int, *, is_known: int) -> bool:
    """Return whether the fifth that is picked is the fifth with the highest claims."""
    known: dict[str, Any] = {
        "examples": np.full(n, 50.0),
        "loss": np.ones(n),
        "duration_s": np.full(n, 300.0),
        "picked_at": np.zeros(n),
        "expected_finishes": np.full(n, 3.0),
        "times_picked": np.full(n, 4),
        "times_finished": np.full(n, 3),
        "times_failed": np.ones(n, dtype=int),
    }
    nodes = Candidates.of(
        np.arange(n),
        forecast_p_finish=np.linspace(0.1, 0.9, n),
        forecast_at=np.zeros(n),
        **(known if is_known else {}),
    )
    chosen = selector.select(nodes, n // 5, _STEP_S, np.random.default_rng(0))
    return min(chosen) == n - n // 5
