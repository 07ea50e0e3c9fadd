"""Random tickets: what is drawn, what travels, what each weight is the mean of, what is refused."""

import math

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from keeping_grid import KeepingGrid, KilledError
from tiny import COSTS, fleet
from virtual_grid import VirtualGrid, adder, content, record

from fedstale.contrib.tickets import SubNetwork, Tickets, TicketsMod
from fedstale.contrib.tickets.tickets import TICKETS, ratios, shapes_of
from fedstale.errors import ConfigError
from fedstale.simulation import TraceGrid
from fedstale.strategies import (
    Compression,
    FedAvg,
    FedBuff,
    GapAware,
    Privacy,
    Validation,
    parse,
)
from fedstale.strategies.methods import FedAsync
from fedstale.strategies.robust import TrimmedMean
from fedstale.strategies.server import pack, unpack
from fedstale.strategies.server.checkpoint import unpacked
from fedstale.strategies.types import FORECAST_RECORD

pytestmark = pytest.mark.usefixtures("_identity")

SHAPE = (16, 32)
MODEL = {
    "w": np.linspace(-1.0, 1.0, 512, dtype=np.float32).reshape(SHAPE),
    "v": np.ones((512, 1), np.float32),
    "bias": np.zeros(16, np.float32),
    "n": np.array(3),
}
SHAPES = shapes_of(record(**MODEL))


def numbers(arrays):
    return {name: array.numpy() for name, array in arrays.items()}


class Device:
    """A node with the mod, whose app adds a step to each number that it is given."""

    def __init__(self, step, *, delay=1.0, examples=1, has_mod=True):
        self.step, self.delay, self.examples = step, delay, examples
        self.mod = TicketsMod() if has_mod else None
        self.sent, self.seen, self.sizes = [], [], []
        self.context = Context(1, 1, {}, RecordDict(), {})

    def app(self, message, context):
        held = numbers(message.content["arrays"])
        assert TICKETS not in message.content
        self.seen.append(held)
        moved = {k: (x + self.step).astype(x.dtype) for k, x in held.items()}
        return Message(content(record(**moved), self.examples), reply_to=message)

    def __call__(self, message, grid):
        self.sent.append(message.content)
        own = Message(RecordDict(dict(message.content)), reply_to=message)
        own.metadata.__dict__.update(message.metadata.__dict__)
        reply = self.mod(own, self.context, self.app) if self.mod else self.app(own, self.context)
        # What is packed for the wire is unpacked before the server's stages see it.
        replied = unpack(reply.content)
        self.sizes.append({name: len(x.data) for name, x in replied["arrays"].items()})
        return self.delay, replied

    def kept(self, i=-1):
        return SubNetwork(**self.sent[i][TICKETS]).kept(SHAPES)

    def mask(self, name, i=-1):
        mask = np.zeros(MODEL[name].size, bool)
        mask[self.kept(i)[name]] = True
        return mask.reshape(MODEL[name].shape)


def start(strategy, nodes, rounds=1, grid=VirtualGrid, **settings):
    grid = grid(nodes) if isinstance(grid, type) else grid
    result = strategy.start(grid, record(**MODEL), num_rounds=rounds, **settings)
    return grid, numbers(result.arrays)


# What is merged.


def test_each_weight_is_the_mean_over_the_devices_that_had_it():
    nodes = {1: Device(1.0, examples=1), 2: Device(4.0, examples=3)}
    grid, after = start(FedAvg(stages=[Tickets(0.5)]), nodes)
    assert not grid.refused
    for name in ("w", "v"):
        one, two = (node.mask(name) for node in nodes.values())
        assert one.sum() == two.sum() == 256
        # By hand: (1 x 1 + 3 x 4) / 4 where both had it, and each one's own step elsewhere.
        moved = np.select([one & two, one, two], [3.25, 1.0, 4.0], 0.0)
        np.testing.assert_array_equal(np.unique(moved), [0.0, 1.0, 3.25, 4.0])
        np.testing.assert_allclose(after[name] - MODEL[name], moved, atol=1e-6)
    # What is small goes whole.
    np.testing.assert_allclose(after["bias"], 3.25)
    assert after["n"] == 6


