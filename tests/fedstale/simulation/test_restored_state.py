"""A run that goes on holds all that the run held that stopped, or works it out again."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from restored import not_restored
from shared_fleets import synthetic
from tiny import COSTS

from fedstale.client import CompressionMod, ForecastMod, PackMod
from fedstale.contrib.tickets import TicketsMod
from fedstale.simulation import TraceGrid
from fedstale.strategies import parse

NOISE = "clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, noise_seed=3"
STRATEGIES = [
    "FedBuff(20, 4, fraction_evaluate=0.5, pace=Ramp(10))",
    "FedBuff(20, 4, pace=AdaSync(), validation=Validation(window=9))",
    "FedBuff(20, 4, robust=TrimmedMean(f=1))",
    "FedBuff(20, 4, normalise='examples')",
    "FedAvgM(10)",
    "FedYogi(10)",
    "FedAvgOverSelected(8)",
    "GapAware(20, 4, server_optimizer=Momentum())",
    "FADAS(20, 4)",
    "AsyncFedED(10)",
    "CA2FL(20, 4)",
    "FedStale(10)",
    "REFL(20, 4, selector=LeastAvailable())",
    "FedBuff(20, 4, selector=Oort())",
    "FedBuff(20, 4, selector=TiFL(2, interval=2))",
    "FedBuff(20, 4, selector=Credits(1.0))",
    "FedBuff(20, 4, selector=Likely(0.1, Probing(Oort())))",
    "FedBuff(20, 4, stages=[ForecastRequest(), Compression('int8', down='int8')])",
    f"FedAvg(10, stages=[Privacy({NOISE})], normalise='buffer_size')",
    "FedBuff(20, 4, stages=[Tickets(0.5)])",
]
MODEL = {"w": np.arange(300.0, dtype=np.float32).reshape(20, 15), "v": np.zeros(4, np.float32)}


def app():
    """Return a ClientApp whose nodes move the model by chance, and count their jobs."""
    made = ForecastMod().client_app(mods=[CompressionMod(), TicketsMod(), PackMod()])

    @made.train()
    def train(message, context):
        seen = context.state.config_records.get("seen", ConfigRecord({"times": 0}))["times"]
        context.state["seen"] = ConfigRecord({"times": seen + 1})
        rng = np.random.default_rng((context.node_config["partition-id"], seen))
        arrays = {k: x.numpy() for k, x in message.content["arrays"].items()}
        moved = {k: x + rng.standard_normal(x.shape, x.dtype) for k, x in arrays.items()}
        numbers = {"num-examples": int(rng.integers(1, 9)), "train_loss": rng.random()}
        content = {"arrays": record(moved), "metrics": MetricRecord(numbers)}
        return Message(RecordDict(content), reply_to=message)

    @made.evaluate()
    def evaluate(message, context):
        numbers = MetricRecord({"num-examples": 4, "accuracy": 0.5})
        return Message(RecordDict({"metrics": numbers}), reply_to=message)

    return made


def record(arrays):
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


@pytest.mark.parametrize("text", STRATEGIES)
def test_a_run_that_goes_on_holds_what_it_held(text):
    phones = synthetic(200, days=2, seed=1)
    lost = not_restored(
        lambda: parse(text, seed=2),
        lambda: TraceGrid(phones, app(), costs=COSTS),
        record(MODEL),
        6,
        timeout=300.0,
    )
    assert lost == []
