"""The contract of a stage: every stage of the core and the shelf keeps it, and a broken one not."""

import runpy
from functools import partial
from itertools import count, product

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peer_sites import descending_app
from places import ROOT
from restored import not_restored
from stage_contract import check_stage, grid_of
from virtual_grid import VirtualGrid, record

from fedstale.client import CompressionMod, ForecastMod, PackMod, local_steps
from fedstale.contrib.audit import AuditRecord
from fedstale.contrib.kfac import KroneckerMean, SharedInverses, exchange_inverses
from fedstale.contrib.peers import Relay, ScreenMod
from fedstale.contrib.sites import Adapters
from fedstale.contrib.tickets import Tickets, TicketsMod
from fedstale.errors import ConfigError
from fedstale.simulation import FlowerApp
from fedstale.strategies import (
    Compression,
    FedAvg,
    FedBuff,
    ForecastRequest,
    LocalWork,
    Privacy,
    Stage,
    robust,
)
from fedstale.strategies.stages import Compatibility, OlderClients
from fedstale.strategies.types import scale

W = record(w=np.arange(4.0))
PAIR = {"q.lora_A.weight": np.ones((1, 3)), "q.lora_B.weight": np.ones((4, 1))}


def client(app=None):
    """Let an app's node i move each array a third of the way to i."""
    app = ClientApp() if app is None else app

    @app.train()
    def train(message, context):
        place = context.node_config["partition-id"]
        local_steps(message, 8, 1)
        arrays = {k: x.numpy() for k, x in message.content["arrays"].items()}
        changes = {k: (place - x) / 3 for k, x in arrays.items()}
        if "a.w" in changes or "b.w" in changes:
            # A pool of examples/pools: changes of its arrays alone.
            name = f"{'ab'[place % 2]}.w"
            found = {"arrays": record(**{name: changes[name]})}
            found["about"] = ConfigRecord({"fedstale.update": "delta"})
        else:
            found = {"arrays": record(**{k: arrays[k] + x for k, x in changes.items()})}
        found["metrics"] = MetricRecord({"num-examples": place + 1})
        return Message(RecordDict(found), reply_to=message)

    return app


def with_factors(message, context, call_next):
    """Add factors of the layer 0, of one input and a bias, to what a client replies."""
    reply = call_next(message, context)
    if message.metadata.message_type == "train":
        place = context.node_config["partition-id"]
        reply.content["kfac"] = record(**{"0.A": np.array([2.0, place, 3.0]), "0.G": np.ones(3)})
    return reply


def with_inverses(message, context, call_next):
    """Move what a client replies by the inverses that it has, and add factors as it is asked to."""
    place = context.node_config["partition-id"]
    factors = record(**{"0.A": np.array([2.0, place, 3.0]), "0.G": np.ones(3)})
    held, records = exchange_inverses(message, context, lambda: factors)
    reply = call_next(message, context)
    if message.metadata.message_type == "train":
        moved = sum(float(x.numpy().sum()) for x in held.values())
        arrays = {name: x.numpy() + 0.1 * moved for name, x in reply.content["arrays"].items()}
        reply.content.update({"arrays": record(**arrays), **records})
    return reply


def predict(pool, arrays, public):
    return np.full((len(public), 2), 0.5)


def pools(**options):
    app = FlowerApp.find(ROOT / "examples" / "pools")
    with app.importable():
        app.load_client()
        from pools_app.stage import Pools
    return Pools(np.zeros((3, 2)), predict, every=2)


def fisher(**options):
    return runpy.run_path(str(ROOT / "examples" / "fisher_merge.py"))["FisherMean"](0.1)


_NUMBERS = count()


@pytest.fixture
def records(tmp_path):
    """Return what makes a record of a run, the same one where it goes on."""

    def made(checkpoints=None, resume=None):
        folder = resume or checkpoints
        return AuditRecord((folder or tmp_path) / f"{0 if folder else next(_NUMBERS)}.jsonl")

    return made