@pytest.mark.parametrize("normalise", ["examples", "buffer_size", "weights"])
def test_a_whole_model_counts_for_each_weight_beside_a_sub_network(normalise):
    class Weak(Tickets):
        def ratio_of(self, node_id, forecast, last=1.0):
            return self.ratio if node_id == 1 else 1.0

    nodes = {1: Device(1.0, examples=1), 2: Device(4.0, examples=3)}
    grid, after = start(FedAvg(stages=[Weak(0.25)], normalise=normalise), nodes)
    assert not grid.refused
    assert TICKETS not in nodes[2].sent[0]
    both = 3.25 if normalise == "examples" else 2.5
    expected = np.where(nodes[1].mask("w"), both, 4.0)
    np.testing.assert_allclose(after["w"] - MODEL["w"], expected, atol=1e-6)


def test_a_stale_update_is_merged_by_the_sub_network_of_its_round():
    nodes = {1: Device(1.0, delay=1.0), 2: Device(4.0, delay=2.5)}
    strategy = FedBuff(2, 1, staleness=lambda age: 1.0, stages=[Tickets(0.25, masks="round")])
    grid, after = start(strategy, nodes, rounds=6)
    assert max(facts["staleness"] for _, facts in grid.merged) >= 2
    expected, counted = MODEL["w"].astype(np.float64), {1: 0, 2: 0}
    steps = {}
    for number, (_, message) in enumerate(grid.sent):
        node = message.metadata.dst_node_id
        steps[f"m{number}"] = nodes[node].mask("w", counted[node]) * nodes[node].step
        counted[node] += 1
    expected = expected + sum(steps[message_id] for message_id, _ in grid.merged)
    np.testing.assert_allclose(after["w"], expected, atol=1e-5)
    seeds = {sent[TICKETS]["seed"] for node in nodes.values() for sent in node.sent}
    assert len(seeds) == len({message.metadata.group_id for _, message in grid.sent}) > 3


def test_where_all_is_kept_the_model_is_that_of_fedavg_byte_for_byte():
    def models(stages):
        nodes = {k: Device(0.1 * k, delay=0.3 * k**2, examples=k) for k in (1, 2, 3)}
        strategy = GapAware(3, 2, stages=stages, seed=1)
        grid, _ = start(strategy, nodes, rounds=8)
        assert len(grid.models) == 8
        return nodes, [
            {name: array.data for name, array in arrays.items()} for _, arrays in grid.models
        ]

    _, plain = models([])
    nodes, whole = models([Tickets(1.0)])
    assert TICKETS not in nodes[1].sent[-1]
    # 512 weights of each layer, of which this keeps all: through each line that cuts and fills.
    nodes, drawn = models([Tickets(0.9999)])
    assert nodes[1].sent[-1]["arrays"]["w"].stype == "fedstale.ticket"
    assert plain == whole == drawn


# What is drawn, and what travels.


def test_server_and_device_draw_the_same_which_no_release_may_change():
    shapes = {"w": (32, 32), "least": (16, 16), "small": (15, 17)}
    kept = SubNetwork(0.0095, "uniform", 7).kept({k: ("float32", x) for k, x in shapes.items()})
    assert kept["w"].tolist() == PINNED
    assert list(kept) == ["w", "least"]
    # Of the last layer 153.6, and of the first what is left.
    kept = SubNetwork(0.4, "smart", 7).kept(SHAPES)
    assert [(name, len(at)) for name, at in kept.items()] == [("w", 256), ("v", 154)]


PINNED = [9, 22, 291, 303, 424, 856, 871, 884, 892, 976]


