"""Forecasts of replayed devices: from their own history, in virtual time, and from nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from local_workers import LocalWorkers
from tiny import COSTS, counting_app, message_to

from fedstale.client import FORECAST_RECORD, QUERY, ForecastMod
from fedstale.client.device import MessageHistory
from fedstale.simulation import TraceGrid
from fedstale.simulation.nodes import NodeConfigs
from fedstale.traces import Availability, Series, TraceSet
from fedstale.traces.recording.monitor import ResourceMonitor

T = 20_000.0
STEP_S = 50.0


def forecasting_app():
    """Return the counting app with the mod."""
    app = ForecastMod().client_app()
    app.train()(counting_app()._registered_funcs["train.default"])
    return app


def fleet_with_future(seed, n=3):
    """Return devices that are alike up to T, and unlike after it unless the seed is the same."""
    past, future = np.random.default_rng(0), np.random.default_rng(seed)
    before, after = int(T / STEP_S), int(T / STEP_S)

    def rates(scale):
        values = [r.lognormal(size=(n, k)) for r, k in ((past, before), (future, after))]
        return Series.regular(scale * np.concatenate(values, axis=1), step_s=STEP_S, repeat=False)

    windows = []
    for _ in range(n):
        gaps = past.uniform(50.0, 200.0, 30)
        edges = np.cumsum(np.stack([gaps, past.uniform(300.0, 1500.0, 30)], axis=1).ravel())
        own = edges.reshape(-1, 2)[edges.reshape(-1, 2)[:, 1] < T].tolist()
        # The last window is open at T, and ends when the future says.
        own.append([max(own[-1][1] + 10.0, T - 500.0), T + future.uniform(100.0, 20_000.0)])
        windows.append([tuple(w) for w in own])
    return TraceSet(
        device_ids=TraceSet.ideal(n).device_ids,
        availability=Availability.of(windows, 2 * T, repeat=False),
        compute=rates(1.0),
        downlink=rates(8e6),
        uplink=rates(8e6),
        epoch="2024-03-01T06:00:00",
    )


def always_there():
    """Return the same devices, never offline."""
    return replace(fleet_with_future(1), availability=Availability.always(3))


def forecasts_of(traces, client=None, *, own=None, until=T + 3_000.0):
    """Return (trained at, node, forecast) of every reply, in a run that always asks everyone."""
    nodes = NodeConfigs(traces.device_ids, own=own)
    grid = TraceGrid(traces, client or forecasting_app(), costs=COSTS, seed=3, nodes=nodes)
    said = []
    with grid.running():
        while grid.now() < until:
            # A schedule that does not depend on what comes back.
            start = grid.now()
            nodes = list(grid.get_node_ids())
            replies = list(
                grid.send_and_receive([message_to(i, ttl=400.0) for i in nodes], timeout=400.0)
            )
            for reply in replies:
                if reply.has_content():
                    job = grid._jobs.of_message(reply.metadata.reply_to_message_id)
                    said.append((job.trained_at, job.node_id, dict(reply.content[FORECAST_RECORD])))
            grid.sleep(start + 700.0 - grid.now())
    return said


def test_no_forecast_changes_when_the_future_changes():
    one, two = (forecasts_of(fleet_with_future(seed)) for seed in (1, 2))
    before = [[s for s in said if s[0] < T] for said in (one, two)]
    assert len(before[0]) > 30
    assert before[0] == before[1]
    # The futures do differ, and forecasts made in them too.
    assert [s for s in one if s[0] >= T] != [s for s in two if s[0] >= T]


def test_a_journal_of_the_machine_that_simulates_is_not_read(tmp_path, caplog):
    traces = fleet_with_future(1)
    own = {key: {"journal": str(tmp_path / "missing")} for key in traces.device_ids}
    assert forecasts_of(traces, own=own, until=3_000.0) == forecasts_of(traces, until=3_000.0)
    assert caplog.text == ""


def test_forecasts_are_made_where_the_device_was_not_where_the_server_is():
    traces = always_there()
    grid = TraceGrid(traces, forecasting_app(), costs=COSTS)
    late = TraceGrid(traces, forecasting_app(), costs=COSTS)
    answers = []
    for one, wait in ((grid, 0.0), (late, 7_000.0)):
        with one.running():
            one.sleep(5_000.0)
            node = next(iter(one.get_node_ids()))
            ids = list(one.push_messages([message_to(node)]))
            one.wait(np.inf)
            one.sleep(wait)
            (reply,) = one.pull_messages(ids)
            answers.append(dict(reply.content[FORECAST_RECORD]))
    assert answers[0] == answers[1]


def test_the_mod_measures_virtual_phases():
    grid = TraceGrid(always_there(), forecasting_app(), costs=COSTS)
    with grid.running():
        grid.sleep(5_000.0)
        node = next(iter(grid.get_node_ids()))
        for _ in range(3):
            grid.send_and_receive([message_to(node)])
        events = grid.events().to_pandas()
    rows = MessageHistory.read(grid._clients._contexts[node].state)
    np.testing.assert_allclose(rows["training_s"], events["compute_s"], rtol=1e-9)
    np.testing.assert_allclose(rows["travel_s"], events["download_s"], rtol=1e-9)
    np.testing.assert_allclose(rows["work"], events["work"], rtol=1e-9)
    np.testing.assert_allclose(
        rows["arrived"][1:] - rows["ready"][:-1],
        events["downloaded_at"][1:].to_numpy() - events["trained_at"][:-1],
        atol=1e-6,
    )


def test_uploads_teach_the_device_at_its_next_message():
    grid = TraceGrid(always_there(), forecasting_app(), costs=COSTS)
    with grid.running():
        grid.sleep(5_000.0)
        node = next(iter(grid.get_node_ids()))
        grid.send_and_receive([message_to(node)])
        state = grid._clients._contexts[node].state
        first = np.frombuffer(state["fedstale.calibration"]["scores"]).reshape(-1, 3, 2)
        grid.send_and_receive([message_to(node)])
        state = grid._clients._contexts[node].state
        then = np.frombuffer(state["fedstale.calibration"]["scores"]).reshape(-1, 3, 2)
    # Training at once; reporting and total when the next message comes.
    assert np.isfinite(first).all(axis=2).tolist() == [[True, False, False]]
    assert np.isfinite(then).all(axis=2).tolist() == [
        [True, False, False],
        [False, True, True],
        [True, False, False],
    ]


def test_forecasts_are_the_same_in_workers():
    traces = fleet_with_future(1)
    inline = forecasts_of(traces, until=4_000.0)
    with LocalWorkers(forecasting_app, 2) as executor:
        apart = forecasts_of(traces, executor, until=4_000.0)
    assert len(inline) > 5
    assert inline == apart


def query_to(node):
    return Message(RecordDict(), node, QUERY, ttl=3_600.0)


def test_a_query_is_answered_at_no_work_and_few_bytes(make_grid):
    grid = make_grid([[(0.0, 1000.0)]], app=forecasting_app())
    grid.send_and_receive([message_to(1000)])
    sent = grid.now()
    (reply,) = grid.send_and_receive([query_to(1000)])
    said = reply.content[FORECAST_RECORD]
    assert 0.0 <= said["p_finish"] <= 1.0
    assert said["duration_s"] == pytest.approx(12.0, rel=0.5)
    job = grid.events().to_pandas().iloc[-1]
    assert job["work"] == 0.0
    assert job["downloaded_bytes"] + job["uploaded_bytes"] < 2_000
    assert grid.now() - sent < 0.1


def test_a_query_waits_for_its_device(make_grid):
    grid = make_grid([[(500.0, 1000.0)]], app=forecasting_app())
    (reply,) = grid.send_and_receive([query_to(1000)])
    assert "p_available" in reply.content[FORECAST_RECORD]
    assert 500.0 <= grid.now() < 501.0


def test_a_replayed_device_is_a_monitor_of_itself(make_grid):
    seen = []

    def look(message, context, call_next):
        monitor: ResourceMonitor = context.device
        seen.extend(monitor.read() for _ in range(3))
        return call_next(message, context)

    app = counting_app()
    train = app._registered_funcs["train.default"]
    app._registered_funcs["train.default"] = lambda m, c: look(m, c, train)
    grid = make_grid([[(0.0, 1000.0)]], app=app)
    grid.send_and_receive([message_to(1000)])
    job = grid.events().to_pandas().iloc[0]
    instants = np.array([reading.instant for reading in seen]) - grid._unix_base
    np.testing.assert_allclose(
        instants, [job["downloaded_at"], job["trained_at"], job["trained_at"]], atol=1e-6
    )
    assert all(reading.online for reading in seen)


def test_a_job_that_leaves_no_time_of_day_has_a_forecast():
    traces = replace(fleet_with_future(1), epoch=None)
    assert all("error" not in said for _, _, said in forecasts_of(traces, until=3_000.0))
