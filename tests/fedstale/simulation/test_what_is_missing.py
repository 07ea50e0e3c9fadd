"""A simulation is as it was asked for, or says what was missing."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from made_agent import save
from tiny import COSTS, counting_app, fleet, message_to

import fedstale
from fedstale.agents import AgentSelector
from fedstale.client import ForecastMod
from fedstale.simulation import TraceGrid
from fedstale.strategies import FedBuff, ForecastRequest
from fedstale.strategies.selection import Enough
from fedstale.traces import TraceSet


def trains(app):
    @app.train()
    def train(message, context):
        content = {
            "arrays": message.content["arrays"],
            "metrics": MetricRecord({"num-examples": 10}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


def run(strategy, out, app=None, **options):
    return fedstale.simulate(
        app or trains(ClientApp()),
        traces=TraceSet.ideal(6),
        strategy=strategy,
        until="3 rounds",
        out=out,
        work_per_example=1.0,
        epochs=1,
        examples=10,
        **{"initial_arrays": {"w": np.zeros(3)}, **options},
    )


def buffered(**options):
    return FedBuff(3, 2, **options)


@pytest.mark.parametrize("around", [lambda agent: agent, Enough])
def test_a_simulation_without_its_agent_fails_before_its_first_job(tmp_path, around):
    selector = around(AgentSelector(tmp_path / "nowhere"))
    found = run(buffered(selector=selector), tmp_path / "run")
    assert found.status == "failed"
    assert "nowhere: no agent.toml there" in found.reason
    assert "fallback=True" in found.reason
    assert not len(found.jobs)


def test_an_agent_that_is_refused_is_an_error_as_well(tmp_path):
    save(tmp_path / "old")
    toml = tmp_path / "old" / "agent.toml"
    toml.write_text(toml.read_text().replace("version = 3", "version = 2"))
    found = run(buffered(selector=AgentSelector(tmp_path / "old")), tmp_path / "run")
    assert found.status == "failed"
    assert "schema.version = 2, expected 3" in found.reason


def test_a_simulation_that_may_go_on_without_its_agent_says_so(tmp_path):
    selector = AgentSelector(tmp_path / "nowhere", fallback=True)
    found = run(buffered(selector=selector), tmp_path / "run")
    assert found.status == "stopped"
    assert "nowhere: no agent.toml there" in found.summary["hint"]
    assert "no agent.toml there" in (tmp_path / "run" / "report.html").read_text()


def test_where_time_is_real_a_strategy_starts_without_its_agent_and_notes_it(tmp_path):
    grid = TraceGrid(TraceSet.ideal(6), counting_app(), costs=COSTS)
    grid.runtime.is_exact = False
    lacking = buffered(selector=AgentSelector(tmp_path / "nowhere"))
    with grid.running():
        lacking.start(grid, ArrayRecord([np.zeros(3)]), num_rounds=2)
    (hint,) = grid.runtime.hints
    assert "no agent.toml there" in hint


def test_a_simulated_device_fails_without_its_forecaster(tmp_path):
    client = trains(ForecastMod(tmp_path / "nowhere").client_app())
    grid = TraceGrid(TraceSet.ideal(1), client, costs=COSTS)
    with grid.running():
        (reply,) = grid.send_and_receive([message_to(1000)])
    assert grid.events()["status"].to_pylist() == ["client-error"]
    assert "TraceError" in reply.error.reason


def test_a_run_without_any_forecast_says_what_the_first_device_says(tmp_path):
    client = trains(ForecastMod(enabled_by="forecasts").client_app())
    asking = buffered(stages=[ForecastRequest()])
    off = run(asking, tmp_path / "off", client, run_config={"forecasts": False})
    assert "no device made a forecast" in off.summary["hint"]
    assert "switched off by forecasts" in off.summary["hint"]
    on = run(asking, tmp_path / "on", client, run_config={"forecasts": True})
    assert not on.summary["hint"]


def test_a_run_in_which_every_query_fails_says_so(tmp_path):
    asking = buffered(stages=[ForecastRequest()])
    found = run(asking, tmp_path / "run", trains(ClientApp()))
    assert found.status == "stopped"
    n = found.summary["messages"]["query.forecast"]["sent"]
    hint = found.summary["hint"]
    assert f"none of {n} messages query.forecast was answered" in hint
    assert "No query function registered with name 'forecast'" in hint
    assert "ForecastMod().client_app()" in hint
    assert "query.forecast was answered" in (tmp_path / "run" / "report.html").read_text()


# A run in which no device changes.


def hint_of(traces, until="3 rounds", **costs):
    found = fedstale.simulate(
        counting_app(),
        traces=traces,
        strategy=FedBuff(2, 1, seed=1),
        initial_arrays=ArrayRecord([np.zeros(3)]),
        until=until,
        **{"work_per_example": 1.0, "epochs": 1, "examples": 10, **costs},
        evaluate_work_per_example=0.5,
    )
    return found.summary["hint"]


@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize(
    ("windows", "said"),
    [
        ([[(0.0, 900.0)]] * 4, "any change of its devices: none of 4 came or went in"),
        # One is away for as long.
        ([[(0.0, 900.0)]] * 4 + [[(500.0, 900.0)]], "any change of its devices: none of 5"),
        ([[(0.0, 900.0)]] * 150 + [[(0.0, 1.0)]], "nearly any change of its devices: 1 of 151"),
    ],
)
def test_a_run_in_which_no_device_changes_says_so_and_what_to_state(windows, said):
    hint = hint_of(fleet(windows))
    assert f"the run is shorter than {said}" in hint
    assert "--set 'costs.model-bytes=14_000_000 costs.work-per-example=1.0'" in hint
    assert "model-bytes" not in hint_of(fleet(windows), model_bytes=10**6)


@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize(
    ("traces", "until"),
    [
        (fleet([[(0.0, 900.0)]] * 4), "950s"),
        (fleet([[(0.0, 900.0)]] * 4 + [[(0.0, 1.0)]]), "3 rounds"),
        (TraceSet.ideal(4), "3 rounds"),
        # Devices that never change show nothing in a longer run either.
        (TraceSet.constant(4, compute=1.0, downlink_bit_per_s=1e6, uplink_bit_per_s=1e6), "30s"),
    ],
    ids=["long", "changed", "ideal", "constant"],
)
def test_nothing_is_said_of_a_run_that_is_long_enough_or_of_devices_that_never_change(
    traces, until
):
    assert not hint_of(traces, until)
