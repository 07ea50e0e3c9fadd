"""ShadowSync: exchanges by hand, steps by the trace, and a thread that trains meanwhile."""

import heapq
import threading
import time
from fractions import Fraction
from math import floor

import numpy as np
import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from tiny import message_to
from typer.testing import CliRunner
from virtual_grid import record

from fedstale.cli.main import app as cli
from fedstale.contrib.shadow import Background, Shadow
from fedstale.contrib.shadow.shadow import SHADOW, work_between
from fedstale.errors import ConfigError, FedstaleError
from fedstale.simulation import Costs, TraceGrid
from fedstale.strategies import FedBuff
from fedstale.strategies.server_optimizer import Momentum
from fedstale.strategies.weighting import constant
from fedstale.traces import Availability, Series, TraceSet

pytestmark = pytest.mark.usefixtures("_identity")

WORK_PER_STEP, MODEL_BYTES = 4.0, 1_000_000
TARGETS = (1.0, -3.0)
SPEEDS, TRANSFERS = (3.0, 8.0), (1.0, 1.375)
"""Of two sites: work units a second, and seconds of each way."""


def sites(**channels):
    n = len(SPEEDS)
    rates = 8.0 * MODEL_BYTES / np.array(TRANSFERS)
    made = {
        "availability": Availability.always(n),
        "compute": Series.constant(SPEEDS),
        "downlink": Series.constant(rates),
        "uplink": Series.constant(rates),
    }
    return TraceSet(device_ids=TraceSet.ideal(n).device_ids, **made | channels)


def stepped(w, target):
    """Return weights after a step that halves the gradient of a parabola."""
    return w - (w - target) / 2


class Sites:
    """Two sites with a number each, under a server; what they were asked for and the versions."""

    def __init__(self, shadow, traces=None, *, targets=TARGETS, concurrency=2, **options):
        self.seen, self.versions, self.own, self.targets = [], [], {}, targets
        client = ClientApp(mods=[self.look, shadow])
        client.train()(self.train)
        costs = Costs(work={"train": 0.0}, model_bytes=MODEL_BYTES)
        self.grid = TraceGrid(
            traces or sites(), client, costs=costs, run_config={"local-steps": 99}
        )
        self.strategy = FedBuff(concurrency, 1, **{"staleness": constant()} | options)

    def look(self, message, context, call_next):
        reply = call_next(message, context)
        site = int(context.node_config["partition-id"])
        steps = reply.content[SHADOW]["steps"]
        self.seen.append((context.device.job.downloaded_at, site, steps))
        self.own[site] = context.state[SHADOW]["w"].numpy().item()
        assert context.run_config == {"local-steps": 99}
        return reply

    def train(self, message, context):
        w = message.content["arrays"]["w"].numpy()
        for _ in range(context.run_config["local-steps"]):
            w = stepped(w, self.targets[int(context.node_config["partition-id"])])
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": record(w=w), "metrics": metrics}), reply_to=message)

    def run(self, n):
        def evaluate(version, arrays):
            self.versions.append(arrays["w"].numpy().item())

        with self.grid.running():
            initial = record(w=np.array([5.0]))
            self.strategy.start(self.grid, initial, n, 1e6, evaluate_fn=evaluate)
        return self


def by_hand(n, exchange, merge=lambda w, change: w + change):
    """Return versions, and arrivals with their steps, in exact fractions.

    Args:
        n: versions.
        exchange: takes own weights, the server's and the anchor; returns own, change and anchor.
        merge: takes the model and a change; returns the next model.
    """
    server, versions, seen = Fraction(5), [Fraction(5)], []
    own, anchor = [None, None], [None, None]
    since, done = [Fraction(0)] * 2, [Fraction(0)] * 2
    speeds, ways = (list(map(Fraction, some)) for some in (SPEEDS, TRANSFERS))
    events = [(way, site, "arrives", server) for site, way in enumerate(ways)]
    heapq.heapify(events)
    while len(versions) <= n:
        now, site, what, value = heapq.heappop(events)
        if what == "arrives":
            steps = 0
            if own[site] is None:
                own[site] = anchor[site] = value
            else:
                done[site] += speeds[site] * (now - since[site])
                steps = floor(done[site] / Fraction(WORK_PER_STEP))
                done[site] -= steps * Fraction(WORK_PER_STEP)
            since[site] = now
            for _ in range(steps):
                own[site] = stepped(own[site], Fraction(TARGETS[site]))
            own[site], change, anchor[site] = exchange(own[site], value, anchor[site])
            seen.append((float(now), site, steps))
            heapq.heappush(events, (now + ways[site], site, "replies", change))
        else:
            server = merge(server, value)
            versions.append(server)
            heapq.heappush(events, (now + ways[site], site, "arrives", server))
    return versions, seen


