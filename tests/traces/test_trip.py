"""Trips against a walk from edge to edge of one device, in fractions, so without any rounding."""

from bisect import bisect_right
from dataclasses import dataclass, fields
from fractions import Fraction
from itertools import accumulate
from math import inf, isnan, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstale.errors import TraceError
from fedstale.traces import Availability, Job, Phase, Series, Status, TraceSet, TripOutcomes
from fedstale.traces.trace_set import numbered

# Records of a few seconds would be repeated a million times before a paused job is given up.
PATIENCE_S = 500.0
SPENT = ("download_s", "compute_s", "upload_s")
MOVED = ("downloaded_bytes", "work_done", "uploaded_bytes")


@dataclass(frozen=True)
class Steps:
    """One step function of time: a rate, or 1 while a device is online and else 0."""

    widths: list[float]
    values: list[float]
    repeat: bool = True
    shift: float = 0.0
    scale: float = 1.0
    until: float = inf

    @property
    def starts(self):
        return [0.0, *accumulate(self.widths)][:-1]

    @property
    def length(self):
        return sum(self.widths)

    def _row_time(self, t):
        x = t + Fraction(self.shift)
        return x % Fraction(self.length) if self.repeat else x

    def at(self, t):
        x = self._row_time(t)
        if t >= self.until or x >= self.length:
            return 0
        return Fraction(self.values[bisect_right(self.starts, x) - 1]) * Fraction(self.scale)

    def next_edge(self, t):
        """Return the next instant at which the value may change, inf if it never does."""
        x = self._row_time(t)
        if t >= self.until:
            return inf
        if x >= self.length or (self.repeat and len(set(self.values)) == 1):
            return inf if self.until == inf else Fraction(self.until)
        edges = [*self.starts, self.length]
        edge = t - x + Fraction(edges[bisect_right(edges, x)])
        return min(edge, self.until) if self.until == inf else min(edge, Fraction(self.until))


def first_online(online, t):
    while t != inf and not online.at(t):
        t = online.next_edge(t)
    return t


def walk(online, rates, *, sent, free, asked, ttl, pause):
    """Return every field of a trip's outcome, and the least amount by which an edge was decided."""
    out = dict.fromkeys(("started", "downloaded", "trained", "reported", "ended"), inf)
    out |= dict.fromkeys(SPENT + MOVED, 0)
    margin = inf
    ready, expires = max(sent, free), sent + ttl
    t = started = inf if ready == inf else first_online(online, Fraction(ready))
    if t >= expires:
        return out | {"status": Status.EXPIRED, "phase": Phase.WAITING, "ended": ready}, margin
    out["started"] = t
    for p, name in enumerate(("downloaded", "trained", "reported")):
        left = Fraction(asked[p])
        ending = {"phase": Phase(p + 1)}
        while left > 0:
            if not online.at(t):
                if pause and t - started >= PATIENCE_S:
                    return out | ending | {"status": Status.STALLED}, margin
                back = first_online(online, t)
                if not pause or back == inf:
                    return out | ending | {"status": Status.INTERRUPTED, "ended": t}, margin
                t = back
            rate, edge = rates[p].at(t), min(online.next_edge(t), rates[p].next_edge(t))
            if edge == inf and rate == 0:
                # A wait without end has no length; what it moved is a test of its own.
                unknown = {SPENT[p]: nan, MOVED[p]: nan}
                return out | ending | unknown | {"status": Status.STALLED}, margin
            margin = min(margin, abs(rate * (edge - t) - left)) if edge != inf else margin
            upto = min(edge, t + left / rate) if rate else edge
            out[SPENT[p]] += upto - t
            out[MOVED[p]] += rate * (upto - t)
            left -= rate * (upto - t)
            t = upto
        out[name] = t
    margin = min(margin, abs(expires - t))
    in_time = Status.REPORTED if t <= expires else Status.LATE
    return out | {"status": in_time, "phase": Phase.DONE, "ended": t}, margin


@dataclass(frozen=True)
class Case:
    """The same devices twice: as step functions for the walk, and as a trace set."""

    online: list[Steps]
    rates: list[list[Steps]]
    traces: TraceSet


WIDTHS = st.sampled_from([0.5, 1.0, 2.5, 7.0])


@st.composite
def availabilities(draw, n):
    repeat, rows = draw(st.sampled_from([True, True, False])), []
    for _ in range(n):
        widths = draw(st.lists(WIDTHS, min_size=1, max_size=7))
        first = draw(st.integers(0, 1))
        values = [(first + k) % 2 for k in range(len(widths))]
        rows.append(Steps(widths, values, repeat, shift=draw(st.sampled_from([0.0, 0.0, 1.5, 40.0]))))
    windows = [
        [(a, a + w) for a, w, v in zip(r.starts, r.widths, r.values, strict=True) if v]
        for r in rows
    ]
    built = Availability.of(
        [np.reshape(w, (-1, 2)) for w in windows], [r.length for r in rows], repeat=repeat
    )
    return rows, built.shifted([r.shift for r in rows])


