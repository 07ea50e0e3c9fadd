"""The mod on a device whose clocks are turned by hand."""

import logging
import math
import re

import numpy as np
import pytest
from bench_device import Bench, Fixed, context, message, trained
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.error import Error
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedstale.client import FORECAST_RECORD, QUERY, ForecastMod, local_steps
from fedstale.client.device import COLUMNS, MESSAGES_KEPT, Machine, MessageHistory
from fedstale.client.forecasting import OwnCalibration
from fedstale.strategies.stages.local_work import asking
from fedstale.strategies.types import forecast_in
from fedstale.traces.forecast import embedded

SAID = {"version", "available_s", "p_available", "p_finish", "duration_s", "levels"}
SAID |= {"training_s", "reporting_s", "total_s"}
JOB = {"work": 60.0, "download_bytes": 5e6, "upload_bytes": 5e6, "deadline_s": 1800.0}


@pytest.fixture
def bench():
    return Bench(ForecastMod())


def assert_sound(said):
    assert set(said) == SAID
    for value in said.values():
        assert np.isfinite(np.asarray(value, dtype=float)).all()
    assert 0.0 <= said["p_finish"] <= 1.0
    assert 0.0 <= said["p_available"] <= 1.0
    for phase in ("training_s", "reporting_s", "total_s"):
        assert len(said[phase]) == 3
        assert said[phase] == sorted(said[phase])
        assert said[phase][0] >= 0.0


def test_a_reply_carries_a_forecast_of_the_next_job(bench):
    assert_sound(bench.train(40.0))


def test_servers_read_the_record(bench):
    reply = bench.answer(message(created_at=bench.wall - 2.0), takes=40.0)
    kept = forecast_in(reply.content)
    assert set(kept) == SAID
    assert all(key.startswith("fedstale.") for key in bench.state)


def test_forecasts_follow_the_device_s_own_trainings(bench):
    for _ in range(12):
        bench.train(40.0)
        bench.go(300.0)
    fast = bench.train(40.0)
    assert fast["training_s"][1] == pytest.approx(40.0, rel=0.3)
    for _ in range(12):
        bench.train(400.0)
        bench.go(300.0)
    slow = bench.train(400.0)
    assert slow["training_s"][1] > 2.0 * fast["training_s"][1]
    assert slow["training_s"][2] > 300.0


def test_a_device_that_is_busy_but_trains_does_not_forecast_that_it_never_does():
    bench = Bench(ForecastMod(), monitor=Fixed(processor_left=0.0))
    bench.ask()
    bench.go(30.0)
    said = bench.train(30.0)
    assert said["training_s"][1] == pytest.approx(30.0, rel=0.3)
    assert said["p_finish"] > 0.9


def test_stated_work_is_the_work_of_the_forecast(bench):
    rate = float(embedded().fleet.rates[0, 1, 1])
    for _ in range(6):
        bench.train(60.0, job={"work": 60.0 * rate})
        bench.go(300.0)
    once = bench.ask(job={"work": 60.0 * rate})
    thrice = bench.ask(job={"work": 180.0 * rate})
    assert once["training_s"][1] == pytest.approx(60.0, rel=0.3)
    assert thrice["training_s"][1] == pytest.approx(3 * once["training_s"][1], rel=0.4)


def test_a_device_takes_the_forecaster_of_its_fleet():
    chances = {}
    for fleet in ("any", "phones", "desktops", "cars"):
        bench = Bench(ForecastMod(f"embedded:{fleet}"))
        bench.go(7200.0)
        chances[fleet] = bench.ask()["p_available"]
    assert len(set(chances.values())) == 4
    # Phones leave the charger sooner than cars.
    assert chances["phones"] < chances["cars"]


def test_an_unknown_fleet_is_an_error_that_names_those_known(caplog):
    bench = Bench(ForecastMod("embedded:satellites"))
    assert set(bench.ask()) == {"error"}
    assert "expected one of any, phones" in caplog.text


def test_a_query_is_answered_without_the_app_and_is_not_a_training(bench):
    bench.train(40.0)
    before = bench.state["fedstale.calibration"]["scores"]
    assert_sound(bench.ask())
    assert bench.state["fedstale.calibration"]["scores"] != before  # the open upload was closed
    after = bench.state["fedstale.calibration"]["scores"]
    bench.ask()
    assert bench.state["fedstale.calibration"]["scores"] == after


def test_a_device_without_a_history_forecasts_what_the_fleet_does(bench):
    said = bench.ask(job=JOB)
    assert_sound(said)
    fleet = embedded().fleet
    # Within a factor of three of the fleet's median: the network has a say.
    assert said["training_s"][1] == pytest.approx(JOB["work"] / fleet.rates[0, 1, 1], rel=2.0)


def test_without_a_job_a_device_forecasts_only_whether_it_will_be_online(bench):
    assert set(bench.ask()) == {"version", "available_s", "p_available"}


