"""Strategies with the name of one of Flower's make the same models of the same replies.

Hypothesis draws the replies: how many clients, with numbers of examples that differ by orders of
magnitude and from round to round, of which arrays, and who fails; and the settings of the server.
Both strategies run by their own `start`, and are compared after every round.

Two programs round differently, so how far they may be apart depends on what a strategy makes of
rounding: Adam divides by a root that may be as small as tau. That is measured: Flower's strategy
runs in float64 on the same replies, and again with every reply moved up and down by `ULPS` units in
the last place of the largest number in the trial. What that moves its model by, element by element,
is the tolerance, and the model itself may be off by as much. Where sums and products are exact, on
numbers with few bits, nothing may differ.

Flower takes any update. Ours rejects one whose norm is beyond `Validation.norm_bound` times the
median of the others: draws keep within it, and the last test says where it begins.
"""

import logging
from dataclasses import dataclass, field

import numpy as np
import pytest
from flwr.app.error import Error
from flwr.serverapp import strategy as flower
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from virtual_grid import VirtualGrid, content, identity, record

from fedstale import strategies as ours
from fedstale.strategies import Validation

ULPS = 8.0
N_NAMES = 6
"""Names that both packages have, without `Strategy` and `Result`, which neither runs."""

rates = st.floats(1e-3, 2.0)
decays = st.floats(0.0, 0.99)
taus = st.floats(1e-4, 1.0)
adaptive = {"eta": rates, "tau": taus}
with_moments = {**adaptive, "beta_1": decays, "beta_2": decays}

SETTINGS = {
    "FedAvg": {},
    "FedProx": {"proximal_mu": st.floats(0.0, 10.0)},
    "FedAvgM": {"server_learning_rate": rates, "server_momentum": decays},
    "FedAdam": with_moments,
    "FedYogi": with_moments,
    "FedAdagrad": adaptive,
}
"""Every setting of the server that Flower's strategy has."""

