"""The app of examples/pools in a simulation: what it learns, and costs, and how it goes on."""

import hashlib

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from places import ROOT
from virtual_grid import ConfigRecord, identity

import fedstale
from fedstale.simulation import FlowerApp

APP = ROOT / "examples" / "pools"
EVERY, PUBLIC = 2, 40
CONFIG = {"exchange-every": EVERY, "public": PUBLIC, "local-steps": 4, "num-server-rounds": 6}
PREDICTED_BYTES = PUBLIC * 10 * 4
"""Of one pool: a float32 for each public image and class."""


def simulated(out=None, **options):
    config = CONFIG | options.pop("run_config", {})
    return fedstale.simulate(
        APP,
        traces="synthetic:6@sites",
        seed=1,
        run_config=config,
        out=out,
        executor="inline",
        progress=False,
        **options,
    )


@pytest.fixture(scope="module")
def told():
    """Return a run with exchanges."""
    return simulated()


@pytest.fixture(scope="module")
def app():
    """Return the modules of the client and of the data."""
    found = FlowerApp.find(APP)
    with found.importable(), identity():
        found.load_client()
        from pools_app import client_app, stage, task

        yield client_app, stage, task


def accuracies(run, name="accuracy"):
    measured = run.metrics[(run.metrics["source"] == "server") & (run.metrics["name"] == name)]
    return measured.sort_values("version")["value"].to_numpy()


def test_every_pool_learns(told):
    assert told.status == "finished", told.reason
    for name in ("small", "wide", "conv"):
        found = accuracies(told, f"accuracy_{name}")
        assert found[-1] > found[0] + 0.1
    pools = [accuracies(told, f"accuracy_{name}") for name in ("small", "wide", "conv")]
    np.testing.assert_allclose(accuracies(told), np.mean(pools, axis=0))


def test_a_site_pays_for_its_pool_and_for_predictions_of_the_other_two(told):
    jobs = told.jobs.sort_values("job_id")
    assert set(jobs["status"]) == {"reported"}
    jobs["pool"] = (jobs["node_id"] - 1000) % 3
    assert jobs.loc[jobs["base_version"] == 0, "downloaded_bytes"].nunique() == 1
    for _, own in jobs.groupby("node_id"):
        down = own.set_index("base_version")["downloaded_bytes"]
        assert down[0] > down[1] + 10_000
        more = down[EVERY] - down[1]
        assert 2 * PREDICTED_BYTES < more < 2 * PREDICTED_BYTES + 1200
        assert down[EVERY + 1] == down[EVERY]
        work = own.set_index("base_version")["compute_s"]
        assert work[EVERY] > 1.4 * work[1]
    # Replies are as large as the network of the pool: wide, conv, small.
    sizes = jobs.groupby("pool")["uploaded_bytes"].max()
    assert sizes[1] > sizes[2] > sizes[0]


def test_predictions_that_count_nothing_change_nothing(told):
    quiet = simulated(run_config={"distillation": 0.0})
    none = simulated(run_config={"exchange-every": 0})
    for name, array in none.model.items():
        np.testing.assert_allclose(quiet.model[name], array, atol=1e-6)
    assert any(np.abs(told.model[name] - array).max() > 1e-3 for name, array in none.model.items())


def contents(folder):
    names = ("events.parquet", "metrics.parquet", "model.safetensors")
    return [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names]


def test_a_run_that_goes_on_is_the_unbroken_one_to_the_byte(tmp_path):
    config = {"strategy": "FedBuff(6, 2)", "num-server-rounds": 12}
    whole = simulated(tmp_path / "whole", run_config=config)
    paused = simulated(tmp_path / "broken", run_config=config, pause_at="50s")
    assert 0 < paused.metrics["version"].max() < 12
    again = simulated(tmp_path / "broken", run_config=config, resume=True)
    assert (whole.status, again.status) == ("finished", "finished")
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")


def test_a_node_config_may_say_the_pool():
    tables = {f"device-{i}": {"pool": "conv"} for i in range(6)}
    found = simulated(node_config=tables, run_config={"num-server-rounds": 2})
    assert len(accuracies(found, "accuracy_small")) == 3
    assert len(set(accuracies(found, "accuracy_small"))) == 1
    assert len(set(accuracies(found, "accuracy_conv"))) > 1


def test_a_site_whose_node_config_says_another_pool_is_told_which_there_are():
    tables = {"device-0": {"pool": "huge"}}
    found = simulated(node_config=tables, run_config={"num-server-rounds": 1})
    (reason,) = found.jobs.loc[found.jobs["node_id"] == 1000, "reason"]
    assert "'huge' in the node config: expected small|wide|conv" in reason
    assert (found.jobs["status"] == "reported").sum() == 5