@pytest.mark.parametrize(
    "job",
    [
        {**JOB, "download_bytes": 0.0, "upload_bytes": 0.0},
        {**JOB, "deadline_s": math.inf},
        {**JOB, "work": 0.0},
        {**JOB, "work": 1e30},
        {**JOB, "deadline_s": 1e-3},
    ],
)
def test_jobs_of_nothing_and_for_ever_have_forecasts(bench, job):
    assert_sound(bench.ask(job=job))


@pytest.mark.parametrize(
    ("job", "named"),
    [
        ({"work": math.nan}, "work = nan"),
        ({"work": -1.0}, "work = -1"),
        ({"upload_bytes": math.inf}, "upload_bytes = inf"),
        ({"deadline_s": "soon"}, "'soon'"),
        ({"deadline_s": 0.0}, "deadline_s = 0.0"),
        ({"price": 3.0}, "price"),
    ],
)
def test_a_job_that_is_none_is_one_error_and_no_crash(bench, job, named):
    reply = bench.answer(message(job=job), takes=10.0)
    assert MessageHistory.read(bench.state)["training_s"].tolist() == [10.0]
    assert not reply.has_error()
    assert "metrics" in reply.content
    said = dict(reply.content[FORECAST_RECORD])
    assert set(said) == {"error"}
    assert named in said["error"]
    assert forecast_in(reply.content) == {}


def test_a_clock_that_goes_back_or_far_ahead_has_a_forecast(bench):
    for wall in (300.0, -7200.0, 300.0, -3e9, 6e9, 300.0):
        bench.go(300.0, wall=wall)
        assert_sound(bench.train(40.0))
    # A clock that is behind the server's would make a travel time of less than nothing.
    assert_sound(bench.train(40.0, travel=-500.0))


def test_readings_that_are_missing_or_nonsense_have_a_forecast():
    for values in ({}, {"processor_left": math.nan, "online": None}, {"processor_left": 0.0}):
        bench = Bench(ForecastMod(), monitor=Fixed(**values))
        bench.train(40.0)
        bench.go(60.0)
        assert_sound(bench.train(40.0))


def test_state_survives_a_restart_of_the_app(bench):
    for _ in range(5):
        bench.train(40.0)
        bench.go(300.0)
    again = Bench(ForecastMod(), state=bench.state)
    again.wall, again.steady = bench.wall, 0.0
    assert again.ask() == bench.ask()


@pytest.mark.parametrize("record", ["fedstale.history", "fedstale.calibration"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda r: {**r, "version": 99},
        lambda r: {k: v[:-3] if isinstance(v, bytes) else v for k, v in r.items()},
        lambda r: {k: 7 if isinstance(v, bytes) else v for k, v in r.items()},
        lambda r: {},
    ],
)
def test_a_state_that_cannot_be_read_is_forgotten(bench, record, damage, caplog):
    bench.train(40.0)
    bench.state[record] = ConfigRecord(damage(dict(bench.state[record])))
    with caplog.at_level(logging.WARNING):
        assert_sound(bench.train(40.0))
    assert "begins anew" in caplog.text


def test_the_state_stays_small_for_ever():
    bench = Bench(ForecastMod(), monitor=Fixed(processor_left=0.5, online=True))
    bench.train(40.0)
    history, calibration = MessageHistory.read(bench.state), OwnCalibration.read(bench.state)
    # As after years: more than is kept of everything.
    calibration.scores = np.tile(calibration.scores, (1000, 1, 1))
    for _ in range(2 * MESSAGES_KEPT):
        history.add(**dict(zip(COLUMNS, history.rows[0], strict=True)))
    history.write(bench.state)
    calibration.write(bench.state)
    lengths = set()
    for _ in range(3):
        assert_sound(bench.train(40.0))
        sizes = [len(record.deflate()) for record in bench.state.values()]
        assert sum(sizes) < 64 * 1024
        lengths.add(len(bench.state["fedstale.history"]["rows"]))
    assert lengths == {MESSAGES_KEPT * 8 * len(COLUMNS)}


def damaged(tmp_path, how):
    embedded().save(tmp_path)
    arrays, toml = tmp_path / "forecaster.safetensors", tmp_path / "forecaster.toml"
    if how == "missing":
        toml.unlink()
    elif how == "altered":
        data = bytearray(arrays.read_bytes())
        data[-1] ^= 1
        arrays.write_bytes(bytes(data))
    elif how == "cut short":
        arrays.write_bytes(arrays.read_bytes()[:-10])
    else:
        toml.write_text(re.sub(r"schema = \d+", "schema = 99", toml.read_text()))


@pytest.mark.parametrize("how", ["missing", "altered", "cut short", "of another version"])
def test_a_forecaster_that_cannot_be_read_costs_no_training(tmp_path, how, caplog):
    damaged(tmp_path, how)
    bench = Bench(ForecastMod(tmp_path))
    with caplog.at_level(logging.ERROR):
        said = [bench.train(40.0) for _ in range(3)][-1]
    assert set(said) == {"error"}
    assert "TraceError" in said["error"]
    # Paths of a device stay on it.
    assert str(tmp_path) not in said["error"]
    assert str(tmp_path) in caplog.text
    # Once, not at every message.
    assert len(caplog.records) == 1