def test_only_kept_values_travel_once_a_reply_has_shown_the_mod():
    node = Device(1.0)
    _, after = start(FedAvg(stages=[Tickets(0.25)]), {1: node}, rounds=3)
    first, later = node.sent[0]["arrays"]["w"], node.sent[2]["arrays"]["w"]
    assert first.stype == "numpy.ndarray"
    assert len(later.data) == 128 * 4
    assert [sizes["w"] for sizes in node.sizes] == [128 * 4] * 3
    mask = node.mask("w")
    for seen in node.seen:
        assert not seen["w"][~mask].any()
        assert seen["w"][mask].any()
        assert seen["bias"].shape == (16,)
    np.testing.assert_array_equal(after["w"][~mask], MODEL["w"][~mask])
    np.testing.assert_allclose(after["w"][mask], MODEL["w"][mask] + 3.0, atol=1e-5)


def test_packed_messages_hold_the_same_sub_network():
    node = Device(1.0)
    start(FedAvg(stages=[Tickets(0.25)]), {1: node}, rounds=2)
    again = unpack(pack(node.sent[1]))
    assert again["arrays"] == node.sent[1]["arrays"]


@pytest.mark.parametrize(("masks", "n_draws"), [("device", 3), ("round", 4), ("nested", 1)])
def test_who_shares_a_sub_network(masks, n_draws):
    nodes = {k: Device(1.0) for k in (1, 2, 3)}
    start(FedAvg(stages=[Tickets(0.25, masks=masks)]), nodes, rounds=4)
    draws = {tuple(node.kept(i)["w"]) for node in nodes.values() for i in range(4)}
    assert len(draws) == n_draws


def test_a_smaller_sub_network_is_a_part_of_a_larger_one_of_the_same_draw():
    small, large = (SubNetwork(ratio, "smart", 3).kept(SHAPES) for ratio in (0.1, 0.4))
    for name in ("w", "v"):
        assert set(small[name]) < set(large[name])


