import os

import pytest

from fedstale.traces.io.files import replacing


def test_a_file_is_replaced_when_it_is_whole(tmp_path):
    (tmp_path / "a").write_text("old")
    with replacing(tmp_path / "a") as file:
        file.write(b"new")
        assert (tmp_path / "a").read_text() == "old"
    assert (tmp_path / "a").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_failure_leaves_the_target_and_no_part(tmp_path):
    (tmp_path / "a").write_text("old")

    def fail():
        with replacing(tmp_path / "a") as file:
            file.write(b"half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert (tmp_path / "a").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_the_content_is_on_the_disk_before_the_name_and_the_name_before_the_end(
    tmp_path, monkeypatch
):
    synced = []

    def fsync(handle):
        whole = (tmp_path / "a").is_file() and (tmp_path / "a").read_bytes() == b"new"
        synced.append((os.fstat(handle).st_size if not whole else "folder", whole))

    monkeypatch.setattr("os.fsync", fsync)
    with replacing(tmp_path / "a") as file:
        file.write(b"new")
    assert synced[0] == (3, False)
    assert synced[1:] == [("folder", True)] * (os.name == "posix")


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    with replacing(tmp_path / "a") as first, replacing(tmp_path / "a") as second:
        first.write(b"first")
        second.write(b"second")
    assert (tmp_path / "a").read_bytes() == b"first"


def test_a_folder_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "none" / "a"):
        pytest.fail("nothing can be written there")
