"""Composed devices are made of their sources and of nothing else."""

from types import MappingProxyType

import numpy as np
import pandas as pd
import pytest

from fedstale.errors import TraceError
from fedstale.traces import Availability, Series, TraceSet
from fedstale.traces.trace_set import numbered

DAY_S = 86_400.0


def phones(n: int = 3, days: int = 2) -> TraceSet:
    windows = [[(3600.0 * (i + 1), 3600.0 * (i + 2))] for i in range(n)]
    return TraceSet(
        device_ids=numbered("phone", n),
        availability=Availability.of(windows, days * DAY_S),
        epoch="2018-03-06T00:00:00",
        repairs=MappingProxyType({"cut": 2}),
    )


def models() -> TraceSet:
    return TraceSet(
        device_ids=pd.Index(["slow", "fast"]),
        compute=Series.constant([1.0, 10.0]),
        compute_unit="a second of the slow model",
    )


def hosts() -> TraceSet:
    return TraceSet(
        device_ids=numbered("host", 2),
        compute=Series.regular([[0.5, 1.0], [0.25, 0.75]], step_s=300.0),
    )


def links(*, uplink: bool = True) -> TraceSet:
    down = Series.regular([np.arange(1.0, 61.0), np.full(60, 100.0)], step_s=1.0)
    up = Series.regular([np.arange(1.0, 61.0) * 2, np.full(60, 7.0)], step_s=1.0)
    return TraceSet(device_ids=numbered("link", 2), downlink=down, uplink=up if uplink else None)


def made(n: int = 8, seed: int = 0, **changes: object) -> TraceSet:
    parts = {"availability": phones(), "compute": models(), "background": hosts()}
    return TraceSet.compose(**parts | {"network": links()} | changes, n=n, seed=seed)  # type: ignore[arg-type]


def test_same_seed_same_devices_and_another_seed_others():
    t = np.linspace(0, 5000, 200)
    rates = [
        [made(seed=seed).downlink.value_at(np.full(200, d), t) for d in range(8)]
        for seed in (1, 1, 2)
    ]
    np.testing.assert_array_equal(rates[0], rates[1])
    assert not np.array_equal(rates[0], rates[2])


def test_every_phone_is_used_once_before_one_is_used_twice():
    ids = list(made(n=7).device_ids)
    assert sorted(ids[:3]) == ["phone-0", "phone-1", "phone-2"]
    assert sorted(ids[3:6]) == ["phone-0#2", "phone-1#2", "phone-2#2"]
    assert ids[6].endswith("#3")


def test_hours_of_the_day_stay_where_they_are():
    traces = made(n=60)
    for position, name in enumerate(traces.device_ids):
        start, end = traces.availability.window_at_or_after([position], [0.0])
        hour = int(name.split("#")[0][-1]) + 1
        assert start[0] % DAY_S == pytest.approx(hour * 3600.0)
        assert end[0] - start[0] == pytest.approx(3600.0)
    assert np.unique(traces.availability.shifts).tolist() == [0.0, DAY_S]


def test_weekdays_stay_where_they_are_in_records_of_several_weeks():
    # Online on the Tuesdays of six weeks, on each for longer than on the one before.
    tuesdays = [(1 + 7 * k) * DAY_S for k in range(6)]
    windows = [(day, day + (1 + k) * 600.0) for k, day in enumerate(tuesdays)]
    weeks = TraceSet(
        device_ids=numbered("desktop", 1),
        availability=Availability.of([windows], 42 * DAY_S, logs=(0.5 * DAY_S, 40 * DAY_S)),
    )
    traces = made(n=60, availability=weeks)
    assert len(np.unique(traces.availability.shifts)) == 6
    for device in range(60):
        start, _ = traces.availability.window_at_or_after([device], [DAY_S / 2])
        assert start[0] == DAY_S


def test_compute_is_a_models_speed_times_what_the_background_leaves():
    traces = made(n=40)
    t = np.linspace(0, 1200, 60)
    possible = {s * left for s in (1.0, 10.0) for left in (0.5, 1.0, 0.25, 0.75)}
    seen = {float(v) for d in range(40) for v in traces.compute.value_at(np.full(60, d), t)}
    assert seen == possible
    assert traces.compute_unit == "a second of the slow model"


