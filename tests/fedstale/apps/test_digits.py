"""The digits app: its data and its two sides."""

import importlib

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord

from fedstale.apps import classification


@pytest.fixture
def digits(load):
    return load("digits")


@pytest.fixture
def answer(digits, ask):
    """Return a function that asks a device, of ten unless told otherwise."""
    client = digits.load_client()

    def answer(kind, network, settings=None, **where):
        arrays = ArrayRecord(network.state_dict())
        return ask(client, kind, arrays, digits.run_config(settings or {}), **where).content

    return answer


@pytest.fixture
def task(digits):
    digits.load_client()
    return importlib.import_module("digits_app.task")


def test_the_digits_are_those_of_scikit_learn_bit_for_bit(task):
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, labels = datasets.load_digits(return_X_y=True)
    own_pixels, own_labels = task.read_digits()
    assert own_pixels.shape == pixels.shape
    assert own_pixels.astype(pixels.dtype).tobytes() == pixels.tobytes()
    assert own_labels.tobytes() == labels.astype(np.int64).tobytes()


@pytest.mark.parametrize("n", [1, 2, 10, 333, 1438])
@pytest.mark.parametrize("alpha", [0.01, 1.0, 100.0])
def test_every_example_belongs_to_exactly_one_device_and_every_device_has_one(task, n, alpha):
    parts = task.assign(n, alpha, 3)
    assert len(parts) == n
    assert min(map(len, parts)) >= 1
    assert sorted(np.concatenate(parts)) == list(range(1438))


def test_labels_are_more_uneven_with_smaller_alpha(task):
    labels = task.load_data(3)[0][1].numpy()

    def largest_share(alpha):
        parts = [labels[part] for part in task.assign(20, alpha, 3) if len(part) >= 10]
        return np.mean([np.bincount(part).max() / len(part) for part in parts])

    shares = [largest_share(alpha) for alpha in (0.05, 0.5, 5.0, 500.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.5
    assert shares[-1] < 0.2


def test_no_example_is_in_both_training_and_test_set(task):
    (train, _), (test, _) = task.load_data(1)
    assert len(train) + len(test) == 1797
    # A few digits occur twice in the original data.
    everything = torch.cat([train, test]).unique(dim=0)
    assert len(everything) == len(train.unique(dim=0)) + len(test.unique(dim=0))


def test_a_device_evaluates_on_what_it_does_not_train_on_unless_it_has_too_little(task):
    for partition in range(10):
        (train, _), (test, _) = task.client_data(partition, 10, 0.5, 1)
        mine = task.assign(10, 0.5, 1)[partition]
        assert len(train) + len(test) == len(mine)
        assert len(test) == len(mine) // 5
    (train, _), (test, _) = task.client_data(0, 1438, 0.5, 1)
    assert len(train) == len(test) >= 1


@pytest.mark.parametrize(
    ("n", "alpha", "named"),
    [(0, 0.5, "num-partitions = 0"), (5, 0.0, "alpha = 0"), (5, float("nan"), "alpha = nan")],
)
def test_impossible_partitions_are_refused_by_name(task, n, alpha, named):
    with pytest.raises(ValueError, match=named):
        task.assign(n, alpha, 1)


@pytest.mark.parametrize("partition", [-1, 5])
def test_a_partition_id_out_of_range_is_refused(answer, task, partition):
    with pytest.raises(ValueError, match=f"partition-id = {partition}"):
        answer("train", task.Network(), partition=partition, n=5)


def test_training_on_a_device_lowers_its_loss_and_reports_what_flower_needs(answer, task):
    network = task.Network(1)
    mine, _ = task.client_data(2, 10, 0.5, 1)
    reply = answer("train", network, partition=2)
    assert reply["metrics"]["num-examples"] == len(mine[1])
    assert reply["metrics"]["train_loss"] < classification.evaluate(network, mine)[0]
    assert list(reply["arrays"]) == list(network.state_dict())
    network.load_state_dict(reply["arrays"].to_torch_state_dict())
    assert (
        classification.evaluate(network, mine)[0]
        < classification.evaluate(task.Network(1), mine)[0]
    )


def test_the_same_job_gives_the_same_bytes_whatever_ran_before(answer, task):
    def trained(**where):
        arrays = answer("train", task.Network(1), **where)["arrays"].to_numpy_ndarrays()
        return [array.tobytes() for array in arrays]

    first = trained(partition=1)
    other = trained(partition=2)
    torch.manual_seed(99)
    task.assign.cache_clear()
    assert trained(partition=1) == first
    assert trained(partition=1, server_round=2) != first
    assert other != first


def test_evaluation_on_a_device_is_that_of_its_held_out_examples(answer, task):
    network = task.Network(1)
    metrics = answer("evaluate", network, partition=4)["metrics"]
    images, labels = task.client_data(4, 10, 0.5, 1)[1]
    right = [int(network(x).argmax()) == int(y) for x, y in zip(images, labels, strict=True)]
    assert metrics["eval_accuracy"] == pytest.approx(np.mean(right))
    assert metrics["num-examples"] == len(labels)
    assert metrics["eval_loss"] == pytest.approx(np.log(10), abs=0.3)


@pytest.mark.parametrize(("key", "value"), [("batch-size", 0), ("local-epochs", -1)])
def test_bad_settings_of_training_are_refused_by_name(answer, task, key, value):
    with pytest.raises(ValueError, match=f"{key} = {value}"):
        answer("train", task.Network(), settings={key: value})
