"""Who is online is kept up as if everybody were looked up each time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstale.simulation import devices as presence
from fedstale.simulation.devices import OnlineSet
from fedstale.traces.availability import Availability

LENGTH = 100.0
EDGES = st.lists(st.integers(0, 50), min_size=0, max_size=8, unique=True).map(sorted)


@st.composite
def fleets(draw):
    rows = [
        [(2.0 * a, 2.0 * b) for a, b in zip(edges[::2], edges[1::2], strict=False)]
        for edges in draw(st.lists(EDGES, min_size=1, max_size=12))
    ]
    fleet = Availability.of(rows, LENGTH, repeat=draw(st.booleans()))
    shifts = draw(st.lists(st.integers(0, 99), min_size=len(rows), max_size=len(rows)))
    return fleet.shifted(np.array(shifts, dtype=float))


@pytest.mark.parametrize("ahead", [1, 3, 1 << 16])
@settings(max_examples=60, deadline=None)
@given(fleet=fleets(), steps=st.lists(st.floats(0.0, 60.0), min_size=1, max_size=25))
def test_it_is_what_looking_everybody_up_gives(ahead, fleet, steps):
    everyone = np.arange(fleet.n_devices)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(presence, "_AHEAD", ahead)
        kept, now = OnlineSet(fleet), 0.0
        for step in steps:
            now += round(step)
            kept.move(now)
            np.testing.assert_array_equal(kept.is_online(), fleet.is_available(everyone, now))
            assert kept.n_online == np.count_nonzero(kept.is_online())
            start, end = fleet.window_at_or_after(everyone, now)
            assert kept.next_change == np.where(start <= now, end, start).min()
