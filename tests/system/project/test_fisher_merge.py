"""The stage of examples/fisher_merge.py: what it merges, and what it does not take from a client.

Clients of a quadratic loss each know its Fisher exactly, so one merge must be the pooled optimum.
"""

import runpy
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord
from own_optima import EXAMPLES, answered, record

from fedstale.errors import ConfigError
from fedstale.strategies import FedAvg, FedBuff, robust
from fedstale.strategies.weighting import constant

EXAMPLE = Path(__file__).parents[3] / "examples" / "fisher_merge.py"
N = 4
SHAPES = {"w": (3, 2), "b": ()}


@pytest.fixture(scope="module")
def fisher_mean():
    return runpy.run_path(str(EXAMPLE))["FisherMean"]


rng = np.random.default_rng(0)
OPTIMA = [{name: rng.normal(size=shape) for name, shape in SHAPES.items()} for _ in range(N)]
FISHERS = [{name: rng.uniform(0.1, 9, shape) for name, shape in SHAPES.items()} for _ in range(N)]


def merged(strategy, fishers, n_versions=2, optima=OPTIMA):
    """Return the versions of a model that clients answer with their own optimum, and the jobs.

    Args:
        strategy: of the server.
        fishers: what each client sends; None for nothing.
        n_versions: after the first model, of zeros.
        optima: what each client sends as its weights.
    """
    grid, _, versions = answered(strategy, optima, fishers, name="fisher", n_versions=n_versions)
    if strategy.schedule.send == "after_step":
        # Nothing waits for a step any more, so nothing is kept for one.
        assert not any(stage.state_dict()["_fishers"] for stage in grid.runtime.stages)
    return versions, grid.events().to_pandas()


def pooled(nodes, fishers=FISHERS):
    """Return what minimises the sum of the losses of some clients."""
    return {
        name: sum(EXAMPLES[i] * fishers[i][name] * OPTIMA[i][name] for i in nodes)
        / sum(EXAMPLES[i] * fishers[i][name] for i in nodes)
        for name in SHAPES
    }


def assert_close(model, wanted):
    for name in SHAPES:
        np.testing.assert_allclose(model[name], wanted[name], rtol=0, atol=1e-6)


def test_one_merge_of_quadratic_clients_is_the_pooled_optimum(fisher_mean):
    versions, _ = merged(FedAvg(stages=[fisher_mean(1e-9)]), [*map(record, FISHERS)])
    assert_close(versions[1], pooled(range(N)))


def test_each_buffer_of_a_stream_is_the_pooled_optimum_of_its_own_clients(fisher_mean):
    strategy = FedBuff(
        N, 2, staleness=constant(), update="model", normalise="examples", stages=[fisher_mean(1e-9)]
    )
    versions, jobs = merged(strategy, [*map(record, FISHERS)], n_versions=8)
    used = jobs[jobs["aggregated_version"] > 0]
    assert len(versions) == 9
    assert used["staleness"].max() > 0
    for version, ones in used.groupby("aggregated_version"):
        assert_close(versions[version], pooled(ones["node_id"] - 1000))


def test_a_client_that_sends_no_fisher_counts_by_the_damping(fisher_mean):
    versions, _ = merged(FedAvg(stages=[fisher_mean(0.5)]), [None, *map(record, FISHERS[1:])])
    damped = [{name: fisher[name] + 0.5 for name in SHAPES} for fisher in FISHERS]
    assert_close(versions[1], pooled(range(N), [dict.fromkeys(SHAPES, 0.5), *damped[1:]]))


def with_w(w):
    return record(FISHERS[0] | {"w": w})


BAD = {
    "NaN": with_w(np.full((3, 2), np.nan)),
    "negative": with_w(np.full((3, 2), -1.0)),
    "too large": with_w(np.full((3, 2), 1e7)),
    "another shape": with_w(np.ones((2, 3))),
    "integers": with_w(np.ones((3, 2), dtype=int)),
    "names": record({"w": np.ones((3, 2))}),
    "no arrays": MetricRecord({"w": 1.0}),
    "no file": ArrayRecord(
        {"w": Array("float64", (3, 2), "numpy.ndarray", b"!"), "b": Array(np.ones(()))}
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_fisher_is_rejected_and_the_others_are_merged(fisher_mean, bad):
    fishers = [BAD[bad], *map(record, FISHERS[1:])]
    versions, jobs = merged(FedAvg(stages=[fisher_mean(1e-9)]), fishers)
    assert_close(versions[1], pooled(range(1, N)))
    rejected = jobs[jobs["status"] == "rejected"]
    assert set(rejected["node_id"]) == {1000}
    assert rejected["reason"].str.startswith("fisher").all()


def test_the_fisher_of_a_reply_that_is_rejected_for_its_weights_is_forgotten(fisher_mean):
    optima = [{name: np.full(shape, np.nan) for name, shape in SHAPES.items()}, *OPTIMA[1:]]
    strategy = FedAvg(stages=[fisher_mean(1e-9)])
    versions, jobs = merged(strategy, [*map(record, FISHERS)], optima=optima)
    assert_close(versions[1], pooled(range(1, N)))
    assert set(jobs.loc[jobs["status"] == "rejected", "node_id"]) == {1000}


@pytest.mark.parametrize("options", [{"normalise": "buffer_size"}, {"robust": robust.Median(f=1)}])
def test_what_counts_updates_otherwise_is_refused(fisher_mean, options):
    with pytest.raises(ConfigError, match="with FisherMean"):
        FedAvg(stages=[fisher_mean(1.0)], **options)