def test_devices_on_one_link_are_at_different_places_of_it():
    down = made(n=40).downlink.value_at(np.arange(40), np.zeros(40))
    assert len(set(down[down != 100.0])) > 5


def test_a_given_share_makes_the_uplink_of_a_recorded_downlink():
    traces = made(network=links(uplink=False), uplink_share=0.25)
    t = np.arange(8.0)
    np.testing.assert_allclose(
        traces.uplink.value_at(np.arange(8), t), traces.downlink.value_at(np.arange(8), t) / 4
    )


def test_rows_stay_shared_whatever_the_number_of_devices():
    traces = made(n=100_000)
    assert traces.downlink.lengths.size == 2
    assert traces.nbytes / traces.n_devices < 120


def test_repairs_of_all_sources_are_kept_with_their_part():
    assert dict(made().repairs) == {"availability: cut": 2}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"availability": None}, "availability is missing"),
        ({"compute": None}, "compute is missing"),
        ({"network": None}, "network is missing"),
        ({"availability": models()}, "availability knows compute: expected a source of avail"),
        ({"network": models()}, "network knows compute: expected a source of downlink"),
        ({"background": phones()}, "background knows availability"),
        ({"network": links(uplink=False)}, "network knows no uplink: .* uplink_share"),
        ({"uplink_share": 0.5}, "expected none, since network knows the uplink"),
        ({"network": links(uplink=False), "uplink_share": 0.0}, "uplink_share = 0.0"),
        ({"compute": hosts()}, "compute changes with time"),
        ({"background": models()}, "expected the share of a processor"),
        ({"n": 0}, "n = 0: expected an integer >= 1"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_what_is_missing_or_wrong_is_named(changes, expected):
    with pytest.raises(TraceError, match=expected):
        made(**changes)


# Over a number of days nothing repeats.

MINUTES = 1440


def days_of_hosts() -> TraceSet:
    """Return one host of three days, one of two and one of one, each day at a level of its own."""
    ids = ["1/a", "2/a", "3/a", "1/b", "2/b", "1/c"]
    left = [np.full(MINUTES, level) for level in (0.1, 0.2, 0.3, 0.5, 0.6, 0.9)]
    return TraceSet(device_ids=pd.Index(ids), compute=Series.regular(left, step_s=60.0))


def test_a_load_is_all_days_of_one_processor_in_a_row():
    traces = made(
        n=40, compute=models().take([0]), background=days_of_hosts(), network=long_links(), days=2
    )
    noons = np.arange(6) * DAY_S
    seen = set()
    for device in range(40):
        levels = traces.compute.value_at(np.full(6, device), noons).round(3)
        period = 3 if levels.min() < 0.4 else 2
        assert len(set(levels[:period])) == period
        assert (levels[period:] == levels[: 6 - period]).all()
        seen |= set(levels)
    assert seen == {0.1, 0.2, 0.3, 0.5, 0.6}


def long_links() -> TraceSet:
    rng = np.random.default_rng(5)
    down = [np.repeat(rng.random(n), 60) for n in (30, 47, 61, 90)]
    return TraceSet(
        device_ids=numbered("link", 4),
        downlink=Series.regular(down, step_s=1.0),
        uplink=Series.irregular([([0.0, 5.0], [d[0], 2 * d[0]]) for d in down], [900.0] * 4),
    )


def test_a_link_is_whole_sessions_both_ways_and_repeats_only_after_the_days():
    source = long_links()
    traces = made(n=30, background=None, network=source, days=2)
    assert (traces.downlink.lengths >= 2 * DAY_S).all()
    assert (traces.downlink.lengths < 2 * DAY_S + 90 * 60).all()
    t = np.arange(30.0, DAY_S, 60.0)
    sessions = [source.downlink.segments(i)[1] for i in range(4)]
    firsts = {float(np.float32(s[0])): np.float32(s) for s in sessions}
    for row in range(3):
        rates = np.float32(traces.downlink.row_segments(row)[1])
        at = 0
        while at < rates.size:
            session = firsts[float(rates[at])]
            assert (rates[at : at + session.size] == session).all()
            at += session.size
    for device in range(5):
        here = np.full(t.size, device)
        now = traces.downlink.value_at(here, t)
        # By chance a few minutes are alike, never a day.
        assert (now == traces.downlink.value_at(here, t + DAY_S)).mean() < 0.2
        # The uplink of a session is twice its first rate, from its fifth second on.
        doubled = traces.uplink.value_at(here, t) / 2
        assert set(np.float32(doubled)) <= set(firsts) | {f / 2 for f in firsts}
        same = [now[k] == r for k, r in enumerate(np.float32(doubled))]
        assert np.mean(same) > 1 / 100


def test_both_directions_of_strung_sessions_begin_together():
    down = Series.regular([np.full(600, 1.0), np.full(900, 2.0)], step_s=1.0)
    # The uplink of the second was seen a little longer, that of the first a little shorter.
    up = Series.irregular([([0.0], [10.0]), ([0.0, 901.0], [20.0, 99.0])], [598.0, 903.0])
    source = TraceSet(device_ids=numbered("l", 2), downlink=down, uplink=up)
    traces = made(n=5, background=None, network=source, days=1)
    t = np.arange(0.5, 2 * DAY_S, 7.0)
    for device in range(5):
        here = np.full(t.size, device)
        rates = traces.downlink.value_at(here, t), traces.uplink.value_at(here, t)
        assert (rates[1] == 10 * rates[0]).all()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"days": 0}, "days = 0: expected an integer >= 1, or None"),
        ({"days": 1.5}, r"days = 1\.5"),
        ({"days": 4, "network": long_links()}, "background: no processor was recorded for 4 days"),
        ({"days": 2, "network": links().take([0])}, "network: one link of 60 s, which would"),
    ],
)
def test_days_that_no_recording_can_fill_are_named(changes, expected):
    with pytest.raises(TraceError, match=expected):
        made(**{"background": days_of_hosts()} | changes)


