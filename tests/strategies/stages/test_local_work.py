"""Shares of the local epochs: which one a node is asked for, what is sent, and what is believed."""

import logging

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.error import Error
from hypothesis import given
from hypothesis import strategies as st
from virtual_grid import VirtualGrid, record

from fedstale.client import CompressionMod, ForecastMod, PackMod, local_steps
from fedstale.errors import ConfigError, ProtocolError
from fedstale.strategies import (
    Compression,
    FedAvg,
    FedBuff,
    LocalWork,
    Privacy,
    robust,
)
from fedstale.strategies.selection import Fastest
from fedstale.strategies.stages.local_work import WORK, StepsDone, asked_share, asking, steps_of
from fedstale.strategies.types import FORECAST_RECORD, Candidates, History

pytestmark = pytest.mark.usefixtures("_identity")

LEVELS = [0.1, 0.5, 0.9]


def forecast(training_s, *, download_s=20.0, upload_s=30.0, share=None):
    """Return what a device forecasts of a job whose medians are these."""
    times = {"training_s": training_s, "reporting_s": upload_s}
    times["total_s"] = download_s + training_s + upload_s
    said = {name: [s / 2, s, 2 * s] for name, s in times.items()}
    said |= {"levels": LEVELS, "duration_s": times["total_s"]}
    return said | ({} if share is None else {"share": share})


# The rule.


@given(
    st.floats(0.0, 1e4),
    st.floats(0.0, 1e3),
    st.floats(0.0, 1e3),
    st.floats(0.1, 1e4),
    st.sampled_from([0.125, 0.2, 0.5, 1.0]),
)
def test_the_share_is_the_largest_eighth_that_fits(full_job_s, down_s, up_s, at_most_s, least):
    within = LocalWork(within_s=at_most_s, least=least)
    found = within.share_of(forecast(full_job_s, download_s=down_s, upload_s=up_s))
    allowed = [eighths / 8 for eighths in range(1, 9) if eighths / 8 >= least]
    took_s = {share: down_s + share * full_job_s + up_s for share in allowed}
    fits = [share for share in allowed if took_s[share] <= at_most_s * (1 + 1e-7)]
    tightly = [share for share in fits if took_s[share] <= at_most_s * (1 - 1e-7)]
    smallest = min(e / 8 for e in range(1, 9) if e / 8 >= least)
    assert max(tightly, default=smallest) <= found <= max(fits, default=smallest)


@pytest.mark.parametrize("share", [0.125, 0.25, 0.5, 0.7, 1.0])
def test_the_share_is_that_of_a_whole_job_whatever_the_last_one_was(share):
    within = LocalWork(within_s=250.0)
    # 50 s on the link, and 400 s of training in full: 200 s are 4 eighths.
    assert within.share_of(forecast(400.0 * share, share=share)) == 0.5


def test_a_smaller_upload_leaves_time_for_training():
    within = LocalWork(within_s=250.0)
    said = forecast(400.0, upload_s=100.0, download_s=0.0)
    assert within.share_of(said) == 0.375
    assert within.share_of(said, upload=0.0) == 0.625


def test_without_a_forecast_it_is_a_half():
    within = LocalWork(within_s=10.0)
    queried = {"version": 1.0, "p_available": 0.9}
    assert LocalWork(within_s=10.0, least=0.6).share_of({}) == 0.625
    broken = forecast(5.0) | {"total_s": [1.0, 2.0, 3.0]}
    for said in ({}, queried, broken, forecast(float("nan")), forecast(5.0) | {"levels": [0.1]}):
        assert within.share_of(said) == 0.5


