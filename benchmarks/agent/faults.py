"""Known faults of agents, found by simple picks.

Reward on windows of recorded devices says little of other fleets: of one without any history yet,
or of one where half of the clients report chances that they never keep. Both are simulated.
"""

from typing import Any

import numpy as np

from fedstale.strategies.selection import Selector
from fedstale.strategies.types import Candidates

MOST_OVER_REPORTING = 0.2
"""Share of the last picks that over-reporting clients, which never finish, may get: they are half
of all, and each has to be tried some times."""

LEAST_CHANCE = 0.65
"""Mean chance to finish of a fifth of the clients, picked among those with 0.1 to 0.9: by chance
alone it is 0.5, of the best fifth 0.82."""
_DRAWS, _STEP_S, _STEPS, _PICKED = 50, 600.0, 60, 8
# Chances that honest clients report, and keep, and chances that over-reporting clients report.
_REPORTED = ((0.7, 1.0), (0.9, 0.97))


def faults(selector: Selector) -> list[str]:
    """List the faults of an agent, in sentences; none if it is sound.

    Args:
        selector: the agent; it must decide by its candidates alone, not by earlier calls.
    """
    found = []
    if min(_mean_chance(selector, n, known=k) for n in (10, 40) for k in (0, 1)) < LEAST_CHANCE:
        found.append("of clients alike in all else it does not prefer those most likely to finish")
    share = max(over_reporting_share(selector, *reported) for reported in _REPORTED)
    if share >= MOST_OVER_REPORTING:
        found.append(f"over-reporting clients, which never finish, get {share:.0%} of its picks")
    return found


def over_reporting_share(selector: Selector, honest: float, over_reported: float) -> float:
    """Return which share of the last picks goes to over-reporting clients.

    Of 40 clients that are alike otherwise, half report one chance to finish, and keep it; the
    others report another chance and never finish. Eight are picked every ten minutes, sixty times.

    Args:
        selector: picks the clients.
        honest: chance that the first half reports.
        over_reported: chance that the second half reports.
    """
    n = 40
    over_reports, rng = np.arange(n) < n // 2, np.random.default_rng(1)
    reported = np.where(over_reports, over_reported, honest)
    finished, failed, expected, picked_at = np.zeros((4, n))
    shares = []
    for step in range(_STEPS):
        now = _STEP_S * step
        candidates = Candidates.of(
            np.arange(n),
            forecast_p_finish=reported,
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
        chosen = np.array(selector.select(candidates, _PICKED, now, rng))
        shares.append(over_reports[chosen].mean())
        finishes = ~over_reports[chosen] & (rng.random(_PICKED) < honest)
        finished[chosen] += finishes
        failed[chosen] += ~finishes
        expected[chosen] += reported[chosen]
        picked_at[chosen] = now
    return float(np.mean(shares[_STEPS // 2 :]))


def _mean_chance(selector: Selector, n: int, *, known: int) -> float:
    """Return the mean chance to finish of the fifth of n clients that is picked, over draws."""
    history: dict[str, Any] = {
        "examples": np.full(n, 50.0),
        "loss": np.ones(n),
        "duration_s": np.full(n, 300.0),
        "picked_at": np.zeros(n),
        "expected_finishes": np.full(n, 3.0),
        "times_picked": np.full(n, 4),
        "times_finished": np.full(n, 3),
        "times_failed": np.ones(n, dtype=int),
    }
    chances = np.linspace(0.1, 0.9, n)
    candidates = Candidates.of(
        np.arange(n),
        forecast_p_finish=chances,
        forecast_at=np.zeros(n),
        **(history if known else {}),
    )
    rng = np.random.default_rng(0)
    picked = [selector.select(candidates, n // 5, _STEP_S, rng) for _ in range(_DRAWS)]
    return float(chances[np.array(picked)].mean())