@st.composite
def channels(draw, n, rates, scales):
    repeat, kind = draw(st.booleans()), draw(st.sampled_from(["regular", "irregular", "constant"]))
    step, rows = draw(WIDTHS), []
    for _ in range(n):
        # Rows longer than 16 segments span several blocks of a series.
        times = draw(st.sampled_from([1, 1, 5]))
        values = draw(st.lists(rates, min_size=1, max_size=8)) * times
        values, times = (values[:1], 1) if kind == "constant" else (values, times)
        widths = [step] * len(values)
        if kind == "irregular":
            widths = draw(st.lists(WIDTHS, min_size=len(values), max_size=len(values)))
        shift, scale = draw(st.sampled_from([0.0, 0.5, 31.0])), draw(scales)
        rows.append(Steps(widths, values, repeat or kind == "constant", shift, scale))
    if kind == "constant":
        built = Series.constant([r.values[0] for r in rows])
    elif kind == "regular":
        built = Series.regular([r.values for r in rows], step_s=step, repeat=repeat)
    else:
        pairs = [(r.starts, r.values) for r in rows]
        built = Series.irregular(pairs, [r.length for r in rows], repeat=repeat)
    return rows, built.shifted([r.shift for r in rows]).scaled([r.scale for r in rows])


@st.composite
def cases(draw, rates, scales):
    n = draw(st.integers(1, 3))
    online, availability = draw(availabilities(n))
    three = [draw(channels(n, rates, scales)) for _ in range(3)]
    traces = TraceSet(
        device_ids=numbered("d", n),
        availability=availability,
        downlink=three[0][1],
        compute=three[1][1],
        uplink=three[2][1],
    )
    start, length = draw(st.sampled_from([(0.0, inf), (3.5, inf), (30.0, 40.0)]))

    def cut(row):
        return Steps(row.widths, row.values, row.repeat, row.shift + start, row.scale, length)

    rows = [[cut(r) for r in channel] for channel, _ in three]
    return Case([cut(r) for r in online], rows, traces.between(start, start + length))


@st.composite
def requests(draw, amounts):
    return {
        "sent": draw(st.sampled_from([0.0, 0.5, 3.0, 11.0, 60.25])),
        "free": draw(st.sampled_from([0.0, 0.0, 0.0, 5.0, 11.0, 70.0, inf])),
        "asked": draw(st.tuples(amounts, amounts, amounts)),
        "ttl": draw(st.sampled_from([1.0, 8.0, 30.0, 400.0, inf])),
    }


def both(case, jobs, *, pause):
    """Yield for each job on each device (found, expected, margin of the walk)."""
    n = len(case.online)
    pairs = [(d, job) for job in jobs for d in range(n)]
    asked = np.array([j["asked"] for _, j in pairs])
    job = Job(
        download_bytes=asked[:, 0] / 8,
        work=asked[:, 1],
        upload_bytes=asked[:, 2] / 8,
        ttl_s=np.array([j["ttl"] for _, j in pairs]),
        on_interrupt="pause" if pause else "abort",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedstale.traces.trip._GIVE_UP_S", PATIENCE_S)
        sent, free = [j["sent"] for _, j in pairs], [j["free"] for _, j in pairs]
        out = case.traces.trips([d for d, _ in pairs], sent, job, free)
    for i, (d, request) in enumerate(pairs):
        rates = [channel[d] for channel in case.rates]
        expected, margin = walk(case.online[d], rates, pause=pause, **request)
        expected = {k: float(v) for k, v in expected.items()}
        for name in ("downloaded_bytes", "uploaded_bytes"):
            expected[name] /= 8
        expected = {k: v for k, v in expected.items() if not isnan(v)}
        yield {name: float(getattr(out, name)[i]) for name in expected}, expected, margin


@pytest.mark.parametrize("pause", [False, True])
@given(
    case=cases(st.sampled_from([0.0, 8.0, 16.0]), st.sampled_from([1.0, 1.0, 1.0, 0.5, 2.0, 0.0])),
    jobs=st.lists(requests(st.sampled_from([0.0, 4.0, 16.0, 80.0, 200.0])), min_size=1, max_size=3),
)
@settings(max_examples=100, deadline=None)
def test_a_trip_is_to_the_last_bit_what_a_walk_over_edges_finds(case, jobs, pause):
    # Powers of two only, so that even an end at the very edge of a window has no rounding.
    for found, expected, _ in both(case, jobs, pause=pause):
        assert found == expected


@pytest.mark.parametrize("pause", [False, True])
@given(
    case=cases(st.sampled_from([0.0, 8.0, 16.0, 5.5]), st.sampled_from([1.0, 0.3, 1.7])),
    jobs=st.lists(requests(st.sampled_from([0.0, 3.3, 17.0, 77.7])), min_size=1, max_size=3),
)
@settings(max_examples=80, deadline=None)
def test_a_trip_with_odd_rates_is_what_a_walk_over_edges_finds(case, jobs, pause):
    for found, expected, margin in both(case, jobs, pause=pause):
        # Closer to an edge than rounding, either side of it is right.
        if margin > 1e-6:
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
