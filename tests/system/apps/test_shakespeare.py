"""The shakespeare app: what a device does with its lines."""

import importlib

import pytest
import torch
from flwr.app import ArrayRecord
from places import APPS, PLAY

import fedstale
from fedstale.apps import characters


@pytest.fixture
def shakespeare(load):
    return load("shakespeare")


@pytest.fixture
def answer(shakespeare, small_play, ask):
    """Return a function that asks a device of the small play, of three."""
    client = shakespeare.load_client()

    def answer(kind, network, *, partition=0, **settings):
        config = shakespeare.run_config({"text": small_play, **settings})
        arrays = ArrayRecord(network.state_dict())
        return ask(client, kind, arrays, config, partition=partition, n=3).content

    return answer


@pytest.fixture
def task(shakespeare):
    shakespeare.load_client()
    return importlib.import_module("shakespeare_app.task")


def test_training_on_a_device_lowers_its_loss_and_repeats_to_the_byte(answer, task, small_play):
    replies = [answer("train", task.Network(1), **{"local-epochs": 3}) for _ in range(2)]
    torch.manual_seed(5)
    replies.append(answer("train", task.Network(1), **{"local-epochs": 3}))
    mine, _ = characters.split(characters.encode(characters.assign(small_play, 3)[0], task.LENGTH))
    assert replies[0]["metrics"]["num-examples"] == len(mine)
    assert replies[0]["metrics"]["train_loss"] < characters.evaluate(task.Network(1), mine)[0]
    trained = [[a.tobytes() for a in r["arrays"].to_numpy_ndarrays()] for r in replies]
    assert trained[0] == trained[1] == trained[2]


def test_it_learns_from_the_whole_play(tmp_path):
    if not PLAY.is_file():
        pytest.skip(f"needs the text {PLAY.name} in ../shared/data")
    run = fedstale.simulate(
        APPS["shakespeare"],
        traces="ideal:100",
        run_config={
            "text": str(PLAY),
            "num-server-rounds": 4,
            "strategy": "flower.FedAvg(fraction_train=0.05, fraction_evaluate=0.0)",
        },
        out=tmp_path / "run",
    )
    seen = run.curve("accuracy", "server")[1]
    assert seen[0] < 0.05
    assert seen[-1] > 0.15
