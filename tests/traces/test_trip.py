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
        steady = self.scale == 0 or (self.repeat and len(set(self.values)) == 1)
        if steady or x >= self.length:
            return inf if self.until == inf else Fraction(self.until)
        edges = [*self.starts, self.length]
        edge = t - x + Fraction(edges[bisect_right(edges, x)])
        return edge if self.until == inf else min(edge, Fraction(self.until))


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
        rows.append(
            Steps(widths, values, repeat, shift=draw(st.sampled_from([0.0, 0.0, 1.5, 40.0])))
        )
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
@settings(max_examples=40, deadline=None)
def test_a_trip_is_to_the_last_bit_what_a_walk_over_edges_finds(case, jobs, pause):
    # Powers of two only, so that even an end at the very edge of a window has no rounding.
    for found, expected, _ in both(case, jobs, pause=pause):
        assert found == expected


@pytest.mark.parametrize("pause", [False, True])
@given(
    case=cases(st.sampled_from([0.0, 8.0, 16.0, 5.5]), st.sampled_from([1.0, 0.3, 1.7])),
    jobs=st.lists(requests(st.sampled_from([0.0, 3.3, 17.0, 77.7])), min_size=1, max_size=3),
)
@settings(max_examples=30, deadline=None)
def test_a_trip_with_odd_rates_is_what_a_walk_over_edges_finds(case, jobs, pause):
    for found, expected, margin in both(case, jobs, pause=pause):
        # Closer to an edge than rounding, either side of it is right.
        if margin > 1e-6:
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


def plain(windows=((0.0, 10.0),), *, length=24.0, rates=(8.0, 8.0, 8.0), repeat=True):
    """Return one device with three constant rates, so that a byte takes one second."""
    down, compute, up = (Series.constant([r]) for r in rates)
    return TraceSet(
        device_ids=numbered("d", 1),
        availability=Availability.of([np.reshape(windows, (-1, 2))], length, repeat=repeat),
        compute=compute,
        downlink=down,
        uplink=up,
    )


def crowd(n=300):
    """Return devices that come and go, with links and processors that change."""
    rng = np.random.default_rng(5)
    edges = np.sort(rng.choice(np.arange(1, 960), (20, 8), replace=False), axis=1) / 4.0
    rows, which = rng.choice([0.0, 3.0, 8.0, 40.0], (3, 7, 50)), rng.integers(0, 7, n)
    down, compute, up = (
        Series.regular(r, step_s=7.0).take(which).shifted(rng.uniform(0, 99, n)) for r in rows
    )
    availability = Availability.of(edges.reshape(20, 4, 2), 240.0).take(rng.integers(0, 20, n))
    return TraceSet(
        device_ids=numbered("d", n),
        availability=availability,
        compute=compute,
        downlink=down,
        uplink=up,
    )


JOB = {"work": 300.0, "download_bytes": 40.0, "upload_bytes": 25.0}


def test_many_jobs_in_chunks_are_the_same_as_few_at_a_time():
    traces, rng = crowd(), np.random.default_rng(0)
    devices, sent = rng.integers(0, 300, 20_000), rng.uniform(0, 1000, 20_000)
    sizes = {name: rng.uniform(0, 2 * size, 20_000) for name, size in JOB.items()}
    whole = traces.trips(devices, sent, Job(**sizes))
    for few in (slice(0, 50), slice(8150, 8250), slice(19_990, None)):
        some = Job(**{name: size[few] for name, size in sizes.items()})
        part = traces.trips(devices[few], sent[few], some)
        for f in fields(TripOutcomes):
            np.testing.assert_array_equal(getattr(whole, f.name)[few], getattr(part, f.name))


def test_no_jobs_have_no_outcomes():
    out = plain().trips([], 0.0, Job(**JOB))
    assert all(getattr(out, f.name).size == 0 for f in fields(TripOutcomes))


def phased(windows, phases, *, length=1e6, repeat=False, **options):
    """Return what devices do in windows of theirs with jobs of three phases, in s."""
    n = len(windows)
    traces = TraceSet(
        device_ids=numbered("d", n),
        availability=Availability.of(windows, length, repeat=repeat),
        compute=Series.constant(np.ones(n)),
        downlink=Series.constant(np.full(n, 8.0)),
        uplink=Series.constant(np.full(n, 8.0)),
    )
    down, work, up = np.asarray(phases, np.float64)
    mode = options.pop("on_interrupt", "abort")
    ttl = options.pop("ttl_s", np.inf)
    job = Job(download_bytes=down, work=work, upload_bytes=up, ttl_s=ttl, on_interrupt=mode)
    return traces.trips(np.arange(n), options.pop("sent_at", 0.0), job)