def test_one_network_for_all_exchanges_nothing():
    found = simulated(run_config={"pools": "small"})
    assert found.status == "finished"
    assert {name.partition(".")[0] for name in found.model} == {"small"}
    down = found.jobs.groupby("base_version")["downloaded_bytes"].max()
    assert down.nunique() == 1


def test_a_pool_of_another_name_is_refused_with_the_ones_that_there_are():
    found = simulated(run_config={"pools": "small,huge"})
    assert found.status == "failed"
    assert "huge" in found.reason
    assert "small,wide,conv" in found.reason


def predictions(stage, public, others):
    content = RecordDict({"predictions": ArrayRecord([np.asarray(x) for x in others])})
    content["predicted"] = ConfigRecord({stage.PUBLIC: stage.digest(public)})
    return Message(content, 1, "train")


def test_a_site_learns_from_the_mean_of_what_the_others_predict(app):
    client, stage, _ = app
    public = np.zeros((2, 1, 8, 8), dtype=np.float32)
    each = np.array([[[0.2, 0.8], [0.5, 0.5]], [[0.6, 0.4], [0.1, 0.9]]], dtype=np.float32)
    found = client.predicted(predictions(stage, public, each), torch.from_numpy(public))
    np.testing.assert_allclose(found.numpy(), [[0.4, 0.6], [0.3, 0.7]], rtol=1e-6)
    assert client.predicted(Message(RecordDict(), 1, "train"), torch.zeros(1)) is None


@pytest.mark.parametrize("change", [lambda x: x[:1], lambda x: x[::-1], lambda x: x.reshape(-1, 8)])
def test_a_site_with_other_public_images_says_so(app, change):
    client, stage, _ = app
    public = np.arange(128, dtype=np.float32).reshape(2, 1, 8, 8)
    message = predictions(stage, public, [np.full((2, 10), 0.1)])
    other = torch.from_numpy(np.ascontiguousarray(change(public)))
    with pytest.raises(ValueError, match="not those of the server"):
        client.predicted(message, other)


def config(**changes):
    return FlowerApp.find(APP).run_config({k.replace("_", "-"): v for k, v in changes.items()})


@pytest.mark.parametrize("of", ["itself", "others"])
def test_labels_and_predictions_have_their_shares_of_the_loss(app, of):
    client, stage, task = app
    public = task.images(config()).public
    arrays = ArrayRecord(task.network("wide", 8, seed=1).state_dict())
    told = [task.predict("wide", arrays, public.numpy())]
    if of == "others":
        told = [np.eye(10, dtype=np.float32)[np.arange(300) % 10], told[0]]

    def change(share):
        message = predictions(stage, public.numpy(), told)
        message.content["arrays"] = ArrayRecord(stage.with_prefix(arrays, "wide"))
        message.metadata.__dict__["_message_id"] = "1"
        about = config(distillation=share, local_steps=1)
        place = {"partition-id": 1, "num-partitions": 12}
        reply = client.train(message, Context(1, 1, place, RecordDict(), about))
        return reply.content["arrays"]["wide.3.weight"].numpy()

    labels, both, predicted = map(change, (0.0, 0.5, 1.0))
    np.testing.assert_allclose(both, (labels + predicted) / 2, atol=1e-6)
    assert np.abs(labels).max() > 1e-3
    # Who predicts as the others do has nothing to learn from them.
    assert (np.abs(predicted).max() > 1e-3) == (of == "others")


def test_learning_from_predictions_is_twice_the_work(app):
    _, stage, task = app
    told = predictions(stage, np.zeros((2, 1, 8, 8)), [np.full((2, 10), 0.1)])
    assert task.work(told) == 2 * task.work(Message(RecordDict(), 1, "train"))


def test_each_image_of_the_sites_has_one_site_and_public_and_test_images_have_none(app):
    *_, task = app
    about = config(seed=3)
    found, n_sites = task.images(about), 12
    own = [task.own(about, site, n_sites) for site in range(n_sites)]
    assert all(len(labels) for _, labels in own)

    def rows(images):
        return sorted(map(bytes, images.numpy()))

    assert rows(torch.cat([images for images, _ in own])) == rows(found.own[0])
    assert len(found.public) == 300
    assert len(found.own[1]) + len(found.test[1]) == 1797 - 1797 // 5


def test_pools_have_different_classes_where_their_concentration_is_low(app):
    *_, task = app

    def distance(pool_alpha):
        about = config(pool_alpha=pool_alpha)
        counts = np.zeros((3, 10))
        for site in range(12):
            _, labels = task.own(about, site, 12)
            counts[site % 3] += np.bincount(labels, minlength=10)
        shares = counts / counts.sum(axis=1, keepdims=True)
        return np.abs(shares[0] - shares[1]).sum() / 2

    assert distance(100.0) < 0.2
    assert distance(0.1) > 0.6