@pytest.mark.parametrize("share", [0.0, -1.0, float("nan"), float("inf"), True, "x", [0.5]])
def test_a_forecast_with_an_impossible_share_is_taken_for_one_of_a_whole_job(share):
    said = forecast(400.0) | {"share": share}
    assert LocalWork(within_s=250.0).share_of(said) in (0.5, 1.0)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: LocalWork(0.1), "LocalWork.share = 0.1: expected a whole number of eighths"),
        (lambda: LocalWork(0.0), "from 0.125 to 1"),
        (lambda: LocalWork(1.125), "from 0.125 to 1"),
        (lambda: LocalWork(float("nan")), "from 0.125 to 1"),
        (lambda: LocalWork("half"), "from 0.125 to 1"),
        (lambda: LocalWork(True), "from 0.125 to 1"),
        (
            lambda: LocalWork(within_s=0.0),
            "LocalWork.within_s = 0.0: expected a finite number of seconds > 0",
        ),
        (
            lambda: LocalWork(within_s=float("inf")),
            "LocalWork.within_s = inf: expected a finite number of seconds > 0",
        ),
        (
            lambda: LocalWork(within_s=60, least=0.1),
            "LocalWork.least = 0.1: expected a number from",
        ),
        (
            lambda: LocalWork(within_s=60, least=1.1),
            "LocalWork.least = 1.1: expected a number from",
        ),
        (lambda: LocalWork(0.5, within_s=60), "LocalWork.within_s = 60: expected"),
        (
            lambda: FedAvg(stages=[LocalWork(0.5), Compression("int8")]),
            "LocalWork comes before Compression, and knows no size",
        ),
        (lambda: FedAvg(stages=[LocalWork(0.5)] * 2), "strategy.stages = "),
        (lambda: FedAvg(normalise="step"), "strategy.FedAvg.normalise = 'step': expected examples"),
        (
            lambda: FedAvg(normalise="steps", robust=robust.Median(f=1)),
            "strategy.normalise = 'steps': expected another one with a robust rule",
        ),
        (
            lambda: FedBuff(
                2,
                2,
                normalise="steps",
                stages=[Privacy(clip_norm=1.0, noise_multiplier=1.0, delta=1e-6)],
            ),
            "strategy.normalise = 'steps': expected 'buffer_size' with Privacy",
        ),
    ],
)
def test_settings_out_of_range_are_refused_by_name(made, text):
    with pytest.raises(ConfigError) as found:
        made()
    assert text in str(found.value)


def test_a_strategy_names_its_share():
    assert "stages=(LocalWork(share=0.25" in repr(FedBuff(2, 1, stages=[LocalWork(0.25)]))


# What is said.


@given(st.integers(1, 8), st.integers(0, 10_000))
def test_steps_are_at_most_the_share_and_at_least_one(eighths, whole):
    steps = steps_of(eighths / 8, whole)
    assert min(1, whole) <= steps <= max(eighths * whole / 8, min(1, whole))
    assert steps > eighths * whole / 8 - 1
    if eighths == 8:
        assert steps == whole


@pytest.mark.parametrize("share", [0.0, 0.1, 1.5, -0.5, float("nan"), "half", True, [0.5]])
def test_a_message_that_asks_for_no_share_is_refused_by_name(share):
    content = RecordDict({"config": ConfigRecord({WORK: share})})
    message = Message(content, 1, "train")
    with pytest.raises(ProtocolError, match=r"fedstale\.work = .*: expected a whole number of ei"):
        local_steps(message, 2, 4)


def test_asking_changes_no_other_key_and_not_the_record_itself():
    config = ConfigRecord({"server-round": 3})
    asked = asking(config, 0.375)
    assert dict(asked) == {"server-round": 3, WORK: 0.375}
    assert dict(config) == {"server-round": 3}
    assert asked_share(RecordDict({"config": asked})) == 0.375
    assert asked_share(RecordDict({"config": config})) is None


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"steps": 3},
        {"steps": 0, "whole": 4},
        {"steps": 5, "whole": 4},
        {"steps": -1, "whole": 4},
        {"steps": 1.0, "whole": 4},
        {"steps": True, "whole": True},
        {"steps": "1", "whole": "2"},
        {"steps": [1], "whole": [2]},
        {"steps": 1, "whole": 10**15},
    ],
)
def test_a_statement_that_cannot_be_is_none(said):
    assert StepsDone.of(RecordDict({WORK: ConfigRecord(said)})) is None
    assert StepsDone.of(RecordDict({WORK: MetricRecord()})) is None
    assert StepsDone.of(RecordDict()) is None


