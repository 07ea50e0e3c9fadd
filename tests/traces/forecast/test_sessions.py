"""What devices count of their own runs, against a loop over the seconds of their histories."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstale.traces import Availability
from fedstale.traces.forecast.sessions import (
    CHANGES_S,
    DAY_DECAY,
    DAYS,
    HORIZONS_S,
    RECENT_S,
    RUNS,
    RUNS_COUNTED,
    WEEK_DECAY,
    SessionHistory,
)

DAY, HOUR = 86_400, 3600
STEP = 300
"""Windows begin and end at whole steps, so a loop over steps is exact."""


def random_windows(rng, length_s):
    """Return windows at whole steps, some of them through an end of the record."""
    edges = np.unique(rng.integers(0, length_s // STEP + 1, 2 * int(rng.integers(0, 20)))) * STEP
    return edges[: edges.size // 2 * 2].reshape(-1, 2).astype(float)


def states(availability, device, until_s):
    """Return whether a device is online in each step, by walking over its windows."""
    windows, length = availability.windows(device)
    t = np.arange(0, until_s, STEP) + availability.shifts[device]
    x = np.mod(t, length) if availability.repeat else t
    inside = (windows[:, 0] <= x[:, None]) & (x[:, None] < windows[:, 1])
    return inside.any(axis=1) & (np.arange(0, until_s, STEP) < availability.until)


def by_walking(online, now, begin):
    """Return what `SessionHistory.at` returns of one device, from its states by step."""
    seen = online[begin // STEP : now // STEP]
    current = online[now // STEP]
    # Runs of the history, the last one open; what the log begins with has no known length.
    turns = np.flatnonzero(np.diff(np.append(seen, current))) + 1
    age = now - begin - (turns[-1] * STEP if turns.size else 0)
    lengths = np.diff(turns)[::-1] * STEP
    alike = lengths[1::2][:RUNS_COUNTED]
    longer = np.array([[(alike > age + h).sum(), (alike > age).sum()] for h in HORIZONS_S])
    lasted, same, week = np.zeros((3, HORIZONS_S.size, 2))
    yesterday, last_week = np.full((2, HORIZONS_S.size), np.nan)
    for k in range(1, DAYS + 1):
        then = now - k * DAY
        for i, horizon in enumerate(HORIZONS_S):
            if then >= begin and online[then // STEP] == current and then + horizon <= now:
                stretch = online[then // STEP : int(then + horizon) // STEP + 1]
                lasted[i] += DAY_DECAY ** (k - 1) * np.array([np.all(stretch == current), 1.0])
            middle = then + max(horizon, 1800.0)
            low, high = max(middle - 1800.0, begin), min(middle + 1800.0, now)
            if high <= low:
                continue
            part = online[int(low) // STEP : int(high) // STEP]
            pair = np.array([part.sum() * STEP, high - low]) / HOUR
            same[i] += DAY_DECAY ** (k - 1) * pair
            if k % 7 == 0:
                week[i] += WEEK_DECAY ** (k // 7 - 1) * pair
            if k == 1:
                yesterday[i] = pair[0] / pair[1]
            if k == 7:
                last_week[i] = pair[0] / pair[1]
    recent = [
        seen[-int(min(s, now - begin)) // STEP :].mean() if seen.size else np.nan for s in RECENT_S
    ]
    changes = [(now - (begin + turns * STEP) < s).sum() for s in CHANGES_S]
    return {
        "age_s": age,
        "began": turns.size > 0,
        "longer": longer,
        "lasted": lasted,
        "same_time": same,
        "same_week_time": week,
        "yesterday": yesterday,
        "last_week": last_week,
        "online_share": recent,
        "changes": changes,
        "lengths_s": np.concatenate([lengths, np.full(RUNS, np.nan)])[:RUNS],
    }


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_counts_are_those_of_a_walk_over_the_history(seed, repeat):
    rng = np.random.default_rng(seed)
    length = int(rng.choice([1, 3, 9])) * DAY
    until = 31 * DAY if repeat else length
    rows = [random_windows(rng, length) for _ in range(2)]
    shift = STEP * rng.integers(0, 50, 2).astype(float)
    phones = Availability.of(rows, float(length), repeat=repeat).shifted(shift)
    stops = STEP * int(rng.integers(1, until // STEP))
    phones = replace(phones, until=float(stops if rng.random() < 0.3 else np.inf))
    now = STEP * rng.integers(0, until // STEP, 4)
    begin = STEP * (now * rng.random(4) // STEP).astype(np.int64)
    devices = rng.integers(0, 2, 4)
    own = SessionHistory(phones).at(devices, now.astype(float), begin.astype(float))
    for i, device in enumerate(devices):
        # The row of a shifted device that does not repeat ends within the span.
        online = states(phones, device, until + DAY + STEP)
        for name, expected in by_walking(online, int(now[i]), int(begin[i])).items():
            np.testing.assert_allclose(
                getattr(own, name)[i], expected, atol=1e-6, err_msg=name, equal_nan=True
            )


def test_a_session_through_the_end_of_a_record_is_one_run():
    night = Availability.of([[(0.0, 2.0 * HOUR), (22.0 * HOUR, 24.0 * HOUR)]], float(DAY))
    own = SessionHistory(night).at(np.array([0]), np.array([3.0 * DAY + 5 * HOUR]), np.zeros(1))
    np.testing.assert_allclose(own.lengths_s[0, :3], [4.0 * HOUR, 20.0 * HOUR, 4.0 * HOUR])
