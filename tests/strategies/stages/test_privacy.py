"""Differential privacy in an asynchronous merge: the clip, the noise, and the accountant."""

from math import inf, sqrt

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from flwr.app import MetricRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from replies import open_buffer
from virtual_grid import VirtualGrid, adder, identity, record

import fedstale
from fedstale.errors import ConfigError, ResumeError
from fedstale.strategies import (
    CA2FL,
    FADAS,
    REFL,
    AsyncFedED,
    Checkpoints,
    DirectionAware,
    FedAsync,
    FedAvg,
    FedBuff,
    GapAware,
    Privacy,
    StaleStrategy,
    Validation,
    weighting,
)
from fedstale.strategies.pace import AdaSync
from fedstale.strategies.robust import TrimmedMean
from fedstale.strategies.schedule import k_async, k_batch_async
from fedstale.strategies.server.versions import Snapshot, Versions
from fedstale.strategies.types import norm_of
from fedstale.strategies.weighting import (
    ByAge,
    ClientUpdate,
    DirectionalGap,
    EuclideanStaleness,
    Gap,
    Weighting,
    constant,
)

pytestmark = pytest.mark.usefixtures("_identity")
DELTA = 1e-5


def private(clip=1.0, noise=1.0, seed=5, **changes):
    return Privacy(
        **{"clip_norm": clip, "noise_multiplier": noise, "delta": DELTA, "noise_seed": seed}
        | changes
    )


def start(strategy, nodes, rounds=4, initial=None, **options):
    grid = nodes if isinstance(nodes, VirtualGrid) else VirtualGrid(nodes)
    initial = record(w=np.zeros(2)) if initial is None else initial
    return strategy.start(grid, initial, num_rounds=rounds, **options), grid


def fleet(n=5):
    return {10 + i: adder(0.1 * (i + 1) ** 3, 1.0 + i) for i in range(n)}


def library(events, delta=DELTA):
    """Epsilon of Gaussian mechanisms, given as (noise multiplier, times), by the library."""
    accountant = RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    )
    for multiplier, times in events:
        accountant.compose(dp_accounting.GaussianDpEvent(multiplier), times)
    return accountant.get_epsilon(delta)


# What it is without noise and clipping.


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: FedBuff(3, 2, **options),
        lambda **options: FedAsync(3, **options),
        lambda **options: GapAware(3, 2, **options),
        lambda **options: DirectionAware(3, 2, **options),
        lambda **options: FADAS(3, 2, **options),
        lambda **options: AsyncFedED(3, **options),
        lambda **options: FedAvg(normalise="buffer_size", **options),
    ],
    ids=["FedBuff", "FedAsync", "GapAware", "DirectionAware", "FADAS", "AsyncFedED", "FedAvg"],
)
def test_with_no_noise_and_no_clipping_it_is_the_plain_strategy_bit_for_bit(make):
    initial = record(w=np.zeros(3, np.float32), b=np.ones((2, 2)), n=np.array(4))
    runs = []
    for stages in ([], [private(clip=inf, noise=0.0)]):
        result, grid = start(make(stages=stages), fleet(), 9, initial)
        arrays = {name: array.numpy().tobytes() for name, array in result.arrays.items()}
        train = {v: dict(m) for v, m in result.train_metrics_clientapp.items()}
        runs.append((arrays, train, grid.merged, grid.time))
    assert runs[0] == runs[1]


# The clip.

