"""The fashion app on the 70,000 images of its authors."""

import importlib

import pytest
from fashion_runs import simulated

import fedstale


@pytest.fixture
def reader(load):
    load("fashion").load_client()
    return importlib.import_module("fashion_app.idx")


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
