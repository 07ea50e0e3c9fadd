"""What clients state of their loss: whom it gets jobs, and what Validation(loss_from) makes of it.

Whole servers on forty devices that are alike but for their data; no window, rule or score is played
alone.
"""

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedstale.agents import AgentSelector
from fedstale.simulation import Costs, TraceGrid
from fedstale.strategies import FedAvg
from fedstale.strategies.selection import (
    RELEASED,
    ExpectedUtility,
    Fastest,
    LeastAvailable,
    MostReliable,
    Oort,
    PowerOfChoice,
    Random,
)
from fedstale.strategies.server.checks import Validation
from fedstale.traces import TraceSet

N, ROUNDS, FIRST_NODE = 40, 14, 1000
SELECTORS = {
    "expected utility": ExpectedUtility,
    "oort": Oort,
    "oort released": lambda: Oort(RELEASED),
    "power of choice": lambda: PowerOfChoice(20),
    "agent": AgentSelector,
    "random": Random,
    "fedcs": Fastest,
    "most reliable": MostReliable,
    "refl": LeastAvailable,
}


def client(hard, times):
    """Clients whose loss is `hard` times the usual, stated `times` as large.

    Their updates are longer by the root of it, as those of gradient descent are.
    """
    app = ClientApp()

    @app.train()
    def train(message, context):
        device = int(context.node_config["partition-id"])
        version = int(message.content["config"]["server-round"])
        rng = np.random.default_rng((device, version))
        loss = float(hard[device] * np.exp(rng.normal(0.0, 0.2)))
        direction = rng.standard_normal(8)
        step = 0.01 * np.sqrt(loss) * direction / np.linalg.norm(direction)
        arrays = [x + step for x in message.content["arrays"].to_numpy_ndarrays()]
        metrics = MetricRecord({"num-examples": 50, "train_loss": float(times[device]) * loss})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def drawn(share, seed):
    """Which of the devices are among some, drawn by chance."""
    return np.isin(np.arange(N), np.random.default_rng(seed).permutation(N)[: round(share * N)])


def fedavg(**options):
    return FedAvg(8, **options)


def jobs(make, *, times, hard=None, seed=0, strategy_of=fedavg, **validation):
    """The devices that jobs were sent to, in their order."""
    traces = TraceSet.constant(N, compute=1.0, downlink_bit_per_s=1e9, uplink_bit_per_s=1e9)
    hard = np.ones(N) if hard is None else hard
    costs = Costs(work_per_example=1.0, epochs=1, examples=50, model_bytes=1000)
    grid = TraceGrid(traces, client(hard, times), costs=costs, seed=seed)
    strategy = strategy_of(selector=make(), seed=seed, validation=Validation(**validation))
    with grid.running():
        strategy.start(grid, ArrayRecord([np.zeros(8)]), num_rounds=ROUNDS, timeout=900.0)
    return grid.events().to_pandas()["node_id"].to_numpy() - FIRST_NODE


@pytest.mark.parametrize(
    ("name", "more"), [("expected utility", 0.1), ("oort", 0.1), ("agent", 0.02)]
)
def test_where_losses_are_believed_three_times_the_loss_brings_more_than_a_fair_share(name, more):
    found = []
    for seed in range(3):
        some = drawn(0.1, seed)
        sent = jobs(SELECTORS[name], times=np.where(some, 3.0, 1.0), seed=seed)
        found.append(some[sent].mean())
    assert np.mean(found) > 0.1 + more


@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_where_norms_are_taken_no_pick_changes_by_a_stated_loss(name):
    lies = np.resize([0.0, 3.0, np.nan], N)
    lied = jobs(SELECTORS[name], times=np.where(drawn(0.5, 7), lies, 1.0), loss_from="norm")
    honest = jobs(SELECTORS[name], times=np.ones(N), loss_from="norm")
    np.testing.assert_array_equal(lied, honest)


@pytest.mark.parametrize("name", ["expected utility", "oort", "power of choice"])
def test_devices_with_hard_data_are_still_favoured(name):
    shares = {}
    for loss_from in ("stated", "norm"):
        some = [drawn(0.3, seed) for seed in range(3)]
        sent = [
            jobs(SELECTORS[name], times=np.ones(N), hard=np.where(x, 3.0, 1.0), loss_from=loss_from)
            for x in some
        ]
        shares[loss_from] = np.mean([x[s].mean() for x, s in zip(some, sent, strict=True)])
    assert shares["stated"] > 0.45
    assert shares["norm"] > 0.45