def close(found, wanted):
    np.testing.assert_allclose(found, [float(x) for x in wanted], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("a", [Fraction(1, 4), Fraction(3, 4)])
def test_two_sites_and_a_server_follow_the_elastic_recursion_in_fractions(a):
    def exchange(w, server, anchor):
        return w - a * (w - server), a * (w - server), None

    versions, seen = by_hand(15, exchange)
    found = Sites(Shadow(float(a), work_per_step=WORK_PER_STEP)).run(15)
    close(found.versions, versions)
    for one, other in zip(found.seen, seen, strict=False):
        # Other records of a message travel too.
        assert one == (pytest.approx(other[0], rel=1e-3), *other[1:])
    # Steps of both are of their speeds, and some exchanges have none.
    assert {steps for _, site, steps in seen if site == 0} == {0, 1, 2}
    assert {steps for _, site, steps in seen if site == 1} >= {5, 6}


def test_the_server_of_model_averaging_is_the_mean_of_what_sites_have_sent_last():
    a, last = Fraction(1, 2), [Fraction(5)] * 2

    def exchange(w, server, anchor):
        return w - a * (w - server), (w, anchor), w

    def merge(server, value):
        last.remove(value[1])
        last.append(value[0])
        return sum(last) / 2

    versions, _ = by_hand(15, exchange, merge)
    found = Sites(Shadow(0.5, "ma", work_per_step=WORK_PER_STEP), eta=0.5).run(15)
    close(found.versions, versions)


def test_sites_that_answer_at_once_move_the_model_beyond_their_mean_without_a_rate():
    n, ends = 6, {}
    for eta in (1.0, 1.0 / (n * 0.5)):
        found = Sites(
            Shadow(0.5, work_per_step=WORK_PER_STEP),
            TraceSet.constant(n, compute=4.0, downlink_bit_per_s=8e6, uplink_bit_per_s=8e6),
            targets=[1.0] * n,
            concurrency=n,
            eta=eta,
        )
        ends[eta] = abs(found.run(12 * n).versions[-1] - 1.0)
    assert ends[1 / 3] < 0.1
    assert ends[1.0] > 100.0


def test_block_updates_are_the_training_alone_and_go_through_the_servers_momentum():
    a, rate, beta, velocity = Fraction(1, 4), Fraction(1, 8), Fraction(1, 2), [Fraction(0)]

    def exchange(w, server, anchor):
        moved = w - a * (w - server)
        return moved, w - anchor, moved

    def merge(server, change):
        velocity[0] = beta * velocity[0] + change
        return server + rate * velocity[0]

    versions, _ = by_hand(15, exchange, merge)
    optimizer = Momentum(0.125, beta=0.5)
    shadow = Shadow(0.25, "bmuf", work_per_step=WORK_PER_STEP)
    close(Sites(shadow, server_optimizer=optimizer).run(15).versions, versions)


def test_averaging_without_a_pull_never_synchronises():
    found = Sites(Shadow(0.0, "ma", work_per_step=WORK_PER_STEP), eta=0.5).run(15)
    for site, target in enumerate(TARGETS):
        alone = 5.0
        for _ in range(sum(steps for _, s, steps in found.seen if s == site)):
            alone = stepped(alone, target)
        assert found.own[site] == alone
    # The mean moves all the same.
    assert found.versions[-1] == pytest.approx(np.mean(TARGETS), abs=0.1)


@pytest.mark.parametrize("sync", ["easgd", "ma", "bmuf"])
def test_a_whole_pull_takes_the_servers_model_and_none_leaves_the_sites(sync):
    own, server, first = ({"w": np.array([x])} for x in (0.1, 0.7, 0.3))
    assert Shadow(1.0, sync).exchange(own, server, first)[0] == server
    assert Shadow(0.0, sync).exchange(own, server, first)[0] == own
    # What elastic averaging then sends is the site's model, and none.
    if sync == "easgd":
        assert Shadow(1.0).exchange(own, server, first)[1] == own
        assert Shadow(0.0).exchange(own, server, first)[1] == server


def test_integers_stay_the_sites_own_and_dtypes_stay():
    own = {"w": np.ones(2, np.float32), "n": np.array(7)}
    server = {"w": np.zeros(2, np.float32), "n": np.array(3)}
    for sync in ("easgd", "ma", "bmuf"):
        for made in Shadow(0.5, sync).exchange(own, server, server):
            assert made["w"].dtype == np.float32
            assert made["n"] == 7


def test_steps_are_the_integral_of_the_speed_while_the_site_is_online():
    gaps = [[(0.0, 10.0), (14.0, 40.0)], [(0.0, 40.0)]]
    traces = sites(
        availability=Availability.of(gaps, 40.0, repeat=False),
        compute=Series.irregular(
            [([0.0, 3.0, 20.0], [4.0, 1.0, 6.5]), ([0.0, 6.0], [0.5, 9.0])], [40.0, 40.0]
        ),
    )
    # Site 0: 1.5 units/s less on the way, by hand: 2..3 at 4, 3..10 and 14..20 at 1, 20..22 at 6.5.
    assert work_between(traces, 0, 2.0, 22.0) == 4.0 + 7.0 + 6.0 + 13.0
    found = Sites(Shadow(0.5, work_per_step=WORK_PER_STEP), traces).run(12)
    for site in (0, 1):
        arrivals = [at for at, s, _ in found.seen if s == site]
        work = work_between(traces, site, arrivals[0], arrivals[-1])
        assert sum(n for _, s, n in found.seen if s == site) == floor(work / WORK_PER_STEP) > 0


def test_the_clock_runs_for_what_travels_alone():
    found = Sites(Shadow(0.5, work_per_step=WORK_PER_STEP)).run(15)
    for site, way in enumerate(TRANSFERS):
        arrivals = [at for at, s, _ in found.seen if s == site]
        np.testing.assert_allclose(np.diff(arrivals), 2 * way, rtol=1e-2)


def test_two_runs_are_equal_to_the_byte():
    one, other = (Sites(Shadow(0.3, work_per_step=WORK_PER_STEP)).run(15) for _ in range(2))
    assert (one.versions, one.seen) == (other.versions, other.seen)


def test_other_messages_reach_the_app_as_they_are():
    evaluate, context = message_to(1, kind="evaluate"), Context(1, 1, {}, RecordDict(), {})
    assert Shadow(0.5)(evaluate, context, lambda message, context: message) is evaluate


def test_an_error_of_the_app_leaves_the_sites_weights():
    found, fails = Sites(Shadow(0.5, work_per_step=WORK_PER_STEP)), iter([False, True])
    train, found.train = found.train, None
    kept = []

    def sometimes(message, context):
        kept.append((context.state[SHADOW]["w"].numpy().item(), context.run_config["local-steps"]))
        if next(fails, False):
            raise ValueError("no data")
        return train(message, context)

    client = ClientApp(mods=[Shadow(0.5, work_per_step=WORK_PER_STEP)])
    client.train()(sometimes)
    costs = Costs(work={"train": 0.0}, model_bytes=MODEL_BYTES)
    config = {"local-steps": 99}
    found.grid = TraceGrid(sites().take([1]), client, costs=costs, run_config=config)
    found.strategy = FedBuff(1, 1, staleness=constant())
    found.run(4)
    assert "no data" in " ".join(found.grid.events().to_pandas()["reason"].astype(str))
    (_, first), (weights, _), (after, _) = kept[:3]
    assert weights == after
    assert first == 5


def test_where_no_trace_says_the_steps_the_mod_says_what_is_missing():
    context = Context(1, 1, {}, RecordDict(), {})
    for shadow in (Shadow(0.5), Shadow(0.5, work_per_step=1.0)):
        with pytest.raises(ConfigError, match="expected work_per_step > 0, in a simulation"):
            shadow(message_to(1), context, None)
    for wrong in ({"elastic": 1.5}, {"sync": "gossip"}, {"work_per_step": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Shadow(**wrong)


APP = """
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from fedstale.contrib.shadow import Shadow
from fedstale.strategies import FedBuff
from fedstale.strategies.weighting import constant
import numpy as np

client = ClientApp(mods=[Shadow(0.5, work_per_step=2.0)])
server = ServerApp()


@client.train()
def train(message, context):
    w = message.content["arrays"].to_numpy_ndarrays()[0]
    w = w + 1.0 * context.run_config["local-steps"]
    metrics = MetricRecord({"num-examples": 1, "steps": context.run_config["local-steps"]})
    arrays = ArrayRecord([w])
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@server.main()
def main(grid, context):
    strategy = FedBuff(3, 1, staleness=constant())
    strategy.start(grid, ArrayRecord([np.zeros(9)]), num_rounds=context.run_config["rounds"])
"""
PYPROJECT = """
[project]
name = "shadowed"
version = "1.0"
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "shadowed:server"
clientapp = "shadowed:client"
[tool.flwr.app.config]
rounds = 12
local-steps = 1
[tool.fedstale]
model-bytes = 5000000
[tool.fedstale.work]
train = 0.0
"""


def test_it_runs_under_fedstale_simulate(tmp_path):
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "shadowed.py").write_text(APP)
    words = ["simulate", str(tmp_path), "--traces", "synthetic:3@sites", "--workers", "1"]
    result = CliRunner().invoke(cli, [*words, "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output


class Counter:
    """A number that each step moves by 1, as a thread trains it."""

    def __init__(self, shadow, **options):
        self.w, self.taken, self.raises = np.zeros(1), 0, None
        self.moved = threading.Event()
        self.trainer = Background(shadow, self.step, self.read, self.write, **options)

    def step(self):
        if self.raises:
            raise self.raises
        self.w = self.w + 1.0
        self.taken += 1
        self.moved.set()
        time.sleep(0.001)

    def read(self):
        return record(w=self.w)

    def write(self, arrays):
        self.w = arrays["w"].numpy().copy()

    def answer(self, value):
        message = message_to(1)
        message.content["arrays"] = record(w=np.array([value]))
        reply = self.trainer.answer(message, Context(1, 1, {}, RecordDict(), {}))
        return reply.content["arrays"]["w"].numpy().item(), reply.content[SHADOW]["steps"]

    def steps(self, n=1):
        for _ in range(n):
            self.moved.clear()
            assert self.moved.wait(20.0)

    @property
    def is_at_work(self):
        return any(thread.name == "shadow" for thread in threading.enumerate())


@pytest.fixture
def counter():
    """Return what makes a trainer that ends with the test."""
    made = []

    def make(*shadow, **options):
        made.append(Counter(Shadow(*shadow), **options))
        return made[-1]

    yield make
    for one in made:
        one.trainer.stop()


def test_the_thread_trains_while_an_exchange_is_on_its_way_and_every_step_is_told_once(counter):
    site = counter(0.5)
    assert site.answer(10.0) == (10.0, 0)
    told = 0
    for _ in range(5):
        site.steps(3)
        _, steps = site.answer(0.0)
        assert steps >= 2
        told += steps
    site.trainer.stop()
    left = site.taken - told
    assert site.answer(0.0)[1] == left


def test_the_lock_is_held_for_copies_alone(counter):
    site = counter(0.25)
    site.answer(10.0)
    exchange, own = site.trainer._shadow.exchange, []

    def slow(w, server, anchor):
        # Would wait for ever if the merge kept the steps waiting.
        site.steps(2)
        own.append(w["w"].item())
        return exchange(w, server, anchor)

    site.trainer._shadow.exchange = slow
    site.steps()
    before = site.taken
    sent, _ = site.answer(0.0)
    site.trainer.stop()
    assert sent == 0.25 * own[0]
    # What was trained meanwhile stays: each step is in the weights, and the pull once.
    assert site.w.item() == pytest.approx(10.0 + site.taken - 0.25 * own[0])
    assert site.taken >= before + 2


def test_it_is_the_exchange_of_the_mod(counter):
    site = counter(0.5, "ma")
    site.answer(10.0)
    site.steps(3)
    sent, steps = site.answer(2.0)
    site.trainer.stop()
    assert sent == 2.0 + steps
    own, left = site.w.item(), site.taken - steps
    assert site.answer(4.0) == (pytest.approx(4.0 + own - (10.0 + steps)), left)


def test_training_ends_when_told_when_idle_and_by_a_step_that_raises(counter):
    site = counter(0.5)
    site.answer(0.0)
    site.steps()
    site.trainer.stop()
    assert not site.is_at_work
    site.answer(0.0)
    site.steps()
    site.raises = ValueError("no data")
    site.trainer._thread.join(20.0)
    with pytest.raises(ValueError, match="no data"):
        site.answer(0.0)
    assert not site.is_at_work
    site.raises = None
    site.answer(0.0)
    site.steps()
    site.trainer.stop()
    idle = counter(0.5, idle_s=0.05)
    idle.answer(0.0)
    idle.trainer._thread.join(20.0)
    assert not idle.is_at_work
    idle.answer(0.0)
    idle.steps()


def test_in_a_simulation_it_is_refused_and_the_mod_is_named(counter):
    site, client = counter(0.5), ClientApp()
    client.train()(site.trainer.answer)
    grid = TraceGrid(sites(), client, costs=Costs(work={"train": 0.0}, model_bytes=MODEL_BYTES))
    refused = pytest.raises(FedstaleError, match=r"in a simulation, use .* Shadow\(.*work_per_step")
    with grid.running(), refused:
        FedBuff(2, 1).start(grid, record(w=np.zeros(1)), 3, 1e6)
    assert (site.taken, site.is_at_work) == (0, False)
