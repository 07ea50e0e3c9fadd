"""Models in float16: every strategy trains them as it trains the same model in float32."""

import logging

import numpy as np
import pytest
from flwr.serverapp.strategy import Strategy
from virtual_grid import VirtualGrid, content, record

from fedstale import strategies
from fedstale.errors import ResumeError
from fedstale.strategies import (
    Checkpoints,
    FedAvg,
    FedBuff,
    GapAware,
    StaleStrategy,
    Validation,
    robust,
)
from fedstale.strategies.server.versions import Snapshot
from fedstale.strategies.server_optimizer import SGD
from fedstale.strategies.weighting import CachedUpdates, DirectionalGap, Gap, RelevanceAware

pytestmark = pytest.mark.usefixtures("_identity")

NAMES = [
    name
    for name in strategies.__all__
    if isinstance(kind := getattr(strategies, name), type)
    and issubclass(kind, Strategy)
    and kind is not StaleStrategy
]
NEEDS_NUMBER = {
    "FedAvgOverSelected": (4,),
    **dict.fromkeys(("FedBuff", "GapAware", "DirectionAware", "REFL", "FADAS", "CA2FL"), (6, 3)),
    **dict.fromkeys(("FedAsync", "AsyncFedED"), (6,)),
}
TARGET = np.linspace(-2.0, 3.0, 20).reshape(4, 5)


def learner(k):
    """A node that goes a third of the way to a target, and holds 7^k examples."""

    def node(message, grid):
        (w,) = message.content["arrays"].to_numpy_ndarrays()
        target = TARGET + 0.1 * np.sin(k + np.arange(20.0)).reshape(4, 5)
        moved = w.astype(np.float64) + (target - w) / 3.0
        reply = content(record(w=moved.astype(w.dtype)), 7**k, train_loss=float(k))
        return 1.0 + 0.7 * k, reply

    return node


def trained(strategy, dtype, rounds=15, start=0.0):
    grid = VirtualGrid({k: learner(k) for k in range(7)})
    result = strategy.start(grid, record(w=np.full((4, 5), start, dtype)), num_rounds=rounds)
    return result.arrays["w"].numpy(), grid


def made(name, **options):
    return getattr(strategies, name)(*NEEDS_NUMBER.get(name, ()), seed=3, **options)


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_trains_a_model_in_half_precision_as_in_single(name):
    half, grid = trained(made(name), np.float16)
    single, other = trained(made(name), np.float32)
    assert (half.dtype, single.dtype) == (np.float16, np.float32)
    assert grid.refused == other.refused
    assert [facts["staleness"] for _, facts in grid.merged] == [
        facts["staleness"] for _, facts in other.merged
    ]
    # Each version and each reply is rounded, to 2^-11 of at most 4, and 15 roundings add up.
    np.testing.assert_allclose(half, single, atol=15 * 2 * 4 * 2.0**-11)
    assert np.abs(single).max() > 0.2


PARTS = [
    *({"weighting": Gap(of=of)} for of in ("parameter", "layer", "model")),
    *({"weighting": DirectionalGap(of=of)} for of in ("layer", "model")),
    {"weighting": RelevanceAware(), "normalise": "weights"},
    {"weighting": CachedUpdates(then=Gap())},
    {"update": "model"},
    {"validation": Validation(examples_cap=1.5, norm_cap=2.0, dtypes="cast")},
    *({"robust": rule(f=1)} for rule in (robust.Median, robust.TrimmedMean, robust.Krum)),
    *({"robust": rule(f=1)} for rule in (robust.MultiKrum, robust.CentredClipping, robust.CTMA)),
]


@pytest.mark.parametrize("parts", PARTS, ids=repr)
def test_every_weighting_and_rule_takes_half_precision(parts):
    options = {"normalise": "examples", **parts}
    if "robust" in parts:
        options["schedule"] = strategies.schedule.k_async(7, 5)
    half, _ = trained(FedBuff(6, 4, seed=1, **options), np.float16)
    single, _ = trained(FedBuff(6, 4, seed=1, **options), np.float32)
    assert half.dtype == np.float16
    # A rule that picks single updates may pick another of two that are equally near.
    np.testing.assert_allclose(half, single, atol=0.25 if "robust" in parts else 0.06)


def test_a_step_beyond_half_precision_is_discarded_and_the_run_goes_on(caplog):
    nodes = {k: learner(k) for k in range(3)}
    grid = VirtualGrid(nodes)
    strategy = FedAvg(server_optimizer=SGD(lambda step: 1e6 if step == 2 else 1.0))
    with caplog.at_level(logging.INFO):
        result = strategy.start(grid, record(w=np.zeros((4, 5), np.float16)), num_rounds=4)
    w = result.arrays["w"].numpy()
    assert np.isfinite(w).all()
    assert np.abs(w).max() > 1.0
    assert any("finite range" in reason for _, reason in grid.refused)


def test_replies_in_another_dtype_are_rejected_by_the_names_that_devices_know(caplog):
    def double(message, grid):
        return 1.0, content(record(w=np.ones((4, 5), np.float32)), 1)

    grid = VirtualGrid({0: double, **{k: learner(k) for k in (1, 2)}})
    FedAvg().start(grid, record(w=np.zeros((4, 5), np.float16)), num_rounds=1)
    assert [reason for _, reason in grid.refused] == [
        "arrays['w'] has dtype float32: expected float16; Validation(dtypes=\"cast\") converts it"
    ]


def test_a_version_is_rounded_to_what_devices_see_and_a_record_holds_half_precision():
    snapshot = Snapshot.of(record(w=np.array([1.0, -2.0], np.float16), n=np.array([3])))
    moved = {"w": np.array([1.0004, 70000.0], np.float32)}
    after = snapshot.stepped(moved, {"n": np.array([1.0])})
    assert after.floats["w"].dtype == np.float32
    np.testing.assert_array_equal(after.floats["w"], [1.0, np.inf])
    assert after.record()["w"].numpy().dtype == np.float16
    assert snapshot.record()["w"].data == record(w=np.array([1.0, -2.0], np.float16))["w"].data


def test_a_run_in_half_precision_goes_on_from_its_checkpoint(tmp_path):
    whole, _ = trained(made("FedAvg"), np.float16, rounds=6)
    trained(made("FedAvg", checkpoints=tmp_path), np.float16, rounds=3)
    rest, _ = trained(made("FedAvg", resume=tmp_path), np.float16, rounds=6, start=9.0)
    assert rest.tobytes() == whole.tobytes()
    with pytest.raises(ResumeError, match="float"):
        trained(made("FedAvg", resume=tmp_path), np.float32, rounds=6)


def test_stale_updates_that_wait_on_disk_are_those_in_memory():
    plain, _ = trained(GapAware(6, 2, seed=1), np.float16)
    small, _ = trained(
        GapAware(6, 2, seed=1, checkpoints=Checkpoints(version_memory_bytes=0)), np.float16
    )
    assert plain.tobytes() == small.tobytes()