# Sources of the same devices.


def own_links(epoch: str | None = "2018-03-06T00:00:00") -> TraceSet:
    """Return links of phones 2, 1 and 7, each at one rate in each hour of a day."""
    hours = [100.0 * phone + np.arange(24.0) for phone in (2, 1, 7)]
    link = Series.regular(hours, step_s=3600.0)
    ids = pd.Index(["phone-2", "phone-1", "phone-7"])
    return TraceSet(device_ids=ids, downlink=link, uplink=link.scaled([0.5] * 3), epoch=epoch)


def test_devices_that_are_kept_together_have_their_own_link_at_their_own_hours():
    # Recorded on another day, and begun six hours earlier.
    earlier = own_links("2018-03-01T18:00:00")
    traces = made(n=6, network=earlier, keep_together=True)
    assert {name.split("#")[0] for name in traces.device_ids} == {"phone-1", "phone-2"}
    assert traces.repairs["availability: left out: device that another source does not know"] == 1
    for position, name in enumerate(traces.device_ids):
        phone = int(name.split("#")[0][-1])
        t = (np.arange(48) + 0.5) * 3600.0
        expected = 100.0 * phone + np.arange(6, 54) % 24
        here = np.full(48, position)
        np.testing.assert_array_equal(traces.downlink.value_at(here, t), expected)
        np.testing.assert_array_equal(traces.uplink.value_at(here, t), expected / 2)


def test_speeds_are_kept_together_and_other_sources_are_drawn():
    own = TraceSet(device_ids=numbered("phone", 3), compute=Series.constant([1.0, 2.0, 3.0]))
    traces = made(n=9, compute=own, background=None, keep_together=True)
    speed = traces.compute.value_at(np.arange(9), np.zeros(9))
    assert [int(name.split("#")[0][-1]) + 1 for name in traces.device_ids] == speed.tolist()
    assert not any("left out" in kind for kind in traces.repairs)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {},
            r"no device of availability, such as 'phone-0', is in all of compute \('slow'\)",
        ),
        ({"network": own_links(), "days": 2, "background": None}, "86400 s would repeat within 2"),
    ],
)
def test_devices_that_cannot_be_kept_together_are_named(changes, expected):
    with pytest.raises(TraceError, match=expected):
        made(**changes, keep_together=True)
