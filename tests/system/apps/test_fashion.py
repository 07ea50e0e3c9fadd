"""The fashion app: its files, its two sides, and whole runs from the command line."""

import gzip
import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from clothes import FILES, drawn, idx, write_clothes
from flwr.app import ArrayRecord
from places import APPS
from typer.testing import CliRunner

import fedstale
from fedstale.apps import classification
from fedstale.cli.main import app as command
from fedstale.errors import ConfigError

MIB = 1 << 20
SMALL = (
    "local-epochs=5 batch-size=10 alpha=10 num-server-rounds=6 "
    'strategy="flower.FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)"'
)


def simulated(data, out, *options, settings=SMALL):
    """Run the command; return what it says, and the exit code."""
    run_config = f"data='{data}' {settings}"
    words = ["simulate", str(APPS["fashion"]), "-c", run_config, "--out", str(out), *options]
    result = CliRunner().invoke(command, words)
    return result.output, result.exit_code


def written(folder):
    names = ("events.parquet", "metrics.parquet", "model.safetensors")
    return [(folder / name).read_bytes() for name in names]


@pytest.fixture
def fashion(load):
    return load("fashion")


@pytest.fixture
def reader(fashion):
    fashion.load_client()
    return importlib.import_module("fashion_app.idx")


@pytest.fixture
def task(fashion):
    fashion.load_client()
    return importlib.import_module("fashion_app.task")


@pytest.fixture
def answer(fashion, small_clothes, ask):
    """Return a function that asks a device, of five unless told otherwise."""
    client = fashion.load_client()

    def answer(kind, network, *, partition=0, n=5, server_round=1, **settings):
        config = fashion.run_config({"data": small_clothes, **settings})
        arrays = ArrayRecord(network.state_dict())
        where = {"partition": partition, "n": n, "server_round": server_round}
        return ask(client, kind, arrays, config, **where).content

    return answer


def test_two_runs_of_the_command_learn_and_write_the_same_bytes(small_clothes, tmp_path, task):
    for out in ("a", "b"):
        said, code = simulated(small_clothes, tmp_path / out, "--traces", "synthetic:30")
        assert code == 0, said
    assert written(tmp_path / "a") == written(tmp_path / "b")
    run = fedstale.read_run(tmp_path / "a")
    said = run.metrics.query("source == 'server'").pivot(columns="name", values="value")
    assert said["accuracy"].dropna().iloc[-1] > 0.8
    assert run.jobs["status"].eq("reported").sum() > 6, "no model is made of several replies"
    # What the server said of its last model is what each test image, one by one, says of it.
    network = task.Network()
    network.load_state_dict({name: torch.from_numpy(w) for name, w in run.model.items()})
    images, labels = drawn(110, 2)
    shown = [torch.tensor(image[None], dtype=torch.uint8) for image in images]
    logits = np.concatenate([network(image).detach().double().numpy() for image in shown])
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    loss = -np.log(chances[np.arange(110), labels]).mean()
    assert said["loss"].dropna().iloc[-1] == pytest.approx(loss, rel=1e-4)
    right = (logits.argmax(axis=1) == labels).mean()
    assert said["accuracy"].dropna().iloc[-1] == pytest.approx(right)


def test_a_folder_that_lacks_a_file_is_one_sentence_that_names_the_package(tmp_path):
    folder = tmp_path / "clothes"
    write_clothes(folder, n_train=30, n_test=10)
    for missing in FILES:
        whole = (folder / missing).read_bytes()
        (folder / missing).unlink()
        said, code = simulated(folder, tmp_path / "run", "--traces", "ideal:2", "--overwrite")
        (folder / missing).write_bytes(whole)
        assert code == 1
        (line,) = [line for line in said.splitlines() if line.startswith("fedstale: ")]
        assert f"no {missing} or {missing}.gz in {folder}" in line
        assert "dataset-fashion-mnist" in line
        assert "--run-config 'data=" in line


def test_plain_and_gzipped_files_hold_what_was_written(reader, tmp_path):
    for packed in (False, True):
        write_clothes(tmp_path / str(packed), packed=packed)
        train, test = reader.read_folder(str(tmp_path / str(packed)))
        for (images, labels), (n, seed) in ((train, (400, 1)), (test, (110, 2))):
            expected = drawn(n, seed)
            assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
            assert (images.numpy() == expected[0]).all()
            assert (labels.numpy() == expected[1]).all()


def test_without_a_setting_the_folder_of_debian_is_read(reader, small_clothes, monkeypatch):
    monkeypatch.setattr(reader, "DEBIAN", Path(small_clothes))
    assert len(reader.read_folder("")[0][1]) == 400


IMAGES, LABELS = drawn(30, 3)


