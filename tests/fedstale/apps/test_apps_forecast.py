"""The built-in apps forecast when they are told to."""

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from places import APPS

from fedstale.client import FORECAST_RECORD, QUERY
from fedstale.simulation import TraceGrid
from fedstale.simulation.executors import InlineExecutor
from fedstale.traces import TraceSet


def answer_to_a_query(app, **run_config):
    config = app.run_config(run_config)
    client = InlineExecutor(app.load_client())
    grid = TraceGrid(TraceSet.ideal(2), client, costs=app.costs.resolved(config), run_config=config)
    job = {"work": 10.0, "download_bytes": 1e6, "upload_bytes": 1e6, "deadline_s": 600.0}
    with grid.running():
        question = RecordDict({"fedstale.job": ConfigRecord(job)})
        (reply,) = grid.send_and_receive([Message(question, 1000, QUERY)])
    return dict(reply.content[FORECAST_RECORD])


@pytest.mark.parametrize("name", APPS)
def test_a_built_in_app_forecasts_when_its_run_config_says_so(load, name):
    app = load(name)
    said = answer_to_a_query(app, forecasts=True)
    assert 0.0 <= said["p_finish"] <= 1.0
    assert said["duration_s"] >= 0.0
    assert "switched off" in answer_to_a_query(app)["error"]