def test_a_statement_is_read_as_it_was_written():
    done = StepsDone(3, 12)
    assert StepsDone.of(RecordDict({WORK: done.record()})) == done
    assert done.share == 0.25


# Runs.


class Device:
    """A node whose each local step adds to the weights, and whose replies take as long."""

    def __init__(self, node=1, *, mods=None, reads=True, whole=16, examples=1, forecast_s=None):
        self.context = Context(1, node, {}, RecordDict(), {})
        self.mods = [PackMod()] if mods is None else mods
        self.reads, self.whole, self.examples = reads, whole, examples
        self.forecast_s = forecast_s
        self.rate = np.float32(0.25 * node)
        self.received, self.replies, self.steps = [], [], []

    def train(self, message, context):
        steps = local_steps(message, 1, self.whole) if self.reads else self.whole
        self.steps.append(steps)
        arrays = {k: a.numpy() + steps * self.rate for k, a in message.content["arrays"].items()}
        metrics = MetricRecord({"num-examples": self.examples, "train_loss": 1.0})
        return Message(
            RecordDict({"arrays": record(**arrays), "metrics": metrics}), reply_to=message
        )

    def __call__(self, message, grid):
        self.received.append(message.content)
        own = Message(RecordDict(dict(message.content)), 1, message.metadata.message_type)
        own.metadata.__dict__.update(message.metadata.__dict__)

        def call(message, context, mods=tuple(self.mods)):
            if not mods:
                return self.train(message, context)
            return mods[0](message, context, lambda m, c: call(m, c, mods[1:]))

        try:
            reply = call(own, self.context)
        except ProtocolError as problem:
            return 1.0, Error(1, str(problem))
        if self.forecast_s is not None:
            share = self.steps[-1] / self.whole
            said = forecast(self.forecast_s * share, share=share)
            reply.content[FORECAST_RECORD] = ConfigRecord(said)
        self.replies.append(reply)
        return 50.0 + self.steps[-1], reply.content


MODEL = {"w": np.zeros(4, np.float32)}


def start(strategy, nodes, rounds=1, model=MODEL, **settings):
    grid = VirtualGrid(nodes)
    result = strategy.start(grid, record(**model), num_rounds=rounds, **settings)
    return grid, {name: array.numpy() for name, array in result.arrays.items()}


def shares(device):
    return [asked_share(content) for content in device.received]


def test_without_the_setting_nothing_is_asked_and_nothing_is_said():
    reads, ignores = Device(), Device(reads=False)
    start(FedAvg(), {1: reads}, 2)
    start(FedAvg(), {1: ignores}, 2)
    assert shares(reads) == [None, None]
    assert reads.received == ignores.received
    for one, other in zip(reads.replies, ignores.replies, strict=True):
        assert one.content == other.content
        assert WORK not in one.content
    assert not reads.context.state


def test_every_node_is_asked_for_a_fixed_share_and_says_what_it_did():
    nodes = {k: Device(k) for k in (1, 2)}
    _, model = start(FedAvg(stages=[LocalWork(0.25)]), nodes, 3)
    for device in nodes.values():
        assert shares(device) == [0.25] * 3
        assert device.steps == [4, 4, 4]
        assert {StepsDone.of(reply.content) for reply in device.replies} == {StepsDone(4, 16)}
    np.testing.assert_allclose(model["w"], 3 * 4 * 0.25 * 1.5)


def test_nodes_with_one_share_are_sent_the_same_records():
    nodes = {k: Device(k) for k in (1, 2)}
    grid, _ = start(FedAvg(stages=[LocalWork(0.5)]), nodes)
    (_, one), (_, other) = grid.sent
    assert one.content is other.content