floats = st.floats(-1e6, 1e6)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(floats, min_size=1, max_size=12),
    st.floats(1e-3, 1e3),
    st.sampled_from([np.float16, np.float32, np.float64]),
    st.sampled_from(["age", "growing", "gap", "directional", "euclidean"]),
    st.booleans(),
)
def test_no_update_counts_for_more_than_the_clip_whatever_its_weight(
    numbers, clip, dtype, kind, as_model
):
    made = {
        "age": lambda: ByAge(lambda tau: (1 + tau) ** -0.5),
        "growing": lambda: ByAge(lambda tau: 1.0 + tau),
        "gap": Gap,
        "directional": DirectionalGap,
        "euclidean": EuclideanStaleness,
    }[kind]()
    with np.errstate(over="ignore"):
        values = np.nan_to_num(np.array(numbers, dtype), posinf=6e4, neginf=-6e4)
    base = {"a": np.zeros(1, dtype), "b": np.zeros(len(numbers), dtype)}
    current = {"a": np.ones(1, dtype), "b": np.full(len(numbers), 0.5, dtype)}
    versions = Versions(Snapshot(current, {}, ("a", "b")))
    made.observe(base, current, 1.0)
    buffer = open_buffer(
        versions,
        schedule=k_batch_async(2, 4),
        weighting=made,
        normalise="buffer_size",
        update="model" if as_model else "delta",
        stages=[private(clip, 0.0)],
        validation=Validation(examples_cap=None),
    )
    update = ClientUpdate(
        delta={"a": np.zeros(1, dtype), "b": values.copy()},
        base=base,
        current=current,
        staleness=3,
        node_id=7,
    )
    taken = []
    add = buffer._reducer.add
    buffer._reducer = Noted(buffer._reducer, taken, add)
    buffer.add(update)
    buffer.step()
    (delta,) = taken
    assert norm_of(delta) <= clip


@pytest.mark.parametrize(
    ("value", "clip", "dtype"),
    [(6e4, 1e5, np.float16), (1e300, 1.0, np.float64), (6e-8, 4e-8, np.float16)],
    ids=["weighed to infinity", "square beyond floats", "smallest there is"],
)
def test_numbers_at_the_ends_of_their_range_are_clipped_and_no_run_waits_for_it(value, clip, dtype):
    mechanism = private(clip, 0.0)
    update = ClientUpdate(delta={"w": np.full(2, value, dtype)}, base={}, current={}, staleness=3)
    mechanism.clip(update)
    with np.errstate(over="ignore", invalid="ignore"):
        update.delta["w"] *= dtype(4.0)
        mechanism.clip(update)
    assert np.isfinite(update.delta["w"]).all()
    assert norm_of(update.delta) <= clip


class Noted:
    """A reducer that notes what it is given before it takes it in."""

    def __init__(self, inner, taken, add):
        self.inner, self.taken, self._add = inner, taken, add

    def add(self, update):
        self.taken.append({name: array.copy() for name, array in update.delta.items()})
        self._add(update)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def test_the_clip_is_over_all_arrays_and_keeps_the_direction():
    update = ClientUpdate(
        delta={"a": np.array([3.0, 0.0]), "b": np.array([[4.0]])}, base={}, current={}, staleness=0
    )
    private(clip=2.5, noise=0.0).clip(update)
    np.testing.assert_allclose(update.delta["a"], [1.5, 0.0])
    np.testing.assert_allclose(update.delta["b"], [[2.0]])
    before = {name: array.copy() for name, array in update.delta.items()}
    private(clip=2.6, noise=0.0).clip(update)
    for name, array in before.items():
        np.testing.assert_array_equal(update.delta[name], array)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rounding_costs_a_clipped_update_next_to_nothing(dtype):
    mechanism, rng = private(clip=1.0, noise=0.0), np.random.default_rng(0)
    for _ in range(300):
        delta = {"w": rng.normal(size=37).astype(dtype)}
        mechanism.clip(ClientUpdate(delta=delta, base={}, current={}, staleness=0))
        assert 1.0 - 8 * float(np.finfo(dtype).eps) <= norm_of(delta) <= 1.0


def test_a_stale_update_is_clipped_first_and_discounted_then():
    nodes = {10: adder(1.0, 1.0), 11: adder(30.0, 1.5)}
    strategy = FedBuff(2, 1, staleness=lambda tau: 1.0 / (1 + tau), stages=[private(0.5, 0.0)])
    result, grid = start(strategy, nodes, 2, record(w=np.zeros(1)))
    assert [facts["staleness"] for _, facts in grid.merged] == [0, 1]
    np.testing.assert_allclose(result.arrays["w"].numpy(), 0.5 + 0.5 / 2)


def test_a_run_clips_each_update_and_divides_by_their_number():
    nodes = {10: adder(3.0, 1.0), 11: adder(-0.5, 1.0)}
    strategy = FedBuff(2, 2, stages=[private(clip=1.0, noise=0.0)])
    result, _ = start(strategy, nodes, 1)
    expected = (1.0 / sqrt(2.0) - 0.5) / 2.0
    np.testing.assert_allclose(result.arrays["w"].numpy(), expected)


# The noise.


