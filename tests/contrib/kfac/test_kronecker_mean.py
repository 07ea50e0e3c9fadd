"""Kronecker factors merge layers as the dense equations say, and bad ones merge nothing.

The layers are so small that each client's Kronecker product is formed.
"""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord
from own_optima import EXAMPLES, answered, record

from fedstale.contrib.kfac import KroneckerMean
from fedstale.contrib.kfac.merge import solved, unpacked
from fedstale.errors import ConfigError
from fedstale.strategies import Compression, FedAvg, FedBuff, robust
from fedstale.strategies.weighting import constant

N, IN, OUT, DAMPING = 4, 4, 3, 0.01
SHAPES = {"0.weight": (OUT, IN), "0.bias": (OUT,), "1.weight": (2, OUT), "scale": ()}
rng = np.random.default_rng(0)
OPTIMA = [{name: rng.normal(size=shape) for name, shape in SHAPES.items()} for _ in range(N)]


def curvature(n, rank):
    """Return a random positive semidefinite matrix."""
    rows = rng.normal(size=(rank, n))
    return rows.T @ rows / rank


FACTORS = [
    {
        **{"0.A": curvature(IN + 1, 2), "0.G": curvature(OUT, 2)},
        **{"1.A": curvature(OUT, 5), "1.G": curvature(2, 1)},
    }
    for _ in range(N)
]


def packed(factors):
    return record({name: x[np.triu_indices(len(x))] for name, x in factors.items()})


def merged(strategy, factors, n_versions=1, optima=OPTIMA):
    """Return the versions of a model that clients answer with their optimum, jobs and metrics.

    Args:
        strategy: of the server.
        factors: what each client sends; None for nothing.
        n_versions: after the first model, of zeros.
        optima: what each client sends as its weights.
    """
    grid, result, versions = answered(strategy, optima, factors, name="kfac", n_versions=n_versions)
    if strategy.schedule.send == "after_step":
        # Nothing waits for a step any more, so nothing is kept for one.
        assert not any(stage.state_dict()["_replies"] for stage in grid.runtime.stages)
    return versions, grid.events().to_pandas(), result


def joined(model, layer):
    bias = [model["0.bias"][:, None]] if layer == "0" else []
    return np.hstack([model[f"{layer}.weight"], *bias])


def dense(nodes, factors=FACTORS, damping=DAMPING, optima=OPTIMA):
    """Solve for what merges some clients, with each Kronecker product formed."""
    share = {i: EXAMPLES[i] / sum(EXAMPLES[j] for j in nodes) for i in nodes}
    found = {name: sum(share[i] * optima[i][name] for i in nodes) for name in SHAPES}
    for layer in "01":
        left, right = 0.0, 0.0
        for i in nodes:
            own = damping * np.eye(joined(optima[i], layer).size)
            if factors[i] is not None:
                own += np.kron(factors[i][f"{layer}.G"], factors[i][f"{layer}.A"])
            left = left + share[i] * own
            right = right + share[i] * own @ joined(optima[i], layer).ravel()
        layer_found = np.linalg.solve(left, right).reshape(joined(found, layer).shape)
        found[f"{layer}.weight"] = layer_found[:, : SHAPES[f"{layer}.weight"][1]]
        if layer == "0":
            found["0.bias"] = layer_found[:, -1]
    return found


def assert_close(model, wanted, atol=1e-5):
    for name in SHAPES:
        np.testing.assert_allclose(model[name], wanted[name], rtol=0, atol=atol)


def stage(damping=DAMPING, **options):
    return KroneckerMean(damping, **options)


def test_one_merge_is_what_the_dense_equations_say():
    versions, _, _ = merged(FedAvg(stages=[stage()]), [*map(packed, FACTORS)])
    assert_close(versions[1], dense(range(N)))
    # The mean is another model.
    assert not np.allclose(versions[1]["0.weight"], dense(range(N), [None] * N)["0.weight"], 0, 0.1)


def test_each_buffer_of_a_stream_is_merged_of_its_own_clients():
    strategy = FedBuff(
        N, 2, staleness=constant(), update="model", normalise="examples", stages=[stage()]
    )
    versions, jobs, _ = merged(strategy, [*map(packed, FACTORS)], n_versions=8)
    used = jobs[jobs["aggregated_version"] > 0]
    assert len(versions) == 9
    assert used["staleness"].max() > 0
    for version, ones in used.groupby("aggregated_version"):
        assert_close(versions[version], dense([*(ones["node_id"] - 1000)]))


def test_a_client_that_sends_no_factors_counts_by_the_damping():
    factors = [None, *FACTORS[1:]]
    versions, _, _ = merged(FedAvg(stages=[stage()]), [None, *map(packed, FACTORS[1:])])
    assert_close(versions[1], dense(range(N), factors))


def test_equal_clients_give_their_own_weights_back():
    optima = OPTIMA[:1] * N
    versions, _, _ = merged(FedAvg(stages=[stage(1e-9)]), [*map(packed, FACTORS)], optima=optima)
    assert_close(versions[1], optima[0], atol=1e-9)