def test_each_node_is_asked_for_what_its_forecast_fits():
    # 50 s on the link and 100, 400 and 4000 s of training in full.
    nodes = {k: Device(k, forecast_s=s) for k, s in ((1, 100.0), (2, 400.0), (3, 4000.0))}
    start(FedAvg(stages=[LocalWork(within_s=250.0)]), nodes, 4)
    assert shares(nodes[1]) == [0.5, 1.0, 1.0, 1.0]
    assert shares(nodes[2]) == [0.5, 0.5, 0.5, 0.5]
    assert shares(nodes[3]) == [0.5, 0.125, 0.125, 0.125]


@pytest.mark.parametrize(
    "mods",
    [
        [PackMod()],
        [CompressionMod()],
        [ForecastMod()],
        [CompressionMod(), ForecastMod()],
        [ForecastMod(), CompressionMod()],
        [PackMod(), CompressionMod()],
    ],
)
def test_any_mod_of_fedstale_states_it_in_any_order(mods):
    device = Device(mods=mods)
    start(FedAvg(stages=[LocalWork(0.5)]), {1: device}, 2)
    assert StepsDone.of(device.replies[-1].content) == StepsDone(8, 16)


def test_smaller_messages_and_less_work_go_together():
    model = {"w": np.zeros(600, np.float32)}
    device = Device(mods=[CompressionMod()])
    strategy = FedAvg(stages=[Compression("int8", down="int8"), LocalWork(0.5)])
    grid, moved = start(strategy, {1: device}, 3, model)
    assert not grid.refused
    assert shares(device) == [0.5] * 3
    np.testing.assert_allclose(moved["w"], 3 * 8 * 0.25, atol=0.05)


def test_an_app_that_does_not_read_its_share_is_named_once(caplog):
    nodes = {1: Device(1, reads=False), 2: Device(2, reads=False)}
    with caplog.at_level(logging.WARNING):
        start(FedAvg(stages=[LocalWork(0.5)]), nodes, 3)
    (line,) = [text for text in caplog.messages if text.startswith("LocalWork: ")]
    assert "fedstale.client.local_steps" in line
    assert nodes[1].steps == [16, 16, 16]


@pytest.mark.parametrize("stages", [[], [LocalWork(1.0)]])
def test_whole_jobs_are_no_reason_to_warn(caplog, stages):
    with caplog.at_level(logging.WARNING):
        start(FedAvg(stages=stages), {1: Device(1, reads=False)}, 2)
    assert not caplog.records


# What selectors see.


def test_less_work_does_not_make_a_device_look_fast():
    # Both take 50 s on the link; a whole training takes 16 s and 160 s.
    fast, slow = Device(1, forecast_s=100.0), Device(2, whole=160, forecast_s=900.0)
    seen = {}

    class Noting(Fastest):
        def select(self, candidates, k, now, rng):
            seen.update(zip(candidates.node_ids.tolist(), candidates.duration_s, strict=True))
            return super().select(candidates, k, now, rng)

    strategy = FedAvg(stages=[LocalWork(within_s=160.0)], selector=Noting())
    start(strategy, {1: fast, 2: slow}, 4)
    assert shares(slow)[-1] == 0.125
    # The slow one took 50 + 20 s with an eighth, and would take 787 s more by its forecast.
    assert seen[2] > 700
    assert seen[1] < 100


def test_a_forecast_of_an_eighth_is_shown_as_one_of_a_whole_job():
    history = History()
    history.forecast(7, forecast(50.0, share=0.125), 0.0)
    history.forecast(8, forecast(50.0), 0.0)
    history.forecast(9, {"duration_s": 100.0, "share": 0.125}, 0.0)
    shown = history.candidates([7, 8, 9]).forecast_duration_s
    np.testing.assert_allclose(shown, [20 + 400 + 30, 100, 100])
    assert isinstance(history.candidates([7]), Candidates)


# FedNova.


def naive_fednova(w, deltas, examples, steps):
    """Return the model after a step of Wang et al. (2020), written down as in the paper."""
    p = np.array(examples, float) / np.sum(examples)
    d = [delta / tau for delta, tau in zip(deltas, steps, strict=True)]
    tau_effective = sum(p_i * tau for p_i, tau in zip(p, steps, strict=True))
    return w + tau_effective * sum(p_i * d_i for p_i, d_i in zip(p, d, strict=True))


