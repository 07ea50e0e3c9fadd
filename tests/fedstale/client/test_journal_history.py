"""A device that forecasts from its recorder's journal, on clocks turned by hand."""

import logging
import shutil
import sqlite3
import time
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from bench_device import Bench, message, trained
from flwr.app import ConfigRecord, Context, RecordDict
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from quick_files import quick_folder

from fedstale.client import FORECAST_RECORD, QUERY, ForecastMod
from fedstale.client.device import MessageHistory
from fedstale.client.journal_history import JOURNAL_RECORD, JournalHistory
from fedstale.traces.forecast import TraceObserver, embedded
from fedstale.traces.recording import journal as journals
from fedstale.traces.recording.journal import Journal, RecordingRun, record
from fedstale.traces.recording.monitor import Reading
from fedstale.traces.recording.to_traces import RecordingRules, traces_of

HOUR, DAY = 3600.0, 86_400.0
MIDNIGHT = 1_700_006_400.0  # 2023-11-15, a Wednesday, UTC
ABOUT = RecordingRun(device_id="phone", interval_s=60.0, utc_offset_s=0.0)


class Phone:
    """A phone that is online and charging when a function of time says so, and its clocks."""

    def __init__(self, is_free, *, left=0.8):
        self.now, self.is_free, self.left = 0.0, is_free, left

    def steady(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds
        return False

    def read(self):
        free = bool(self.is_free(self.now))
        instant = MIDNIGHT + self.now
        return Reading(instant=instant, online=free, charging=free, processor_left=self.left)


@contextmanager
def opened(folder, about=ABOUT):
    """Open a journal that does not wait for the disk."""
    with Journal(folder, about, max_bytes=10**8) as journal:
        journal._database.execute("PRAGMA synchronous = OFF")
        yield journal


def recorded(folder, phone, *, until, about=ABOUT):
    """Record a phone from its clock to an instant, in s since the midnight."""
    with opened(folder, about) as journal:
        record(
            phone,
            journal,
            interval_s=about.interval_s,
            duration_s=until - phone.now,
            wait=phone.wait,
            steady=phone.steady,
        )
    return folder


def written(folder, rows, about=ABOUT):
    """Write readings from (steady, wall, online); charging is not known."""
    with opened(folder, about) as journal:
        for steady, wall, online in rows:
            journal.append(Reading(instant=wall, online=online, processor_left=0.5), steady)
    return folder


def bench_at(instant, **said):
    """Return a bench whose clock is so many s after the midnight, with a node config."""
    bench = Bench(ForecastMod(), node_config={k: str(v) for k, v in said.items() if v is not None})
    bench.wall = MIDNIGHT + instant
    return bench


def job_of(hours):
    """Return a job that takes about so long on a device of the fleet's speed."""
    rate = float(embedded().fleet.rates[0, 1, 1])
    work, size = rate * HOUR * hours, 1e6
    return {"work": work, "download_bytes": size, "upload_bytes": size, "deadline_s": 1e5}


def at_night(t):
    return not 7 * HOUR <= t % DAY < 22 * HOUR


def at_random(seed):
    edges = np.cumsum(np.random.default_rng(seed).exponential(2700.0, 2000))
    return lambda t: np.searchsorted(edges, t) % 2 == 1


@pytest.fixture(scope="module")
def nights(tmp_path_factory):
    """Return the journal of a week of nights; it is 23 h, and the phone is free since 22 h."""
    folder = tmp_path_factory.mktemp("nights") / "phone.parquet.journal"
    return recorded(folder, Phone(at_night), until=7 * DAY + 23 * HOUR)


NOW = 7 * DAY + 23 * HOUR + 5.0


def test_a_phone_of_nights_forecasts_a_night_and_one_of_random_sessions_does_not(nights, tmp_path):
    chaos = recorded(tmp_path / "j", Phone(at_random(0)), until=7 * DAY + 23 * HOUR)
    said = {}
    for name, folder in (("night", nights), ("chaos", chaos)):
        bench = bench_at(NOW, journal=folder, available="charging")
        said[name] = bench.ask(job=job_of(hours=4.0))
    # Four of eight hours that are left of the night; sessions of 45 minutes on average.
    assert said["night"]["p_finish"] > 0.6
    assert said["chaos"]["p_finish"] < 0.2
    assert said["night"]["p_available"] > 0.9
    assert said["chaos"]["p_available"] < 0.75


def test_p_available_is_the_chance_to_stay_for_half_an_hour(nights, monkeypatch):
    forecaster, seen = embedded(), []
    monkeypatch.setattr(ForecastMod, "_forecaster", forecaster)
    forecast = forecaster.forecast
    monkeypatch.setattr(forecaster, "forecast", lambda o: seen.append(forecast(o)) or seen[-1])
    said = bench_at(NOW, journal=nights).ask()
    # The grid of horizons is 1, 5, 15 and 30 minutes, and longer.
    assert said["p_available"] == pytest.approx(seen[0].survival[1, 3], abs=1e-6)
    assert seen[0].survival[1, 3] < seen[0].survival[1, 0]


STORY = st.lists(
    st.tuples(
        st.one_of(st.integers(10, 29), st.integers(10, 80_000)),  # s until this reading
        st.booleans(),  # whether a new run starts here
        st.booleans(),  # whether it is online
        st.integers(0, 8),  # eighths of the processor that are left
    ),
    min_size=4,
    max_size=40,
)


def story_of(folder, story):
    """Write a journal and return (instant, online) of its readings."""
    now, run, told = 0.0, 0, []
    parts = [[]]
    for waited, again, online, left in story:
        now += waited
        if again and len(parts[-1]) > 1:
            parts.append([])
        parts[-1].append((now, online, left / 8.0))
        told.append((now, online))
    about = replace(ABOUT, interval_s=10.0)
    for run, rows in enumerate(parts):
        with opened(folder, about) as journal:
            for t, online, left in rows:
                reading = Reading(instant=MIDNIGHT + t, online=online, processor_left=left)
                # Each run has a steady clock of its own.
                journal.append(reading, t - 1000.0 * run)
    return told


def with_a_job(took_s=100.0, work=300.0):
    """Return the history of a device that trained once, long before it was recorded."""
    history = MessageHistory()
    arrived = MIDNIGHT - DAY
    history.add(arrived=arrived, ready=arrived + took_s, training_s=took_s, work=work)
    return history


@settings(max_examples=15, deadline=None)
@given(STORY, st.randoms(use_true_random=False))
def test_an_observation_is_that_of_the_trace_which_the_journal_becomes(story, random):
    # The first two readings are one interval apart, so that what comes later fills no gap.
    story = [(10, False, True, 4), (10, False, True, 4), *((*s,) for s in story)]
    with quick_folder() as folder:
        told = story_of(Path(folder) / "j", story)
        journal = JournalHistory(Path(folder) / "j", "online")
        readings, _ = journals.read(Path(folder) / "j")
        # What `record --finish` writes, with all that comes later.
        traces = traces_of(readings, RecordingRules(speed=1.0, compute_unit="share"))
        free = [k for k, (_, online) in enumerate(told) if online and k > 1]
        free = [k for k in free if k + 1 < len(told) and told[k + 1][0] - told[k][0] <= 30.0]
        assume(free)
        k = random.choice(free)
        begun = told[0][0]
        for later in (0.0, random.uniform(0.0, told[k + 1][0] - told[k][0] - 1e-3)):
            t = told[k][0] + later
            history = with_a_job()
            seen = journal.observation(history, np.array([MIDNIGHT + t]), 0.0, RecordDict())
            assert not journal._is_logged
            expected = TraceObserver(traces).at([0], t - begun, history_s=28 * DAY)
            for field in fields(expected.own):
                np.testing.assert_allclose(
                    getattr(seen.own, field.name),
                    getattr(expected.own, field.name),
                    rtol=1e-6,
                    atol=1e-4,
                    err_msg=field.name,
                )
            np.testing.assert_allclose(seen.history_s, expected.history_s, atol=1e-4)
            np.testing.assert_allclose(seen.time_of_day_s, expected.time_of_day_s, atol=1e-3)
            assert seen.online.tolist() == expected.online.tolist() == [True]
            if later == 0.0:
                # 300 units in 100 s, and half of it of a processor that is busy.
                pace = 3.0 * (0.5 + 0.5 * expected.rates[:, 0])
                np.testing.assert_allclose(seen.rates[:, 0], pace, rtol=1e-5)


def test_the_day_of_the_week_is_the_clock_s(nights):
    journal, now = JournalHistory(nights, "online"), MIDNIGHT + NOW
    seen = journal.observation(MessageHistory(), np.array([now]), -2 * HOUR, RecordDict())
    # A week after a Wednesday, 23 h in UTC and 21 h here.
    assert seen.time_of_week_s[0] == pytest.approx(2 * DAY + 21 * HOUR + 5.0)
    assert seen.time_of_day_s[0] == pytest.approx(21 * HOUR + 5.0)


def test_nothing_later_than_the_message_enters(nights, tmp_path):
    longer = shutil.copytree(nights, tmp_path / "j")
    phone = Phone(lambda t: t % 700 < 300, left=0.1)
    phone.now = 7 * DAY + 23 * HOUR + 60.0
    recorded(longer, phone, until=9 * DAY)
    one, two = (
        bench_at(NOW, journal=folder, available="charging").ask(job=job_of(4.0))
        for folder in (nights, longer)
    )
    assert one == two
    # What is later does enter later.
    later = bench_at(9 * DAY + 5.0, journal=longer, available="charging").ask(job=job_of(4.0))
    assert later["p_finish"] < one["p_finish"]


def test_the_state_now_is_what_the_message_shows(tmp_path):
    phone = Phone(lambda t: not t >= DAY - HOUR, left=0.5)
    folder = recorded(tmp_path / "j", phone, until=DAY)
    journal = JournalHistory(folder, "charging")
    # The last reading said offline, for an hour; the device works, so its session began now.
    instants = np.array([MIDNIGHT + DAY + 20.0])
    seen = journal.observation(MessageHistory(), instants, 0.0, RecordDict())
    assert seen.online.tolist() == [True]
    assert seen.own.age_s.tolist() == [0.0]
    assert seen.own.lengths_s[0, 0] == pytest.approx(HOUR + 20.0)
    # A device that slept since its last reading was offline until now.
    seen = journal.observation(MessageHistory(), instants + 6 * HOUR, 0.0, RecordDict())
    assert seen.own.age_s.tolist() == [0.0]
    assert seen.own.lengths_s[0, 0] == pytest.approx(7 * HOUR + 20.0)


def test_a_log_begins_after_a_day_in_which_nobody_recorded(tmp_path):
    def history_of(gap_s, *, same_run):
        folder = tmp_path / f"{gap_s}-{same_run}"
        first = [(60.0 * k, MIDNIGHT + 60.0 * k, True) for k in range(100)]
        start = 99 * 60.0 + gap_s
        second = [(start + 60.0 * k, MIDNIGHT + start + 60.0 * k, True) for k in range(50)]
        for rows in [first + second] if same_run else [first, second]:
            written(folder, rows)
        now = MIDNIGHT + start + 49 * 60.0 + 5.0
        journal = JournalHistory(folder, "online")
        seen = journal.observation(MessageHistory(), np.array([now]), 0.0, RecordDict())
        assert not journal._is_logged
        return seen

    for gap_s, same_run in ((6 * HOUR, False), (6 * HOUR, True), (2 * DAY, True)):
        seen = history_of(gap_s, same_run=same_run)
        assert seen.history_s[0] == pytest.approx(148 * 60.0 + gap_s + 5.0)
        assert seen.own.lengths_s[0, 0] == pytest.approx(gap_s)
        assert seen.own.began[0]
    seen = history_of(2 * DAY, same_run=False)
    assert seen.history_s[0] == pytest.approx(49 * 60.0 + 5.0)
    assert np.isnan(seen.own.lengths_s[0, 0])
    assert not seen.own.began[0]


def test_a_job_of_one_s_own_is_no_load(tmp_path):
    def seen_with(left_while_training):
        folder = tmp_path / str(left_while_training)
        history = MessageHistory()
        with opened(folder) as journal:
            for k in range(200):
                trains = 100 < k <= 160
                left = left_while_training if trains else 0.6
                reading = Reading(instant=MIDNIGHT + 60.0 * k, online=True, processor_left=left)
                journal.append(reading, 60.0 * k)
        arrived = MIDNIGHT + 100 * 60.0
        history.add(arrived=arrived, ready=arrived + HOUR, training_s=HOUR, work=7200.0)
        now = np.array([MIDNIGHT + 199 * 60.0])
        return JournalHistory(folder, "online").observation(history, now, 0.0, RecordDict())

    busy, idle = seen_with(0.0), seen_with(0.6)
    np.testing.assert_allclose(busy.rates, idle.rates)
    known = busy.rates[0, 0][np.isfinite(busy.rates[0, 0])]
    # As fast as it was, with the same load of others as before the job.
    assert known.size > 10
    np.testing.assert_allclose(known, 2.0, rtol=1e-5)


FLAWS = {
    "missing": "no such journal",
    "a file": "no such journal",
    "an empty folder": "no readable reading",
    "no reading": "no readable reading",
    "damaged": "no readable reading",
    "one reading": "1 of 1 readings in the journal",
    "later": "0 of 60 readings in the journal are not later than now",
    "old": "is 72 h old: expected one of the last day",
    "unreadable": "cannot read whether it is online",
    "two devices": "device 'phone' is in the journal: expected one of 'tablet' alone",
    "another device": "device 'phone' is in the journal: expected one of 'watch' alone",
}


def with_flaw(folder, how):
    """Write a journal that does not serve."""
    rows = [(60.0 * k, MIDNIGHT + 60.0 * k, True) for k in range(60)]
    if how == "a file":
        folder.write_text("not a folder")
    elif how == "an empty folder":
        folder.mkdir()
    elif how in ("no reading", "one reading"):
        written(folder, rows[: how == "one reading"])
    elif how in ("later", "old"):
        moved = DAY if how == "later" else -3 * DAY
        written(folder, [(steady, wall + moved, online) for steady, wall, online in rows])
    elif how == "unreadable":
        written(folder, [(steady, wall, None) for steady, wall, _ in rows])
    elif how != "missing":
        written(folder, rows)
    if how == "damaged":
        journals.files_of(folder)[0].write_bytes(b"x" * 5000)
    elif how == "two devices":
        tablet = written(folder.with_name("tablet"), rows, replace(ABOUT, device_id="tablet"))
        shutil.copy(journals.files_of(tablet)[0], folder / "0000000001.sqlite")


@pytest.mark.parametrize("how", FLAWS)
def test_a_journal_that_does_not_serve_costs_nothing_but_a_sentence(tmp_path, how, caplog):
    with_flaw(tmp_path / "j", how)
    plain, bench = bench_at(HOUR), bench_at(HOUR, journal=tmp_path / "j")
    if how == "another device":
        bench.state[JOURNAL_RECORD] = ConfigRecord({"device_id": "watch"})
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert bench.train(40.0) == plain.train(40.0)
            for each in (bench, plain):
                each.go(300.0)
    assert len(caplog.records) == 1
    assert "forecasts are made of messages alone: " in caplog.text
    assert FLAWS[how] in caplog.text


def test_a_recorder_that_has_died_is_noticed_by_the_messages(nights, caplog):
    bench = bench_at(NOW, journal=nights)
    with caplog.at_level(logging.WARNING):
        bench.train(40.0)
        bench.go(HOUR)
        assert caplog.text == "", "the device may have slept until now"
        bench.train(40.0)
        bench.go(HOUR)
        bench.train(40.0)
        bench.ask()
    assert len(caplog.records) == 1
    assert "and this device has answered since" in caplog.text


def test_a_journal_that_serves_again_is_used_again(nights, tmp_path, caplog):
    bench = bench_at(NOW, journal=tmp_path / "j", available="charging")
    without = bench.ask(job=job_of(4.0))
    shutil.copytree(nights, tmp_path / "j")
    served = bench_at(NOW, journal=nights, available="charging").ask(job=job_of(4.0))
    assert bench.ask(job=job_of(4.0))["p_finish"] == pytest.approx(served["p_finish"], abs=1e-3)
    assert without["p_finish"] != pytest.approx(served["p_finish"], abs=1e-2)
    shutil.rmtree(tmp_path / "j")
    bench.ask()
    assert len(caplog.records) == 2


def test_a_journal_that_is_kept_closed_is_waited_for_but_not_for_long(nights, tmp_path, caplog):
    folder = shutil.copytree(nights, tmp_path / "j")
    (path,) = journals.files_of(folder)
    bench = bench_at(NOW, journal=folder, available="charging")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("PRAGMA user_version = 1")
        began = time.monotonic()
        without = bench.ask(job=job_of(4.0))
        assert time.monotonic() - began < 10.0
    assert "another process keeps it closed" in caplog.text
    assert bench.ask(job=job_of(4.0))["p_finish"] != pytest.approx(without["p_finish"], abs=1e-2)
    assert len(caplog.records) == 1


def test_a_device_names_its_journal_in_its_node_config(nights, caplog):
    def asked(mod, **node_config):
        here = Context(1, 7, node_config, RecordDict(), {})
        answer = mod(message(QUERY), here, lambda request, _: trained(request))
        assert "error" not in answer.content[FORECAST_RECORD]
        said, caplog_text = here.state.config_records.get(JOURNAL_RECORD), caplog.text
        caplog.clear()
        return said, caplog_text

    # The machine's own clock is years after the journal.
    name, says = asked(ForecastMod(), journal=str(nights), available="charging")
    assert dict(name) == {"device_id": "phone"}
    assert "h old: expected one of the last day" in says
    assert asked(ForecastMod()) == (None, "")
    _, says = asked(ForecastMod(), journal=str(nights), available="sometimes")
    assert "available = 'sometimes': expected 'online', 'charging' or 'recording'" in says
