"""The built-in apps' clients of FedProx: a term in the loss, wherever they are trained."""

from contextlib import ExitStack

import numpy as np
import pytest
from flwr.app import Message
from places import BATCHED

from fedstale.simulation import TraceGrid
from fedstale.simulation.executors.choice import executor_for
from fedstale.traces import TraceSet


@pytest.fixture
def trained(opened):
    """Return a function that trains two devices with some mu; returns weights, losses, start."""

    def trained(name, executor, mu):
        app, client, run_config, content = opened(name, **{"proximal-mu": mu})
        run_config = run_config | {"learning-rate": 0.1}
        with ExitStack() as stack:
            running = stack.enter_context(executor_for(app, client, executor, 1, None))
            grid = TraceGrid(
                TraceSet.ideal(2),
                running,
                costs=app.costs.resolved(run_config),
                run_config=run_config,
            )
            stack.enter_context(grid.running())
            sent = [Message(content, node, "train") for node in sorted(grid.get_node_ids())]
            replies = sorted(grid.send_and_receive(sent), key=lambda r: r.metadata.src_node_id)
        arrays = [reply.content["arrays"].to_numpy_ndarrays() for reply in replies]
        losses = [reply.content["metrics"]["train_loss"] for reply in replies]
        return arrays, losses, content["arrays"].to_numpy_ndarrays()

    return trained


def distance(arrays, start):
    return np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(arrays, start, strict=True)))


@pytest.mark.parametrize("name", BATCHED)
def test_a_client_stays_nearer_with_a_larger_mu_and_executors_agree(trained, name):
    free, _, start = trained(name, "inline", 0.0)
    bound, losses, _ = trained(name, "inline", 2.0)
    many, many_losses, _ = trained(name, "batched", 2.0)
    for one, other, same in zip(free, bound, many, strict=True):
        assert distance(other, start) < 0.9 * distance(one, start)
        for array, twin in zip(other, same, strict=True):
            np.testing.assert_allclose(array, twin, atol=1e-4)
    assert losses == pytest.approx(many_losses, rel=1e-3)