@pytest.mark.parametrize("stages", [[], [LocalWork(0.5)]])
def test_steps_are_normalised_as_in_the_paper(stages):
    nodes = {k: Device(k, whole=16 * k, examples=3 * k) for k in (1, 2, 3)}
    _, model = start(FedAvg(normalise="steps", stages=stages), nodes)
    steps = [nodes[k].steps[0] for k in nodes]
    deltas = [steps[i] * nodes[k].rate for i, k in enumerate(nodes)]
    expected = naive_fednova(0.0, deltas, [3, 6, 9], steps)
    np.testing.assert_allclose(model["w"], expected, rtol=1e-6)
    assert abs(model["w"][0] - np.average(deltas, weights=[3, 6, 9])) > 0.5


@pytest.mark.parametrize("n", [1, 2, 7, 30])
def test_with_equal_steps_it_is_fedavg_to_a_few_roundings(n):
    rng = np.random.default_rng(n)
    models = {}
    for normalise in ("examples", "steps"):
        nodes = {}
        for k in range(1, n + 1):
            nodes[k] = Device(k, whole=7, examples=int(rng.integers(1, 50)) if k > 1 else 5)
            nodes[k].rate = np.float32(np.sin(k))
        rng = np.random.default_rng(n)
        _, moved = start(FedAvg(normalise=normalise), nodes, 3)
        models[normalise] = moved["w"]
    error = np.abs(models["steps"] - models["examples"]).max()
    assert error <= 1e-6 * max(np.abs(models["examples"]).max(), 7.0)


def test_a_staleness_weight_comes_on_top():
    nodes = {1: Device(1), 2: Device(2, whole=200)}
    strategy = FedBuff(2, 1, normalise="steps")
    grid, _ = start(strategy, nodes, 6)
    assert not grid.refused
    assert any(facts["staleness"] and facts["weight"] < 1 for _, facts in grid.merged)


@pytest.mark.parametrize("bad", ["reads nothing", "has no mod", "states nonsense"])
def test_a_reply_without_steps_is_rejected_by_what_is_missing(bad):
    device = Device(
        1, reads=bad != "reads nothing", mods=[] if bad == "has no mod" else [PackMod()]
    )
    if bad == "states nonsense":

        def forging(message, context, call_next):
            reply = call_next(message, context)
            reply.content[WORK] = ConfigRecord({"steps": -3, "whole": 16})
            return reply

        device.mods = [forging, PackMod()]
    grid, model = start(FedAvg(normalise="steps"), {1: device, 2: Device(2)})
    ((_, reason),) = grid.refused
    assert reason.startswith("no ConfigRecord 'fedstale.work' states its local steps")
    assert "fedstale.client.local_steps" in reason
    np.testing.assert_allclose(model["w"], 16 * 0.5)


def test_a_node_that_states_a_million_steps_cannot_move_the_model_by_it():
    def forging(message, context, call_next):
        reply = call_next(message, context)
        reply.content[WORK] = StepsDone(10**9, 10**9).record()
        return reply

    nodes = {k: Device(k) for k in range(1, 8)}
    nodes[7].mods = [forging, PackMod()]
    grid, model = start(FedAvg(normalise="steps"), nodes, 2)
    assert any("1e+09 local steps are stated: at most" in reason for _, reason in grid.refused)
    assert np.abs(model["w"]).max() < 100


def test_integers_and_metrics_are_averaged_as_ever():
    class Counting(Device):
        def train(self, message, context):
            reply = super().train(message, context)
            arrays = {k: a.numpy() for k, a in message.content["arrays"].items()}
            arrays = {"w": arrays["w"] + self.rate, "n": arrays["n"] + 2 * context.node_id}
            reply.content["arrays"] = record(**arrays)
            return reply

    nodes = {1: Counting(1), 2: Counting(2, whole=64)}
    _, model = start(FedAvg(normalise="steps"), nodes, 1, MODEL | {"n": np.array(1)})
    assert model["n"] == 1 + 3