def test_one_draw_a_step_has_the_standard_deviation_of_the_sum_over_the_number_of_updates():
    n, size = 4, 200_000
    nodes = {10 + i: adder(0.0, 1.0) for i in range(n)}
    strategy = FedBuff(n, n, stages=[private(clip=2.0, noise=1.5)])
    result, _ = start(strategy, nodes, 1, record(w=np.zeros(size)))
    noise = result.arrays["w"].numpy()
    assert noise.std() == pytest.approx(1.5 * 2.0 / n, rel=0.01)
    assert abs(noise.mean()) < 5 * 0.75 / sqrt(size)
    kurtosis = float(np.mean((noise / noise.std()) ** 4))
    assert kurtosis == pytest.approx(3.0, abs=0.05)


def test_each_step_and_each_seed_has_noise_of_its_own_and_a_seed_repeats_it():
    def path(seed):
        models = []
        nodes = {10: adder(0.0, 1.0)}
        strategy = FedAsync(1, mix=1.0, update="delta", stages=[private(noise=2.0, seed=seed)])
        _, grid = start(strategy, nodes, 3)
        models = [arrays["w"].numpy() for _, arrays in grid.models]
        return np.diff([np.zeros(2), *models], axis=0)

    steps, again, other, system = path(1), path(1), path(2), path(None)
    np.testing.assert_array_equal(steps, again)
    drawn = np.concatenate([steps.ravel(), other.ravel(), system.ravel()])
    assert np.unique(np.round(drawn, 9)).size == drawn.size
    assert not np.array_equal(system, path(None))


def test_integer_arrays_stay_while_there_is_noise_and_move_without():
    initial = record(w=np.zeros(2, np.float32), n=np.array(4), on=np.array([True, False]))
    for noise, expected in ((1.0, 4), (0.0, 8)):
        strategy = FedBuff(1, 1, stages=[private(clip=100.0, noise=noise)])
        result, _ = start(strategy, {10: adder(2, 1.0)}, 2, initial)
        assert result.arrays["n"].numpy() == expected
        assert result.arrays["w"].numpy().dtype == np.float32


# The accountant.


def test_epsilon_of_one_device_is_that_of_the_library():
    for n_steps in (1, 10, 250):
        mechanism = private(noise=3.0)
        for _ in range(n_steps):
            mechanism.count([7])
        assert mechanism.epsilon() == pytest.approx(library([(3.0, n_steps)]), rel=1e-12)


def test_several_updates_in_a_step_are_one_mechanism_of_a_larger_sensitivity():
    mechanism = private(noise=4.0)
    mechanism.count([7, 7, 7, 8])
    mechanism.count([7, 8])
    mechanism.count([8])
    # Node 7: three updates in one step and one in another; node 8: one in each of three.
    assert mechanism.epsilon() == pytest.approx(library([(4.0 / 3.0, 1), (4.0, 1)]), rel=1e-12)
    assert mechanism.epsilon() > library([(4.0, 3)])


def test_epsilon_is_that_of_the_device_that_was_in_the_most_and_of_no_other():
    mechanism = private(noise=2.0)
    assert mechanism.epsilon() == 0.0
    mechanism.count([1, 2, 3])
    one = mechanism.epsilon()
    mechanism.count([4, 5, 6])
    assert mechanism.epsilon() == one == pytest.approx(library([(2.0, 1)]))
    mechanism.count([5])
    assert mechanism.epsilon() == pytest.approx(library([(2.0, 2)]))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=8))
def test_epsilon_is_the_largest_of_all_devices_by_the_library(steps):
    mechanism = private(noise=2.5)
    for nodes in steps:
        mechanism.count(nodes)
    by_device = [
        library([(2.5 / nodes.count(n), 1) for nodes in steps if n in nodes])
        for n in {n for nodes in steps for n in nodes}
    ]
    assert mechanism.epsilon() == pytest.approx(max(by_device), rel=1e-9)