DTYPES = [np.float16, np.float32, np.float64]


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    """Flower logs thirty lines a run."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    yield
    logging.getLogger("flwr").setLevel(logging.INFO)


@dataclass(frozen=True)
class Trial:
    """What clients answer in some rounds, whatever model they are sent."""

    shapes: list[tuple[int, ...]]
    dtype: type
    examples: np.ndarray
    """Of each round and client; 0 where the client fails."""
    seed: int
    norms: list[float] = field(default_factory=list)
    """Of the updates of each run: what a client sends, less what it was sent."""

    def values(self, *key):
        """Arrays of normal numbers: the model (0), or the reply in a round (t) of a client (k)."""
        scales = 10.0 ** np.random.default_rng(self.seed).integers(-2, 2, len(self.shapes))
        rng = np.random.default_rng((self.seed, *key))
        drawn = [x * rng.normal(size=shape) for x, shape in zip(scales, self.shapes, strict=True)]
        return [x.astype(self.dtype) for x in drawn]

    def is_within_bound(self):
        """Whether no update of a run can be beyond the bound on norms, whatever the median."""
        return max(self.norms) <= Validation().norm_bound * min(self.norms)

    def replies(self):
        """All arrays that come."""
        rounds, clients = np.nonzero(self.examples)
        for t, k in zip(rounds.tolist(), clients.tolist(), strict=True):
            yield from self.values(t + 1, k)

    def run(self, strategy, *, dtype=None, shift=0.0):
        """Models after each round, as lists of arrays; what the clients were sent; and metrics."""
        dtype, configs = dtype or self.dtype, []

        def node(k):
            def answer(message, grid):
                config = message.content["config"]
                configs.append((k, dict(config)))
                t = config["server-round"]
                if not self.examples[t - 1, k]:
                    return 1.0, Error(3, "it failed")
                arrays = [x.astype(dtype) for x in self.values(t, k)]
                sent = message.content["arrays"].to_numpy_ndarrays()
                update = [np.subtract(x, y, dtype=float) for x, y in zip(arrays, sent, strict=True)]
                self.norms.append(float(np.sqrt(sum((x**2).sum() for x in update))))
                moved = {f"w{i}": np.asarray(x + dtype(shift)) for i, x in enumerate(arrays)}
                n = int(self.examples[t - 1, k])
                return 1.0 + k, content(record(**moved), n, train_loss=0.5 * k)

            return answer

        models = []
        start = {f"w{i}": x.astype(dtype) for i, x in enumerate(self.values(0))}
        with identity():
            result = strategy.start(
                VirtualGrid({k: node(k) for k in range(self.examples.shape[1])}),
                record(**start),
                num_rounds=len(self.examples),
                evaluate_fn=lambda version, arrays: models.append(arrays.to_numpy_ndarrays()),
            )
        metrics = {t: dict(found) for t, found in result.train_metrics_clientapp.items()}
        return models, sorted(configs, key=repr), metrics


@st.composite
def trials(draw, dtypes=DTYPES):
    n_clients, n_rounds = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    # From 1 to a million; Hypothesis prefers small integers, and skew is what this is about.
    counts = st.floats(0.0, 6.0).map(lambda x: round(10.0**x))
    shape = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    examples = np.array(
        [[draw(counts) for _ in range(n_clients)] for _ in range(n_rounds)], np.int64
    )
    for t in range(n_rounds):
        # A round in which all clients fail is no round here, and Flower counts it.
        failing = draw(st.sets(st.integers(0, n_clients - 1), max_size=n_clients - 1))
        examples[t, sorted(failing)] = 0
    return Trial(
        shapes=draw(st.lists(shape, min_size=1, max_size=3)),
        dtype=draw(st.sampled_from(dtypes)),
        examples=examples,
        seed=draw(st.integers(0, 2**32)),
    )


def flowers(name, options):
    return getattr(flower, name)(
        **options, fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1
    )


def test_every_strategy_that_has_the_name_of_one_of_flowers_is_compared():
    published = {
        name
        for name in ours.__all__
        if isinstance(kind := getattr(ours, name), type) and issubclass(kind, flower.Strategy)
    }
    assert published & set(flower.__all__) == set(SETTINGS)
    assert len(SETTINGS) == N_NAMES


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=20)
@given(data=st.data(), trial=trials())
def test_the_model_after_each_round_is_flowers_whatever_the_examples_and_settings(
    name, data, trial
):
    options = data.draw(st.fixed_dictionaries(SETTINGS[name]))
    found, sent, metrics = trial.run(getattr(ours, name)(**options))
    assume(trial.is_within_bound())
    expected, their_sent, their_metrics = trial.run(flowers(name, options), dtype=np.float64)
    assert sent == their_sent
    assert metrics == {t: pytest.approx(values) for t, values in their_metrics.items()}
    numbers = [*trial.replies(), *(x for model in expected for x in model)]
    largest = max(np.abs(x).max(initial=0.0) for x in numbers)
    assume(largest < np.finfo(trial.dtype).max)
    off = ULPS * float(np.finfo(trial.dtype).eps * largest)
    moved = [
        trial.run(flowers(name, options), dtype=np.float64, shift=shift)[0] for shift in (off, -off)
    ]
    assert len(found) == len(expected) == len(trial.examples) + 1
    for t, model in enumerate(found):
        for i, array in enumerate(model):
            exact = expected[t][i]
            assert array.dtype == trial.dtype
            assert array.shape == exact.shape
            tolerance = off + np.maximum(*(np.abs(other[t][i] - exact) for other in moved))
            assert (np.abs(array - exact) <= tolerance).all(), (t, i, array, exact, tolerance)


@st.composite
def exact_trials(draw):
    """Examples that add up to a power of two, so that their shares are exact."""
    trial = draw(trials())
    for row in trial.examples:
        row[row > 0] = [draw(st.integers(1, 10**5)) for _ in range((row > 0).sum())]
        last = np.flatnonzero(row)[-1]
        row[last] += 2 ** int(row.sum()).bit_length() - row.sum()
    return Exact(trial.shapes, np.float64, trial.examples, trial.seed)


class Exact(Trial):
    """Replies of small multiples of 1/8."""

    def values(self, *key):
        rng = np.random.default_rng((self.seed, *key))
        return [(rng.integers(-64, 64, shape) / 8).astype(self.dtype) for shape in self.shapes]


class Counted(Trial):
    """Replies of whole numbers."""

    def values(self, *key):
        rng = np.random.default_rng((self.seed, *key))
        return [rng.integers(0, 200, shape).astype(self.dtype) for shape in self.shapes]


@pytest.mark.parametrize("name", ["FedAvg", "FedProx", "FedAvgM"])
@settings(max_examples=15)
@given(trial=exact_trials(), rate=st.sampled_from([0.5, 1.0]), momentum=st.sampled_from([0.0, 0.5]))
def test_where_arithmetic_is_exact_the_model_is_flowers_to_the_last_bit(
    name, trial, rate, momentum
):
    options = {"server_learning_rate": rate, "server_momentum": momentum}
    options = options if name == "FedAvgM" else {}
    found, *_ = trial.run(getattr(ours, name)(**options))
    assume(trial.is_within_bound())
    expected, *_ = trial.run(flowers(name, options))
    for mine, other in zip(found, expected, strict=True):
        assert [x.tobytes() for x in mine] == [x.tobytes() for x in other]
        assert [x.dtype for x in mine] == [x.dtype for x in other]


@settings(max_examples=20)
@given(trial=trials([np.int64, np.int32, np.uint8]))
def test_whole_numbers_are_flowers_mean_rounded_and_keep_their_dtype(trial):
    trial = Counted(trial.shapes, trial.dtype, trial.examples, trial.seed)
    found, *_ = trial.run(ours.FedAvg())
    # Flower's become float64 with the first round.
    expected, *_ = trial.run(flowers("FedAvg", {}))
    for mine, exact in zip(found, expected, strict=True):
        for array, mean in zip(mine, exact, strict=True):
            assert array.dtype == trial.dtype
            assert (np.abs(array - mean) <= 0.5 + 1e-9).all()


class Scaled(Trial):
    """Replies that move the model by 1 in a first round, and the last client by far more."""

    times = 1.0

    def values(self, *key):
        moves = key[0] and (self.times if key == (1, 2) else 1.0)
        return [np.full(shape, moves, self.dtype) for shape in self.shapes]


@pytest.mark.parametrize("examples", [[5, 5, 5], [1, 1, 1000]])
def test_flowers_model_and_ours_part_where_the_bound_on_norms_begins(examples):
    for times, is_rejected in ((100.0, False), (101.0, True)):
        trial = Scaled([(3,)], np.float64, np.array([examples]), 0)
        object.__setattr__(trial, "times", times)
        strategy = ours.FedAvg()
        (_, [found]), *_ = trial.run(strategy)
        (_, [expected]), *_ = trial.run(flowers("FedAvg", {}))
        assert strategy.rejections["rejected: norm"] == is_rejected
        np.testing.assert_allclose(found, 1.0 if is_rejected else expected)
        assert expected[0] > 30.0