NOISE = {"noise_multiplier": 1.0, "delta": 1e-5, "noise_seed": 3}
OWN_SIZE = {"normalise": "buffer_size"}
STAGES = {
    "compression": (
        lambda **_: Compression("int8", down="int8"),
        client(ClientApp(mods=[CompressionMod()])),
        W,
        {},
    ),
    "to the nearest": (
        lambda **_: Compression("int4"),
        client(ClientApp(mods=[CompressionMod()])),
        W,
        {},
    ),
    "a client that cannot": (lambda **_: Compression("int8"), client(), W, {}),
    "local work": (lambda **_: LocalWork(share=0.5), client(ClientApp(mods=[PackMod()])), W, {}),
    "requests": (lambda **_: ForecastRequest(), client(ForecastMod().client_app()), W, {}),
    "noise": (lambda **_: Privacy(clip_norm=1.0, **NOISE), client(), W, OWN_SIZE),
    "releases": (lambda **_: Compatibility(), client(), W, {}),
    "older clients": (lambda **_: OlderClients(is_on=False), client(), W, {}),
    "adapters": (lambda **_: Adapters(2), client(), Adapters.products(record(**PAIR)), {}),
    "peers": (
        lambda **_: Relay("ring", 3),
        descending_app(ScreenMod(robust.TrimmedMean(f=0))),
        record(x=np.zeros(4)),
        {},
    ),
    "peers' rule": (
        lambda **_: Relay("ring", 3, robust.TrimmedMean(f=0)),
        descending_app(ScreenMod(robust.TrimmedMean(f=0))),
        record(x=np.zeros(4)),
        {},
    ),
    "tickets": (
        lambda **_: Tickets(0.5, masks="round"),
        client(ClientApp(mods=[TicketsMod()])),
        record(w=np.arange(300.0).reshape(20, 15)),
        {},
    ),
    "example pools": (pools, client(), record(**{"a.w": np.ones(3), "b.w": np.ones(2)}), {}),
    "kronecker factors": (
        lambda **_: KroneckerMean(0.1),
        client(ClientApp(mods=[with_factors])),
        record(**{"0.weight": np.ones((2, 1)), "0.bias": np.ones(2)}),
        {},
    ),
    "shared inverses": (
        lambda **_: SharedInverses(0.1, every=2),
        client(ClientApp(mods=[with_inverses])),
        record(**{"0.weight": np.ones((2, 1)), "0.bias": np.ones(2)}),
        {},
    ),
    "example fisher": (fisher, client(), W, {}),
}


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_keeps_the_contract(name):
    stage, app, initial, settings = STAGES[name]
    check_stage(
        lambda **options: FedAvg(stages=[stage(**options)], **settings, **options), app, initial
    )


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_that_goes_on_holds_what_it_held(name):
    stage, app, initial, settings = STAGES[name]
    settings = {"normalise": "examples"} | settings
    # Of three replies at one instant the last waits in the buffer.
    for method, version in product((FedAvg, partial(FedBuff, 3, 2)), (2, 3)):
        make = partial(method, stages=[stage()], **settings)
        assert not_restored(make, partial(grid_of, app), initial, version) == []


def test_a_record_keeps_the_contract(records):
    check_stage(lambda **options: FedAvg(stages=[records(**options)], **options), client(), W)


@pytest.mark.parametrize(
    "name",
    [
        *("compression", "requests", "older clients", "adapters", "peers", "tickets"),
        *("example pools", "shared inverses"),
    ],
)
def test_a_loop_that_would_not_see_a_stage_is_refused(name):
    make, _, initial, _ = STAGES[name]
    refuses_another_loop(make(), initial)


def test_a_loop_that_would_write_no_record_is_refused(records):
    refuses_another_loop(records(), W)


def refuses_another_loop(stage, initial):
    with pytest.raises(ConfigError, match=f"cannot be wrapped with the stage {stage.name}"):
        FedAvg(stages=[stage]).configure_train(1, initial, ConfigRecord(), VirtualGrid({}))


class InPlace(Stage):
    def outgoing(self, job, content):
        content["config"]["you-are"] = job.node_id
        return content


class Half(Stage):
    """Halves each second step, and forgets at a checkpoint which one that is."""

    def __init__(self):
        self.n = 0

    def step(self, mean, updates):
        self.n += 1
        scale(mean, 1.0 - 0.5 * (self.n % 2))
        return {}


class Shared(Half):
    """The same, with a count that copies share."""

    counts = [0]  # noqa: RUF012 - this is the fault

    def step(self, mean, updates):
        self.counts[0] += 1
        self.n = self.counts[0] - 1
        return super().step(mean, updates)


class Own(Half):
    """Counts in an object that is not copied with it."""

    saved = ("seen",)

    def __init__(self):
        self.seen = Uncopied()

    def step(self, mean, updates):
        self.seen.n += 1
        return {}


class Uncopied:
    n = 0

    def __deepcopy__(self, memo):
        return self

    def __repr__(self):
        return f"Uncopied({self.n})"


class Trusting(Stage):
    def incoming(self, job, content):
        content["metrics"]["num-examples"]


@pytest.mark.parametrize(
    ("stage", "error", "text"),
    [
        (InPlace, ConfigError, "outgoing has changed the content"),
        (Half, ConfigError, "goes on from version 1, version 2 has another 'w'"),
        (Shared, ConfigError, "in a second run, version 1 has another 'w'"),
        (Own, ConfigError, "has changed the stage of the strategy"),
        (Trusting, KeyError, "metrics"),
    ],
)
def test_a_broken_stage_is_told_what_is_wrong(stage, error, text):
    with pytest.raises(error, match=text):
        check_stage(lambda **options: FedAvg(stages=[stage()], **options), client(), W)


def test_an_unknown_requirement_is_refused_by_the_strategy():
    class Unknown(Stage):
        requires = frozenset({"everything"})

    with pytest.raises(ConfigError, match=r"Unknown\.requires.*'any settings', 'last'"):
        FedAvg(stages=[Unknown()])