def test_a_run_counts_what_was_merged_and_not_what_was_rejected():
    # The slow one is always too stale; the two others alternate.
    nodes = {10: adder(1.0, 1.0), 11: adder(1.0, 1.5), 12: adder(1.0, 9.25)}
    strategy = FedBuff(3, 2, validation=Validation(max_staleness=1), stages=[private(noise=5.0)])
    result, grid = start(strategy, nodes, 20)
    assert strategy.rejections["rejected: too stale"] >= 1
    owners = {f"m{i}": m.metadata.dst_node_id for i, (_, m) in enumerate(grid.sent)}
    for version in (1, 7, 20):
        by_node = {}
        for message_id, facts in grid.merged:
            if facts["version"] <= version:
                steps = by_node.setdefault(owners[message_id], {})
                steps[facts["version"]] = steps.get(facts["version"], 0) + 1
        assert 12 not in by_node
        worst = max(library([(5.0 / m, 1) for m in steps.values()]) for steps in by_node.values())
        metrics = result.train_metrics_clientapp[version]
        assert metrics["epsilon"] == pytest.approx(worst, rel=1e-9)
        assert metrics["epsilon_at_delta"] == DELTA


def test_a_device_cannot_state_its_own_epsilon():
    nodes = {10: adder(1.0, 1.0, epsilon=0.001)}
    result, _ = start(FedBuff(1, 1, stages=[private()]), nodes, 1)
    assert result.train_metrics_clientapp[1]["epsilon"] == pytest.approx(library([(1.0, 1)]))


def test_without_noise_no_epsilon_is_claimed():
    result, _ = start(FedBuff(1, 1, stages=[private(noise=0.0)]), {10: adder(1.0)}, 1)
    assert "epsilon" not in result.train_metrics_clientapp[1]
    assert private(noise=0.0).epsilon() == inf


def test_a_run_stops_at_a_budget():
    budget = library([(2.0, 6)])
    strategy = FedAsync(1, until=f"epsilon {float(budget)!r}", stages=[private(noise=2.0)])
    result, _ = start(strategy, {10: adder(0.1)}, 99)
    assert max(result.train_metrics_clientapp) == 6


@pytest.mark.parametrize("seed", [5, None])
def test_a_resumed_run_counts_on_and_draws_no_noise_twice(tmp_path, seed):
    def strategy(**options):
        return FedAsync(1, mix=1.0, update="delta", stages=[private(seed=seed)], **options)

    whole, _ = start(strategy(), {10: adder(0.0)}, 6)
    start(strategy(checkpoints=Checkpoints(tmp_path)), {10: adder(0.0)}, 4)
    resumed, _ = start(strategy(resume=tmp_path), {10: adder(0.0)}, 6)
    metrics = resumed.train_metrics_clientapp[6]
    assert metrics["epsilon"] == pytest.approx(library([(1.0, 6)]))
    same = whole.arrays["w"].numpy() == resumed.arrays["w"].numpy()
    assert same.all() if seed is not None else not same.any()


def test_a_checkpoint_of_another_privacy_is_not_gone_on_from(tmp_path):
    start(FedBuff(1, 1, stages=[private()], checkpoints=tmp_path), {10: adder(1.0)}, 2)
    for others in ([], [private(noise=2.0)], [private(clip=2.0)]):
        with pytest.raises(ResumeError, match="Privacy"):
            start(
                FedBuff(1, 1, stages=others, resume=tmp_path),
                {10: adder(1.0)},
                3,
            )


# What it refuses.


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda p: FedAvg(stages=[p]), "normalise"),
        (lambda p: REFL(4, 2, stages=[p]), "normalise"),
        (lambda p: REFL(4, 2, normalise="buffer_size", stages=[p]), "weighting"),
        (lambda p: CA2FL(4, 2, stages=[p]), "weighting"),
        (lambda p: FedBuff(4, 2, pace=AdaSync(), stages=[p]), "pace"),
        (lambda p: FedBuff(4, 2, validation=Validation(norm_cap=2.0), stages=[p]), "norm_cap"),
        (
            lambda p: StaleStrategy(
                schedule=k_async(5, 5),
                robust=TrimmedMean(f=1),
                normalise="buffer_size",
                stages=[p],
            ),
            "robust",
        ),
    ],
)
def test_what_lets_an_update_move_more_than_its_own_share_is_refused(make, field):
    with pytest.raises(ConfigError, match=f"{field}.*with Privacy"):
        make(private())


WEIGHTINGS = [
    value
    for value in vars(weighting).values()
    if isinstance(value, type) and issubclass(value, Weighting) and value is not Weighting
]