@pytest.mark.parametrize(
    ("which", "content", "said"),
    [
        (0, b"", "is empty"),
        (0, b"\0\0\x08", "begins with 000008: expected IDX"),
        (0, idx(IMAGES)[:-1], "holds 23519 values: expected 23520"),
        (0, idx(IMAGES) + b"x", "holds 23521 values: expected 23520"),
        (0, idx(IMAGES, kind=13), "begins with 00000d03"),
        (0, idx(IMAGES[:, :27]), r"expected IDX of unsigned bytes with axes \(n, 28, 28\)"),
        (0, idx(LABELS), r"with axes \(n, 28, 28\)"),
        (0, idx(IMAGES[:0]), r"with axes \(n, 28, 28\)"),
        (0, b"<html>Not found</html>" * 9, "begins with 3c68746d"),
        (0, gzip.compress(idx(IMAGES))[:-9], "truncated or damaged"),
        (0, gzip.compress(idx(IMAGES))[:-8] + bytes(8), "truncated or damaged"),
        (0, gzip.compress(idx(IMAGES) + bytes(90 * MIB)), "larger than 78400016 bytes"),
        (1, idx(LABELS[:-1]), "30 images and 29 labels"),
        (1, idx(LABELS + 1), "has a label 10: expected 0 to 9"),
        (1, idx(IMAGES), r"with axes \(n\)"),
        (1, idx(LABELS)[:4] + b"\xff" * 4, "holds 0 values: expected 4294967295"),
    ],
)
def test_a_damaged_file_is_one_sentence(reader, tmp_path, which, content, said):
    write_clothes(tmp_path / "data", n_train=30)
    (tmp_path / "data" / FILES[which]).write_bytes(content)
    with pytest.raises(ConfigError, match=f"^data = '{tmp_path}/data': .*{said}") as problem:
        reader.read_folder(str(tmp_path / "data"))
    assert "\n" not in str(problem.value)


def test_devices_share_the_training_images_and_no_test_image(task, small_clothes):
    mine = []
    for partition in range(7):
        data = task.client_data(partition, 7, data=small_clothes, alpha=0.5, seed=1)
        mine += [torch.cat([images.flatten(1), labels[:, None]], 1) for images, labels in data]
    dealt = torch.cat(mine)
    images, labels = drawn(400, 1)
    whole = torch.tensor(np.column_stack([images.reshape(400, -1), labels]))
    assert sorted(dealt.tolist()) == sorted(whole.tolist())


def test_training_lowers_the_loss_counts_its_examples_and_repeats_to_the_byte(
    answer, task, small_clothes
):
    network = task.Network(1)
    replies = [answer("train", network, partition=2)]
    torch.manual_seed(5)
    answer("train", network, partition=1)
    task.load_data.cache_clear()
    task.assign.cache_clear()
    replies.append(answer("train", network, partition=2))
    other = answer("train", network, partition=2, server_round=2)
    (mine, _) = task.client_data(2, 5, data=small_clothes, alpha=0.5, seed=1)
    assert replies[0]["metrics"]["num-examples"] == len(mine[1])
    assert replies[0]["metrics"]["train_loss"] < classification.evaluate(network, mine)[0]
    bytes_of = [[a.tobytes() for a in r["arrays"].to_numpy_ndarrays()] for r in (*replies, other)]
    assert bytes_of[0] == bytes_of[1] != bytes_of[2]


@pytest.fixture
def authors(reader):
    """Return the folder with the authors' own files."""
    if not reader.DEBIAN.is_dir():
        pytest.skip("needs Debian's package dataset-fashion-mnist")
    return str(reader.DEBIAN)


def test_the_authors_files_hold_60_000_and_10_000_images_of_ten_kinds(reader, authors):
    for (images, labels), n in zip(reader.read_folder(authors), (60_000, 10_000), strict=True):
        assert images.shape == (n, 28, 28)
        assert labels.bincount().tolist() == [n // 10] * 10
        # Clothes lie in the middle: a reader that is off by some bytes would shift them.
        assert images[:, :, 10:18].float().mean() > 2 * images[:, :, [0, 1, 26, 27]].float().mean()


@pytest.mark.slow
def test_clothes_are_told_apart_after_a_few_rounds(authors, tmp_path):
    said, code = simulated("", tmp_path / "run", settings="num-server-rounds=8")
    assert code == 0, said
    run = fedstale.read_run(tmp_path / "run")
    accuracy = run.metrics.query("source == 'server' and name == 'accuracy'")["value"].to_numpy()
    # One answer for all reaches 0.1, and so does the network that nothing has trained.
    assert accuracy[0] < 0.2
    assert accuracy[-1] > 0.65
