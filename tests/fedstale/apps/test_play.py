"""A play becomes devices: its roles, and how their text is dealt."""

import gzip
from pathlib import Path

import pytest

from fedstale.apps import characters


def test_each_role_keeps_what_it_says_and_nothing_else(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text(
        "A heading nobody says\n\nROMEO:\nAy me:\nsad hours.\n\nJULIET:\nRomeo!\n\nAlone.\n\n"
        "ROMEO:\nMy dear?\n"
    )
    assert characters.read_roles(str(path)) == {
        "ROMEO": "Ay me:\nsad hours.\nMy dear?\n",
        "JULIET": "Romeo!\nAlone.\n",
    }


def test_a_compressed_play_reads_like_a_plain_one(small_play, tmp_path):
    path = tmp_path / "p.txt.gz"
    path.write_bytes(gzip.compress(Path(small_play).read_bytes()))
    assert characters.read_roles(str(path)) == characters.read_roles(small_play)
    assert set(characters.read_roles(small_play)) == {"HAMLET", "OPHELIA", "GHOST"}


@pytest.mark.parametrize("n", [1, 2, 3, 5, 9])
def test_devices_share_out_the_text_that_is_not_held_out(small_play, n):
    texts = characters.assign(small_play, n)
    everything = "".join(characters.read_roles(small_play).values())
    assert len(texts) == n
    assert min(map(len, texts)) >= characters.MIN_CHARACTERS
    dealt = sorted("".join(texts) + characters.held_out(small_play))
    assert dealt == sorted(everything)
    assert 0.08 < len(characters.held_out(small_play)) / len(everything) < 0.12


def test_impossible_numbers_of_devices_are_refused(small_play):
    with pytest.raises(ValueError, match="num-partitions = 0"):
        characters.assign(small_play, 0)
    with pytest.raises(ValueError, match=r"num-partitions = 1000.*use fewer devices"):
        characters.assign(small_play, 1000)


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
def test_a_text_that_is_no_play_is_refused_in_one_sentence(tmp_path, name, content):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^text = .*{name}.*expected"):
        characters.read_roles(str(path))