@pytest.mark.parametrize("on_interrupt", ["abort", "pause"])
def test_what_fits_exactly_in_decimals_fits(on_interrupt):
    n = np.arange(1, 200)
    windows, phases = [[(0.0, 3 * k / 10)] for k in n.tolist()], np.tile(n / 10, (3, 1))
    done = phased(windows, phases, on_interrupt=on_interrupt)
    assert (done.status == Status.REPORTED).all()
    np.testing.assert_array_less(done.reported, np.nextafter(3 * n / 10, inf))
    assert (done.ended == done.reported).all()
    # So does a time to live, and the end of a record.
    online = [[(0.0, 900.0)]] * n.size
    assert (phased(online, phases, ttl_s=3 * n / 10).status == Status.REPORTED).all()
    assert (phased(online, phases, ttl_s=3 * n / 10 * (1 - 1e-9)).status == Status.LATE).all()


@pytest.mark.parametrize("scale", [10, 100, 1000])
@pytest.mark.parametrize("repeat", [False, True])
def test_random_decimals_are_done_where_fractions_are(scale, repeat):
    rng = np.random.default_rng(scale)
    n, length = 400, 5_000
    parts, begins = rng.integers(1, 500, (3, n)), rng.integers(0, 3_000, n)
    cycles = rng.integers(0, 6, n) if repeat else np.zeros(n, np.int64)
    # One tick less than it takes, as much, or one more.
    spare = rng.integers(-1, 2, n)
    ends = begins + parts.sum(axis=0) + spare
    windows = [
        [(float(Fraction(a, scale)), float(Fraction(b, scale)))]
        for a, b in zip(begins.tolist(), ends.tolist(), strict=True)
    ]
    sent_at = [float(Fraction(k, scale)) for k in (begins + cycles * length).tolist()]
    done = phased(windows, parts / scale, length=length / scale, repeat=repeat, sent_at=sent_at)
    expected = np.where(spare < 0, Status.INTERRUPTED, Status.REPORTED)
    assert done.status.tolist() == expected.tolist()
    longer = np.array(parts, np.float64) / scale
    longer[0] += longer.sum(axis=0) * 1e-9
    lost = phased(windows, longer, length=length / scale, repeat=repeat, sent_at=sent_at)
    assert (lost.status[spare <= 0] == Status.INTERRUPTED).all()


def test_a_rate_that_changes_at_decimals_fits_exactly_too():
    rng = np.random.default_rng(3)
    n = 300
    halves = rng.choice([1, 2, 4], (n, 300))
    first, last = rng.integers(0, 100, n), rng.integers(101, 300, n)
    work = [
        float(Fraction(int(h[a:b].sum()), 20)) for h, a, b in zip(halves, first, last, strict=True)
    ]
    traces = TraceSet(
        device_ids=numbered("d", n),
        availability=Availability.of(
            [[(a / 10, b / 10)] for a, b in zip(first, last, strict=True)], 30.0
        ),
        compute=Series.regular(halves / 2, step_s=0.1),
        downlink=Series.constant(np.full(n, 8.0)),
        uplink=Series.constant(np.full(n, 8.0)),
    )
    job = Job(download_bytes=0.0, work=work, upload_bytes=0.0)
    done = traces.trips(np.arange(n), 0.0, job)
    assert (done.status == Status.REPORTED).all()
    more = Job(download_bytes=0.0, work=np.multiply(work, 1 + 1e-9), upload_bytes=0.0)
    assert (traces.trips(np.arange(n), 0.0, more).status == Status.INTERRUPTED).all()


def test_who_is_asked_at_the_very_end_of_a_window_in_decimals_waits_for_the_next():
    n = np.arange(1, 200)
    # 3 * 0.1 is not 0.3, and a window of the difference would lose the job.
    windows = [[(0.0, 3 * (k * 0.1)), (100.0, 900.0)] for k in n.tolist()]
    done = phased(windows, np.full((3, n.size), 0.1), sent_at=3 * n / 10)
    assert (done.started == 100.0).all()
    assert (done.status == Status.REPORTED).all()