@pytest.mark.parametrize("kind", WEIGHTINGS, ids=lambda kind: kind.__name__)
def test_a_weighting_looks_at_one_update_alone_where_it_says_so(kind):
    """What comes of an update must not depend on which others were weighed before it."""

    def weighed(others):
        made = kind(constant()) if kind is ByAge else kind()
        theta = [{"w": np.array([x, 2.0 * x])} for x in (0.0, 1.0, 3.0)]
        made.observe(theta[0], theta[1], 1.0)
        made.observe(theta[1], theta[2], 1.0)
        updates = [
            ClientUpdate(
                delta={"w": np.array(delta)},
                base=theta[0],
                current=theta[2],
                staleness=2,
                node_id=node,
            )
            for node, delta in enumerate([*others, [0.3, -0.2]])
        ]
        if made.needs_whole_buffer:
            made.weigh_stale(updates, {"w": np.array([1.0, 1.0])})
        else:
            for update in updates:
                made.weigh(update)
        return updates[-1].delta["w"]

    alone = np.array_equal(weighed([]), weighed([[5.0, 1.0], [-40.0, 2.0]]))
    assert alone or not kind.from_update_alone
    assert kind.from_update_alone == (kind.__name__ not in {"CachedUpdates", "RelevanceAware"})


def test_a_weighting_of_somebody_else_must_say_that_it_looks_at_one_update():
    class Mine(ByAge):
        from_update_alone = False

    with pytest.raises(ConfigError, match="single update"):
        FedBuff(2, 2, weighting=Mine(constant()), stages=[private()])


@pytest.mark.parametrize(
    "changes",
    [
        {"clip_norm": 0.0},
        {"clip_norm": inf},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": inf},
        {"delta": 0.0},
        {"delta": 1.0},
        {"noise_seed": -1},
    ],
)
def test_settings_out_of_range_are_refused(changes):
    with pytest.raises(ConfigError, match=f"Privacy.{next(iter(changes))}"):
        private(**changes)


def test_without_the_accountant_noise_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr("fedstale.strategies.stages.privacy.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs dp_accounting, .*\[privacy\]"):
        private()
    private(noise=0.0)


def test_the_seed_of_the_noise_is_in_no_text():
    assert "987654" not in repr(FedBuff(2, 2, stages=[private(seed=987654)]))


# One device, in one run and in its neighbour.


def test_the_updates_of_one_device_move_a_step_by_no_more_than_the_clip():
    """Two neighbouring runs differ by at most S / n in their first step, noise being equal."""
    for huge in (1.0, 1e3, 1e30):
        models = []
        for step in (huge, 0.0):
            nodes = {10: adder(step, 1.0), 11: adder(0.3, 1.0), 12: adder(-0.1, 1.0)}
            with identity():
                result, _ = start(FedBuff(3, 3, stages=[private(clip=0.5)]), nodes, 1)
            models.append(result.arrays["w"].numpy())
        assert np.linalg.norm(models[0] - models[1]) <= 0.5 / 3 * (1 + 1e-12)


# Through the door that a user takes.


def test_epsilon_stands_in_summary_and_report(tmp_path):
    from flwr.app import Array, ArrayRecord, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message, context):
        weights = message.content["arrays"]["w"].numpy()
        arrays = ArrayRecord({"w": Array(weights + 0.1)})
        metrics = MetricRecord({"train_loss": 1.0, "num-examples": 20})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    run = fedstale.simulate(
        app,
        strategy=FedBuff(5, 2, stages=[private(noise=4.0)]),
        initial_arrays={"w": np.zeros(2)},
        traces="synthetic:20",
        until="8 rounds",
        work_per_example=0.5,
        epochs=1,
        examples=20,
        out=tmp_path / "run",
    )
    used = run.jobs[run.jobs["status"] == "reported"].dropna(subset=["aggregated_version"])
    steps = used.groupby(["device_id", "aggregated_version"]).size()
    worst = max(
        library([(4.0 / m, 1) for m in steps[device]])
        for device in steps.index.get_level_values(0).unique()
    )
    assert run.summary["metrics"]["train epsilon"] == pytest.approx(worst, rel=1e-9)
    assert run.summary["metrics"]["train epsilon_at_delta"] == DELTA
    _, epsilons = run.curve("epsilon", "train")
    assert len(epsilons) == 8
    assert (np.diff(epsilons) >= 0).all()
    assert "epsilon" in run.report().read_text(encoding="utf-8")