def test_the_app_s_own_errors_are_its_own(bench):
    def fails(request, here):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        bench.mod(message(), context(), fails)
    request = message()
    error = bench.mod(request, context(), lambda r, _: Message(Error(3, "no"), reply_to=r))
    assert error.has_error()


def test_a_run_config_key_switches_the_mod_off():
    mod = ForecastMod(enabled_by="forecasts")
    reply = mod(message(), context(forecasts=False), lambda r, _: trained(r))
    assert FORECAST_RECORD not in reply.content
    here = context(forecasts=True)
    reply = mod(message(), here, lambda r, _: trained(r))
    assert FORECAST_RECORD in reply.content
    asked = mod(message(QUERY), context(forecasts=False), lambda r, _: trained(r))
    assert "switched off" in asked.content[FORECAST_RECORD]["error"]


def test_one_line_makes_a_client_app_that_answers_queries():
    app = ForecastMod().client_app()

    @app.train()
    def train(request, here):
        return trained(request)

    here = context()
    assert isinstance(app, ClientApp)
    assert_sound(dict(app(message(), here).content[FORECAST_RECORD]))
    assert_sound(dict(app(message(QUERY), here).content[FORECAST_RECORD]))


def test_other_mods_run_inside():
    seen = []

    def other(request, here, call_next):
        seen.append(request.metadata.message_type)
        return call_next(request, here)

    app = ForecastMod().client_app(mods=[other])
    app.train()(lambda request, here: trained(request))
    app(message(), context())
    app(message(QUERY), context())
    assert seen == ["train"]


def test_stock_strategies_aggregate_replies_with_forecasts(bench):
    replies = [
        bench.answer(message(created_at=bench.wall - 2.0, key=f"m{i}"), takes=30.0)
        for i in range(3)
    ]
    # One device whose forecast failed, and one without the mod.
    replies[1].content[FORECAST_RECORD] = ConfigRecord({"error": "no"})
    del replies[2].content[FORECAST_RECORD]
    for i, reply in enumerate(replies):
        reply.content["arrays"] = ArrayRecord([np.full(3, float(i))])
    arrays, metrics = FedAvg().aggregate_train(1, replies)
    np.testing.assert_allclose(arrays.to_numpy_ndarrays()[0], 1.0)
    assert dict(metrics) == {}


def test_servers_read_what_an_old_or_a_silent_device_sends():
    request = message()
    silent = Message(RecordDict(), reply_to=request)
    assert forecast_in(silent.content) == {}
    old = Message(RecordDict({FORECAST_RECORD: ConfigRecord({"p_finish": 0.4})}), reply_to=request)
    assert forecast_in(old.content) == {"p_finish": 0.4}


class Sharing(Bench):
    """A bench whose app does a share of each job in as much of its time."""

    def train(self, takes, *, share=None, stated=None):
        request = message(created_at=self.wall - 2.0, key=f"message-{self.n}")
        self.n += 1
        here = context(self.state)
        self.monitor.instant = self.wall
        here.device = Machine(
            request, self.state, self.monitor, wall=lambda: self.wall, steady=lambda: self.steady
        )
        if stated is not None:
            request.content["fedstale.job"] = ConfigRecord({"work": stated})
        if share is not None:
            request.content["config"] = asking(ConfigRecord(), share)

        def work(request, _):
            self.go(takes * local_steps(request, 1, 800) / 800)
            return trained(request)

        return dict(self.mod(request, here, work).content["fedstale.forecast"])


@pytest.mark.parametrize("stated", [None, 60.0])
def test_a_real_device_forecasts_whole_jobs_alike_whatever_its_shares(stated):
    whole = {}
    for name, shares in (("in full", [None]), ("mixed", [0.125, 1.0, 0.5, 0.25])):
        bench = Sharing(ForecastMod())
        for i in range(24):
            said = bench.train(80.0, share=shares[i % len(shares)], stated=stated)
            bench.go(300.0)
        whole[name] = said["training_s"][1] / said.get("share", 1.0)
        history = MessageHistory.read(bench.state)
        pace = history.scaled(1.0).pace
        np.testing.assert_allclose(pace, pace[0])
    assert said["share"] == (0.25 if stated is None else 1.0)
    assert whole["mixed"] == pytest.approx(whole["in full"], rel=0.1)


def test_a_stated_job_has_the_share_that_its_work_is_of_a_whole_one():
    bench = Sharing(ForecastMod())
    for _ in range(3):
        bench.train(80.0, share=0.5, stated=60.0)
        bench.go(300.0)
    assert bench.ask(job={"work": 60.0})["share"] == pytest.approx(1.0)
    assert bench.ask()["share"] == 0.5