def test_a_paused_job_whose_windows_never_meet_its_rate_is_given_up():
    day = 86_400.0
    traces = plain(((0.0, day / 2),), length=day)
    at_night = Series.regular([[0.0, 5.0]], step_s=day / 2)
    stuck = TraceSet(
        device_ids=traces.device_ids,
        availability=traces.availability,
        downlink=traces.downlink,
        compute=at_night,
        uplink=traces.uplink,
    )
    out = stuck.trips([0], 0.0, Job(**JOB, on_interrupt="pause"))
    assert out.status.tolist() == [Status.STALLED]
    assert out.ended.tolist() == [inf]
    assert out.downloaded.tolist() == [40.0]
    assert out.reason(0) == "can never finish training: its rate stays zero"


def test_a_stalled_job_keeps_what_it_moved_before_the_rate_ended():
    link = Series.regular([[8.0]], step_s=5.0, repeat=False)
    never = Series.constant([0.0])
    traces = TraceSet(
        device_ids=numbered("d", 1),
        availability=Availability.always(1),
        downlink=link,
        compute=never,
        uplink=never,
    )
    out = traces.trips([0], 0.0, Job(work=1, download_bytes=9, upload_bytes=1))
    assert out.status.tolist() == [Status.STALLED]
    assert out.downloaded_bytes.tolist() == [5.0]


def test_ideal_devices_take_no_time_to_the_bit_and_move_every_byte():
    job = Job(work=1e12, download_bytes=1e12, upload_bytes=[1.0, 1e12, 0.0])
    sent_at = [0.0, 0.001, 12345.678]
    out = TraceSet.ideal(3).trips([0, 1, 2], sent_at, job)
    for instants in (out.started, out.downloaded, out.trained, out.reported, out.ended):
        assert instants.tolist() == sent_at
    for durations in (out.download_s, out.compute_s, out.upload_s):
        assert durations.tolist() == [0.0, 0.0, 0.0]
    assert out.uploaded_bytes.tolist() == [1.0, 1e12, 0.0]
    assert out.work_done.tolist() == [1e12] * 3


def test_each_ending_has_its_words():
    traces = plain(rates=(8.0, 8.0, 0.0))
    job = Job(work=[8, 800, 8, 8], download_bytes=[1, 1, 20, 1], upload_bytes=1, ttl_s=[9, 9, 9, 3])
    out = traces.trips([0, 0, 0, 0], [0.0, 0.0, 0.0, 11.0], job)
    assert [out.reason(i) for i in range(4)] == [
        "went offline while uploading",
        "went offline while training",
        "went offline while downloading",
        "not online before the message expired",
    ]
    out = plain().trips([0, 0], 0.0, Job(work=8, download_bytes=1, upload_bytes=1, ttl_s=[2, 3]))
    assert [out.reason(i) for i in range(2)] == [
        "reported after the message had expired",
        "reported",
    ]


NO_AMOUNT = [np.nan, -1.0, np.inf]


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        *[
            ({n: x}, rf"job\.{n} = .*: expected finite numbers >= 0")
            for n in JOB
            for x in NO_AMOUNT
        ],
        *[({"ttl_s": x}, r"job\.ttl_s = .*: expected seconds > 0") for x in (0.0, -1.0, np.nan)],
        ({"on_interrupt": "resume"}, "'resume': expected 'abort' or 'pause'"),
        *[({"sent_at": x}, "sent_at") for x in NO_AMOUNT],
        ({"free_at": np.nan}, "free_at"),
        *[({"device": n}, f"device {n}: expected a position from 0 to 0") for n in (-1, 1)],
    ],
)
def test_what_cannot_be_asked_of_a_device_is_named(wrong, expected):
    device, sent_at, free_at = (wrong.pop(name, 0) for name in ("device", "sent_at", "free_at"))
    with pytest.raises(TraceError, match=expected):
        plain().trips([device], sent_at, Job(**(JOB | wrong)), free_at)


def test_traces_without_a_channel_are_rejected_by_its_name():
    traces = TraceSet(device_ids=numbered("d", 1), availability=Availability.always(1))
    with pytest.raises(TraceError, match="know availability but not compute, downlink, uplink"):
        traces.trips([0], 0.0, Job(**JOB))