def test_a_client_alone_keeps_its_weights_whatever_its_factors_are():
    factors, change = FACTORS[0], joined(OPTIMA[0], "0")
    for times in (1.0, 100.0):
        terms = [(1.0, times * factors["0.A"], factors["0.G"], change)]
        found, left = solved(terms, change, DAMPING, 200)
        assert np.array_equal(found, change)
        assert left == 0.0


def test_what_one_factor_has_more_and_the_other_less_changes_nothing():
    moved = [
        {name: x * (8.0 if name.endswith("A") else 0.125) for name, x in factors.items()}
        for factors in FACTORS
    ]
    (_, plain), _, _ = merged(FedAvg(stages=[stage()]), [*map(packed, FACTORS)])
    (_, other), _, _ = merged(FedAvg(stages=[stage()]), [*map(packed, moved)])
    assert_close(plain, other, atol=1e-9)


def test_ever_larger_damping_leads_to_the_mean_by_examples():
    mean = dense(range(N), [None] * N)
    far = []
    for damping in (1.0, 1e3, 1e6):
        (_, model), _, _ = merged(FedAvg(stages=[stage(damping)]), [*map(packed, FACTORS)])
        far.append(max(np.abs(model[name] - mean[name]).max() for name in SHAPES))
    assert far[1] < far[0] / 100
    assert far[2] < 1e-5


def test_few_steps_of_conjugate_gradients_leave_a_residual_that_is_reported():
    left = []
    for steps in (1, 2, 200):
        strategy = FedAvg(stages=[stage(1e-4, steps=steps)])
        _, _, result = merged(strategy, [*map(packed, FACTORS)])
        left.append(result.train_metrics_clientapp[1]["kfac_residual"])
    assert left[0] > left[2]
    assert left[1] > 1e-3
    assert left[2] <= 1e-6


def test_the_triangle_of_a_factor_is_unpacked_to_a_symmetric_matrix():
    assert np.array_equal(
        unpacked("0.A", Array(np.array([4.0, 1.0, 2.0, 5.0, 3.0, 6.0])), 3),
        [[4.0, 1.0, 2.0], [1.0, 5.0, 3.0], [2.0, 3.0, 6.0]],
    )


def test_a_factor_of_zeros_is_one():
    zeros = [{name: 0 * x for name, x in factors.items()} for factors in FACTORS]
    (_, model), _, _ = merged(FedAvg(stages=[stage()]), [*map(packed, zeros)])
    assert_close(model, dense(range(N), [None] * N), atol=1e-9)


def other(**changed):
    return record({name: x.numpy() for name, x in packed(FACTORS[0]).items()} | changed)


SIZE = OUT * (OUT + 1) // 2
BAD = {
    "NaN": other(**{"0.G": np.full(SIZE, np.nan)}),
    "too large": other(**{"0.G": np.full(SIZE, 1e7)}),
    "indefinite": other(**{"0.G": np.array([1.0, 2.0, 0.0, 1.0, 0.0, 1.0])}),
    "negative": other(**{"0.G": -np.ones(SIZE)}),
    "another shape": other(**{"0.G": np.ones(SIZE + 1)}),
    "integers": other(**{"0.G": np.ones(SIZE, dtype=int)}),
    "no such layer": other(**{"2.A": np.ones(1), "2.G": np.ones(1)}),
    "no partner": record({"0.A": packed(FACTORS[0])["0.A"].numpy()}),
    "no arrays": MetricRecord({"0.A": 1.0}),
    "no file": ArrayRecord({"0.A": Array("float64", (15,), "numpy.ndarray", b"!")}),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_factors_are_rejected_and_the_others_are_merged(bad):
    factors = [BAD[bad], *map(packed, FACTORS[1:])]
    versions, jobs, _ = merged(FedAvg(stages=[stage()]), factors)
    assert_close(versions[1], dense(range(1, N)))
    rejected = jobs[jobs["status"] == "rejected"]
    assert set(rejected["node_id"]) == {1000}
    assert rejected["reason"].str.startswith("kfac").all()


def test_the_factors_of_a_reply_that_is_rejected_for_its_weights_are_forgotten():
    optima = [{name: np.full(shape, np.nan) for name, shape in SHAPES.items()}, *OPTIMA[1:]]
    versions, jobs, _ = merged(FedAvg(stages=[stage()]), [*map(packed, FACTORS)], optima=optima)
    assert_close(versions[1], dense(range(1, N)))
    assert set(jobs.loc[jobs["status"] == "rejected", "node_id"]) == {1000}


@pytest.mark.parametrize("options", [{"normalise": "buffer_size"}, {"robust": robust.Median(f=1)}])
def test_what_counts_updates_otherwise_is_refused(options):
    with pytest.raises(ConfigError, match="with KroneckerMean"):
        FedAvg(stages=[stage()], **options)


def test_compressed_replies_are_refused():
    with pytest.raises(ConfigError, match="KroneckerMean and Compression"):
        FedAvg(stages=[stage(), Compression("int8")])
