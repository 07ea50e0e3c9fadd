import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from tiny import COSTS, fleet, message_to

from fedstale.simulation.trace_grid import TraceGrid


def saying(p_finish, **more):
    app = ClientApp()

    @app.train()
    def train(message, context):
        arrays = ArrayRecord(message.content["arrays"].to_numpy_ndarrays())
        metrics = MetricRecord({"num-examples": 10})
        said = ConfigRecord({**({} if p_finish is None else {"p_finish": p_finish}), **more})
        content = {"arrays": arrays, "metrics": metrics, "fedstale.forecast": said}
        return Message(RecordDict(content), reply_to=message)

    return app


def stated(app, n=2, column="reported_p_finish"):
    grid = TraceGrid(fleet([[(0.0, 1000.0)]]), app, costs=COSTS)
    with grid.running():
        for _ in range(n):
            list(grid.send_and_receive([message_to(1000)]))
    return grid, grid.events()[column].to_pylist()


@pytest.mark.parametrize(
    ("app", "column", "said"),
    [
        (saying(0.75), "reported_p_finish", 0.75),
        (saying(None, duration_s=30.0), "reported_duration_s", 30.0),
    ],
)
def test_a_job_holds_what_its_device_said_before(app, column, said):
    _, found = stated(app, 3, column)
    assert np.isnan(found[0])
    assert found[1:] == [said, said]


@pytest.mark.parametrize("said", [None, 1.5, -0.1, float("nan"), "sure", [0.5]])
def test_what_is_no_chance_is_not_held_against_a_device(said):
    assert np.isnan(stated(saying(said))[1]).all()


@pytest.mark.parametrize("said", [0.0, -1.0, float("inf"), float("nan"), "soon", [30.0]])
def test_what_is_no_duration_is_not_held_against_a_device(said):
    app = saying(0.5, duration_s=said)
    assert np.isnan(stated(app, column="reported_duration_s")[1]).all()
    assert stated(app)[1][1:] == [0.5]


def test_a_checkpoint_holds_what_was_said():
    grid, _ = stated(saying(0.75, duration_s=30.0), 1)
    state = grid.state_dict()
    other = TraceGrid(fleet([[(0.0, 1000.0)]]), saying(0.75), costs=COSTS)
    other.load_state_dict(state)
    with other.running():
        list(other.send_and_receive([message_to(1000)]))
    assert other.events()["reported_p_finish"].to_pylist()[-1] == 0.75
    assert other.events()["reported_duration_s"].to_pylist()[-1] == 30.0
