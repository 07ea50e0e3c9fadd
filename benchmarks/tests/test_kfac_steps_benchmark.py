"""Sites invert for each other what the server would, and the benchmark counts what it says."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import nn
from torch.nn.functional import cross_entropy

from fedstale.contrib.kfac import Preconditioner, SharedInverses
from fedstale.contrib.kfac.merge import INVERSES, inverses
from fedstale.flower import record_of
from fedstale.strategies.types import End, Job, RejectionError
from lab.results import read_result


@pytest.fixture(scope="module")
def bench():
    from papers import kfac_steps

    return kfac_steps


@pytest.fixture(scope="module")
def sites():
    from papers import inverting_sites

    return inverting_sites


def curvature(n, seed):
    rows = np.random.default_rng(seed).normal(size=(n + 2, n))
    return rows.T @ rows / n


FACTORS = {
    f"{layer}.{x}": curvature(n, i)
    for i, (layer, x, n) in enumerate([("0", "A", 6), ("0", "G", 4), ("2", "A", 5), ("2", "G", 3)])
}


def pair(layer):
    return {name: x for name, x in FACTORS.items() if name.startswith(f"{layer}.")}


@pytest.fixture
def stage(sites):
    made = sites.SitesInvert(0.01)
    made._run = SimpleNamespace(seed=3, arrays_key="arrays")
    for layer in "02":
        made._merged(layer, pair(layer))
    return made


def job(node_id):
    return Job(node_id, "train", 1, job_id=node_id)


def handed(stage, one):
    return stage.outgoing(one, RecordDict())


def answer(sites, content):
    return RecordDict(sites.inverted(SimpleNamespace(content=content)))


def layers(sites, content):
    return {name[0] for name in content[sites.INVERT]}


def test_sites_invert_one_layer_each_to_what_the_server_would(stage, sites):
    server = SharedInverses(0.01)
    for layer in "02":
        server._merged(layer, pair(layer))
    jobs = [job(i) for i in range(3)]
    contents = [handed(stage, each) for each in jobs]
    assert [layers(sites, each) for each in contents] == [{"0"}, {"2"}, set()]
    for one, content in zip(jobs, contents, strict=True):
        stage.incoming(one, answer(sites, content))
        stage.ended(one, End("accepted"))
    for layer, (_, found) in stage._inverses.items():
        for name, x in server._inverses[layer][1].items():
            np.testing.assert_allclose(found[name], x, rtol=1e-4, atol=1e-5)
    assert not stage._asked
    assert not stage._waiting
    # What one site has inverted goes to all.
    assert set(handed(stage, job(7))[INVERSES]) == set(FACTORS)


def test_a_layer_whose_site_never_answers_goes_to_another(stage, sites):
    first, second = job(1), job(2)
    assert layers(sites, handed(stage, first)) == {"0"}
    stage.ended(first, End("lost"))
    assert layers(sites, handed(stage, second)) == {"2"}
    assert layers(sites, handed(stage, job(3))) == {"0"}
    assert not stage._inverses


def test_inverses_of_a_stranger_are_refused(stage, sites):
    one, stranger = job(1), job(2)
    reply = answer(sites, handed(stage, one))
    handed(stage, stranger)
    with pytest.raises(RejectionError, match="not asked for"):
        stage.incoming(stranger, reply)
    assert not stage._inverses


@pytest.mark.parametrize("change", ["scaled", "NaN", "other shape", "one of two", "indefinite"])
def test_what_is_no_inverse_is_refused_and_its_layer_goes_to_another(stage, sites, change):
    one = job(1)
    found = dict(answer(sites, handed(stage, one))[INVERSES])
    x = found["0.A"].numpy()
    found["0.A"] = Array(
        {"scaled": 1.01 * x, "NaN": np.nan * x, "other shape": x[1:]}.get(change, -x)
    )
    if change == "one of two":
        del found["0.A"]
    with pytest.raises(RejectionError, match="kfac"):
        stage.incoming(one, RecordDict({INVERSES: ArrayRecord(found)}))
    stage.ended(one, End("rejected"))
    assert not stage._inverses
    handed(stage, job(2))
    assert layers(sites, handed(stage, job(3))) == {"0"}


def test_a_site_that_finds_no_inverse_sends_none(sites):
    bad = {"0.A": -np.eye(2), "0.G": np.eye(2), "2.A": np.eye(1), "2.G": np.eye(1)}
    halves = {name: Array(sites.triangle(x)) for name, x in bad.items()}
    found = answer(sites, RecordDict({sites.INVERT: ArrayRecord(halves)}))
    assert set(found[INVERSES]) == {"2.A", "2.G"}


def test_arms_begin_alike_and_send_what_they_say(bench):
    place, n = "digits, 0.1", 3
    runs = {
        arm: bench.run((place, arm, 0.03, 0.01, 7, n))
        for arm in (bench.SGD, bench.OWN, bench.SERVER, bench.SITES)
    }
    assert len({found[0][0] for found in runs.values()}) == 1
    # Sites have inverses of all from the second message on, and those of sites from the third.
    by_version = {arm: [row[0] for row in found] for arm, found in runs.items()}
    assert by_version[bench.SGD][1] == by_version[bench.SERVER][1] == by_version[bench.SITES][1]
    assert by_version[bench.SGD][2] == by_version[bench.SITES][2] != by_version[bench.SERVER][2]
    assert by_version[bench.SGD][1] != by_version[bench.OWN][1]
    megabytes = {arm: np.diff([row[2] for row in found]) for arm, found in runs.items()}
    assert np.array_equal(megabytes[bench.SGD], megabytes[bench.OWN])
    # 3,289 numbers in all factors, once from each site, and once to it.
    more = megabytes[bench.SERVER] - megabytes[bench.SGD]
    np.testing.assert_allclose(more[:2], 10 * 4 * 3289 / 1e6, rtol=0.2)
    assert more[2] < 0.01
    more = megabytes[bench.SITES] - megabytes[bench.SGD]
    np.testing.assert_allclose(more[[0, 2]], 10 * 4 * 3289 / 1e6, rtol=0.2)
    np.testing.assert_allclose(more[1], 2 * 4 * 3289 / 1e6, rtol=0.5)
    # Steps are the same, and take longer.
    assert len({found[-1][1] for found in runs.values()}) == 1
    assert runs[bench.SERVER][-1][4] > runs[bench.SGD][-1][4]


@pytest.mark.parametrize("kind", ["plain", "clipped", "both layers", "one layer", "none yet"])
def test_steps_are_those_of_the_preconditioner_and_of_torch(bench, kind):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 4))
    data = torch.rand(20, 5), torch.randint(0, 4, (20,))
    order = np.array([np.random.default_rng(i).permutation(20) for i in range(3)])
    pairs = {}
    for layer in "02":
        n_in, n_out = (6, 3) if layer == "0" else (4, 4)
        pairs |= inverses({f"{layer}.A": curvature(n_in, 1), f"{layer}.G": curvature(n_out, 2)})
    if kind == "one layer":
        pairs = {name: x for name, x in pairs.items() if name.startswith("2")}
    held = None if kind in ("plain", "none yet") else record_of(pairs)
    if kind == "clipped":
        held = ArrayRecord()
    clip, rate, model = 1e-4, 0.1, {k: x.numpy().copy() for k, x in network.state_dict().items()}
    found = bench.steps(model, data, order, rate, held=held, clip=clip)
    one = {"0.A": np.eye(6), "0.G": np.eye(3), "2.A": np.eye(4), "2.G": np.eye(4)}
    precondition = Preconditioner(
        network,
        record_of({k: x[np.triu_indices(len(x))] for k, x in one.items()})
        if kind == "clipped"
        else held or ArrayRecord(),
        clip=clip,
    )
    optimizer = torch.optim.SGD(network.parameters(), rate, 0.9)
    for batch in (x for row in torch.from_numpy(order) for x in row.split(8)):
        optimizer.zero_grad()
        cross_entropy(network(data[0][batch]), data[1][batch]).backward()
        precondition(rate)
        optimizer.step()
    for name, x in network.state_dict().items():
        np.testing.assert_allclose(found[name], x.numpy(), rtol=1e-4, atol=1e-6)


def test_work_is_counted_by_formula(bench):
    content = SimpleNamespace(config_records={}, array_records={})
    message = SimpleNamespace(content=content, metadata=SimpleNamespace(group_id="0"))
    sizes = [(3, 2)]
    plain = 6 * 16 * 6
    assert bench.work(bench.SGD, message, 16.0, sizes) == plain
    assert bench.work(bench.LONG, message, 16.0, sizes) == 5 * plain
    # Two steps, a measurement of 16 examples, and an inversion.
    own = 2 * 2 * (9 * 2 + 4 * 3) + 16 * (36 + 2 * 13) + 2 * (27 + 8)
    assert bench.work(bench.OWN, message, 16.0, sizes) == plain + own
    assert bench.server_work(bench.SERVER, 1, sizes) == 10 * 35 / 3 + 70
    assert bench.server_work(bench.SITES, 1, sizes) == 10 * 35 / 3
    assert bench.server_work(bench.SERVER, 2, sizes) == 0.0
    assert bench.server_work(bench.SGD, 1, sizes) == 0.0


def test_a_run_that_does_not_arrive_counts_with_all_of_its_versions(bench):
    found = [[0.1, 0.0], [0.6, 10.0], [0.5, 20.0]]
    assert bench.reached(found, 0.6) == [1.0, 1.0, 0.6, 10.0]
    assert bench.reached(found, 0.7) == [0.0, 2.0, 0.5, 20.0]


PLACES = "digits, 0.1", "digits, 100", "clothes, 0.1", "clothes, 100"


def row(place, arm):
    (found,) = (
        each
        for each in read_result(f"kfac_steps_{place.partition(',')[0]}")["rows"]
        if (each["place"], each["arm"]) == (place, arm)
    )
    return found


def ratios(arm, key):
    return [row(place, arm)[f"{key}_ratio"][0] for place in PLACES]


def test_what_the_page_says_of_sharing_is_what_came_out(bench):
    uneven, even = PLACES[::2], PLACES[1::2]
    for place in uneven:
        shared, own = row(place, bench.SERVER), row(place, bench.OWN)
        assert shared["reached"] == 5
        assert shared["versions_ratio"][0] < 0.415
        assert shared["versions_ratio"][2] < 1
        assert shared["to_sgd"][1] > 0
        assert shared["final"] > max(row(place, arm)["final"] for arm in (bench.SGD, bench.LONG))
        assert own["final"] < row(place, bench.SGD)["final"]
    for place in even:
        shared, own = row(place, bench.SERVER), row(place, bench.OWN)
        assert own["versions_ratio"][0] <= shared["versions_ratio"][0]


def test_what_the_page_says_of_bytes_and_time_is_what_came_out(bench):
    shared, long, sites = (
        {key: ratios(arm, key) for key in ("steps", "megabytes", *bench.SECONDS)}
        for arm in (bench.SERVER, bench.LONG, bench.SITES)
    )
    assert [round(each(shared["megabytes"]), 2) for each in (min, max)] == [0.36, 0.66]
    assert [round(each(shared["steps"]), 2) for each in (min, max)] == [0.21, 0.48]
    assert [round(each(shared["seconds_at_1"]), 2) for each in (min, max)] == [0.36, 0.66]
    fewer = [a < b for a, b in zip(long["megabytes"], shared["megabytes"], strict=True)]
    assert sum(fewer) == 3
    more = [a / b for a, b in zip(long["steps"], shared["steps"], strict=True)]
    assert 4 < min(more) < max(more) < 12
    ends = [row(place, bench.SERVER)["seconds_at_100_ratio"][1:] for place in PLACES]
    assert [low > 1 for low, _ in ends] == [False, False, True, False]
    assert not any(high < 1 for _, high in ends)
    slower = zip(sites["seconds_at_1"], shared["seconds_at_1"], strict=True)
    assert all(a > b for a, b in slower)
    larger = zip(sites["megabytes"], shared["megabytes"], strict=True)
    assert sum(a > b for a, b in larger) == 3