@pytest.mark.parametrize("ratio", [0.02, 0.1, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("sizes", [[4096, 65536, 65536, 2560], [72, 1152, 7840], [900, 900]])
def test_smart_ratios_fall_with_depth_and_keep_as_much_as_uniform_ones(sizes, ratio):
    found = ratios(ratio, "smart", sizes)
    assert np.dot(found, sizes) == pytest.approx(ratio * sum(sizes))
    assert all(0.0 < x <= 1.0 for x in found)
    assert found[:-1] == sorted(found[:-1], reverse=True)


def test_smart_ratios_have_the_form_of_the_paper():
    one, two, three, last = ratios(0.1, "smart", [1000, 1000, 1000, 100])
    # k^2 + k for k = 4, 3, 2.
    assert (one / three, two / three, last) == pytest.approx((20 / 6, 12 / 6, 0.3))
    assert ratios(0.1, "uniform", [1000, 100]) == [0.1, 0.1]


# Which devices.


def forecasting(training_s, total_s):
    node = Device(1.0)

    def answer(message, grid):
        delay, reply = node(message, grid)
        times = {"levels": [0.5], "training_s": [training_s], "total_s": [total_s]}
        reply[FORECAST_RECORD] = ConfigRecord(times)
        return delay, reply

    return node, answer


def test_only_devices_that_would_take_longer_get_a_sub_network():
    (slow, one), (fast, two) = forecasting(10.0, 100.0), forecasting(10.0, 40.0)
    start(FedAvg(stages=[Tickets(0.25, within_s=60.0)]), {1: one, 2: two}, rounds=3)
    assert [TICKETS in sent for sent in slow.sent] == [False, True, True]
    assert not any(TICKETS in sent for sent in fast.sent)


def test_a_forecast_of_a_small_job_is_of_the_whole_one_by_its_ratio():
    stage = Tickets(0.25, within_s=60.0)
    small = {"levels": [0.5], "training_s": [10.0], "total_s": [25.0]}
    assert stage.ratio_of(1, small, last=0.25) == 0.25
    assert stage.ratio_of(1, small) == 1.0


# Bad replies, and apps without the mod.


def test_an_app_without_the_mod_answers_whole_models_and_a_sentence_says_so(caplog):
    nodes = {1: Device(1.0, has_mod=False), 2: Device(1.0)}
    nodes[1].app = adder_of(nodes[1])
    grid, after = start(FedAvg(stages=[Tickets(0.25)]), nodes, rounds=3)
    assert not grid.refused
    assert caplog.text.count("add TicketsMod() to its mods") == 1
    assert all(sent["arrays"]["w"].stype == "numpy.ndarray" for sent in nodes[1].sent)
    np.testing.assert_allclose(after["w"], MODEL["w"] + 3.0, atol=1e-5)


def adder_of(node):
    def app(message, context):
        return Message(adder(1.0)(message, None)[1], reply_to=message)

    return app


def bad(change):
    node = Device(1.0)

    def answer(message, grid):
        delay, reply = node(message, grid)
        return delay, change(reply) or reply

    return answer


def renamed(reply):
    arrays = dict(reply["arrays"])
    arrays["x"] = arrays.pop("w")
    reply["arrays"] = type(reply["arrays"])(arrays)


def longer(reply):
    reply["arrays"]["w"].data += b"\0" * 4


def single(reply):
    reply["arrays"]["w"].data = b"\0" * 4


def whole(reply):
    reply["arrays"]["w"] = record(w=MODEL["w"])["w"]


def none(reply):
    del reply["arrays"]


@pytest.mark.parametrize("change", [renamed, longer, single, whole, none])
def test_a_reply_that_is_not_the_sub_network_is_rejected(change):
    nodes = {1: bad(change), 2: Device(1.0), 3: Device(1.0)}
    grid, after = start(FedAvg(stages=[Tickets(0.25)]), nodes)
    ((message_id, reason),) = grid.refused
    assert grid.sent[int(message_id[1:])][1].metadata.dst_node_id == 1
    assert "the reply to a ticket of 0.25 cannot be filled up" in reason
    mask = nodes[2].mask("w") | nodes[3].mask("w")
    np.testing.assert_array_equal(after["w"] != MODEL["w"], mask)


def test_a_model_of_nan_is_rejected_by_the_checks():
    def spoiled(reply):
        n = len(reply["arrays"]["w"].data)
        reply["arrays"]["w"].data = np.full(n // 4, np.nan, np.float32).tobytes()

    nodes = {1: bad(spoiled), 2: Device(1.0)}
    grid, after = start(FedAvg(stages=[Tickets(0.25)]), nodes)
    assert "NaN" in grid.refused[0][1]
    assert np.isfinite(after["w"]).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"robust": TrimmedMean(f=1)}, r"strategy\.robust = .*expected None beside Tickets"),
        ({"normalise": "steps"}, r"strategy\.normalise = 'steps': expected examples"),
        ({"update": "model"}, r"strategy\.update = 'model': expected 'delta'"),
        ({"stages": [Compression("int8")]}, r"strategy\.stages = .*none of .*'Compression'"),
        (
            {
                "stages": [Privacy(clip_norm=1.0, noise_multiplier=1.0, delta=1e-5)],
                "normalise": "buffer_size",
            },
            r"strategy\.stages",
        ),
    ],
)
def test_what_would_take_missing_weights_for_zeros_is_refused(settings, words):
    stages = [Tickets(0.25), *settings.pop("stages", [])]
    with pytest.raises(ConfigError, match=words):
        start(FedAvg(stages=stages, **settings), {1: Device(1.0)})
    if "robust" in settings:
        with pytest.raises(ConfigError, match="'delta'"):
            start(FedAsync(3, stages=stages), {1: Device(1.0)})


