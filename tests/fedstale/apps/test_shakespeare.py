"""The shakespeare app: how a play becomes devices, and its two sides."""

import gzip
import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord


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


@pytest.fixture
def play(shakespeare):
    shakespeare.load_client()
    return importlib.import_module("shakespeare_app.play")


def test_each_role_keeps_what_it_says_and_nothing_else(play, tmp_path):
    path = tmp_path / "p.txt"
    path.write_text(
        "A heading nobody says\n\nROMEO:\nAy me:\nsad hours.\n\nJULIET:\nRomeo!\n\nAlone.\n\n"
        "ROMEO:\nMy dear?\n"
    )
    assert play.read_roles(str(path)) == {
        "ROMEO": "Ay me:\nsad hours.\nMy dear?\n",
        "JULIET": "Romeo!\nAlone.\n",
    }


def test_a_compressed_play_reads_like_a_plain_one(play, small_play, tmp_path):
    path = tmp_path / "p.txt.gz"
    path.write_bytes(gzip.compress(Path(small_play).read_bytes()))
    assert play.read_roles(str(path)) == play.read_roles(small_play)
    assert set(play.read_roles(small_play)) == {"HAMLET", "OPHELIA", "GHOST"}


@pytest.mark.parametrize("n", [1, 2, 3, 5, 9])
def test_devices_share_out_the_text_that_is_not_held_out(play, small_play, n):
    texts = play.assign(small_play, n)
    everything = "".join(play.read_roles(small_play).values())
    assert len(texts) == n
    assert min(map(len, texts)) >= play.MIN_CHARACTERS
    dealt = sorted("".join(texts) + play.held_out(small_play))
    assert dealt == sorted(everything)
    assert 0.08 < len(play.held_out(small_play)) / len(everything) < 0.12


def test_impossible_numbers_of_devices_are_refused(play, small_play):
    with pytest.raises(ValueError, match="num-partitions = 0"):
        play.assign(small_play, 0)
    with pytest.raises(ValueError, match=r"num-partitions = 1000.*use fewer devices"):
        play.assign(small_play, 1000)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("absent.txt", None),
        ("plain.gz", b"not compressed"),
        ("cut.gz", gzip.compress(b"ROMEO:\nAy me." * 99, mtime=0)[:-9]),
        ("silent.txt", b"Nobody speaks here."),
        ("latin.txt", b"ROMEO:\n\xff\xfe"),
    ],
)
def test_a_text_that_is_no_play_is_refused_in_one_sentence(play, tmp_path, name, content):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^text = .*{name}.*expected"):
        play.read_roles(str(path))


def test_examples_overlap_by_one_character_so_that_every_one_is_guessed(task):
    text = "".join(task.ALPHABET[i % 90] for i in range(3 * task.LENGTH + 5))
    examples = task.encode(text)
    assert examples.shape == (3, task.LENGTH + 1)
    assert (examples[1:, 0] == examples[:-1, -1]).all()
    inputs = "".join(task.ALPHABET[code] for code in examples[:, :-1].flatten())
    assert inputs == text[: 3 * task.LENGTH]


def test_unknown_characters_have_a_code_of_their_own(task):
    codes = task.encode("\u00e9\u4eba" + "x" * task.LENGTH)
    assert codes[0, 0] == codes[0, 1] == len(task.ALPHABET)


def test_training_on_a_device_lowers_its_loss_and_repeats_to_the_byte(
    answer, play, task, small_play
):
    replies = [answer("train", task.Network(1), **{"local-epochs": 3}) for _ in range(2)]
    torch.manual_seed(5)
    replies.append(answer("train", task.Network(1), **{"local-epochs": 3}))
    mine, _ = task.split(task.encode(play.assign(small_play, 3)[0]))
    assert replies[0]["metrics"]["num-examples"] == len(mine)
    assert replies[0]["metrics"]["train_loss"] < task.evaluate(task.Network(1), mine)[0]
    trained = [[a.tobytes() for a in r["arrays"].to_numpy_ndarrays()] for r in replies]
    assert trained[0] == trained[1] == trained[2]


def test_mean_loss_does_not_depend_on_how_examples_are_batched(task):
    rng = np.random.default_rng(0)
    examples = torch.from_numpy(rng.integers(90, size=(300, task.LENGTH + 1)))
    network = task.Network(2)
    whole = task.evaluate(network, examples)
    parts = [task.evaluate(network, part) for part in examples.split(100)]
    assert np.mean(parts, axis=0) == pytest.approx(whole, rel=1e-5)