@pytest.mark.parametrize("ratio", [0.0, 1.5, True, "half", math.nan])
def test_a_ratio_is_a_share(ratio):
    with pytest.raises(ConfigError, match=r"strategy\.Tickets\.ratio = .*\(0, 1\]"):
        Tickets(ratio)


def test_the_stage_is_a_part_of_a_strategy_in_text():
    made = parse("FedBuff(10, 5, stages=[Tickets(0.25, layers='smart', within_s=600)])")
    assert repr(made.stages[0]) == ("Tickets(0.25, layers='smart', masks='device', within_s=600)")


# Going on, and in a simulation.


def kept_run(grid):
    strategy = FedBuff(4, 2, stages=[Tickets(0.3, masks="round")], seed=2)
    result = strategy.start(grid, record(**MODEL), num_rounds=9, timeout=50.0)
    return [array.data for array in result.arrays.values()], [
        {name: array.data for name, array in message.content["arrays"].items()}
        for _, message in grid.sent
    ]


def devices(delay=lambda k: 0.3 * k**2):
    return {k: Device(0.1 * k, delay=delay(k)) for k in (1, 2, 3, 5)}


@pytest.mark.parametrize("die_at", [1, 3, 5])
@pytest.mark.parametrize("delay", [lambda k: 0.3 * k**2, lambda k: 1.0 + k // 5])
def test_a_run_that_was_cut_off_with_jobs_in_flight_goes_on_to_the_same_bytes(die_at, delay):
    expected = kept_run(KeepingGrid(devices(delay)))
    grid = KeepingGrid(devices(delay), die_at=die_at)
    with pytest.raises(KilledError):
        kept_run(grid)
    # A reply may come before anything is sent again.
    assert set(unpacked(grid.kept)["stages"]["Tickets"]["_shapes"]) == set(MODEL)
    # Three replies at an instant: one is beside the step of two, and waits with its sub-network.
    if delay(1) == delay(2) and die_at == 1:
        assert len(unpacked(grid.kept)["buffer"]["updates"]) == 1
    grid.die_at = None
    assert kept_run(grid) == expected


def test_nothing_is_kept_of_updates_that_go_into_no_step():
    stages = []

    class Watched(Tickets):
        def begin(self, run, state):
            super().begin(run, state)
            stages.append(self)

    nodes = devices() | {7: Device(1e9, delay=0.5)}
    strategy = FedBuff(5, 3, stages=[Watched(0.3)], validation=Validation(norm_bound=2.0, enough=3))
    grid, _ = start(strategy, nodes, rounds=6)
    assert any("norm" in reason for _, reason in grid.refused)
    out = {update for update, _ in grid.merged}
    assert not out & set(stages[0]._held)
    assert not {message_id for message_id, _ in grid.refused} & set(stages[0]._held)


def test_a_simulation_charges_the_bytes_of_what_travels():
    app = ClientApp(mods=[TicketsMod()])

    @app.train()
    def train(message, context):
        arrays = {k: x.numpy() for k, x in message.content["arrays"].items()}
        moved = {k: (x + 1).astype(x.dtype) for k, x in arrays.items()}
        found = {"arrays": record(**moved), "m": MetricRecord({"num-examples": 10})}
        return Message(RecordDict(found), reply_to=message)

    devices = fleet([[(0.0, 1000.0)]] * 2)
    grid = TraceGrid(devices, app, costs=COSTS)
    with grid.running():
        big = {"w": np.ones((400, 100), np.float32)}
        FedAvg(stages=[Tickets(0.25)]).start(grid, record(**big), num_rounds=3)
    events = grid.events().to_pandas()
    assert events["uploaded_bytes"].to_numpy() == pytest.approx([0.25e6] * 6, abs=2e3)
    assert events["downloaded_bytes"].to_numpy() == pytest.approx([1e6] * 2 + [0.25e6] * 4, abs=2e3)
    # Dense kernels save nothing: the work is that of a whole job.
    assert events["compute_s"].to_numpy() == pytest.approx([10.0] * 6)
