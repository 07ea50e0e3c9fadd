import gzip
import io
import os
import tarfile
import zipfile

import pytest

from fedstale.errors import TraceError
from fedstale.traces.sources import archives
from fedstale.traces.sources.archives import head, members, read_file


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    for name, limit in (("FILES", 5), ("BYTES", 1000), ("BYTES_IN_ALL", 3000)):
        monkeypatch.setattr(archives, f"MOST_{name}", limit)


def everything(path):
    return dict(members(path, lambda _: True))


def make_zip(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def make_tar(path, files, **attributes):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in attributes.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(data))
    return path


def make_folder(path, files):
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


MAKERS = {"zip": make_zip, "tar": make_tar, "folder": make_folder}


@pytest.fixture(params=MAKERS)
def make(request, tmp_path):
    def build(files):
        place = tmp_path / request.param
        if request.param == "folder":
            place.mkdir()
        return MAKERS[request.param](place, files)

    build.kind = request.param
    return build


def test_all_containers_give_the_same_files(make):
    files = {"a/one.csv": b"1", "two.csv": b"22"}
    assert everything(make(files)) == files


def test_files_that_are_not_wanted_are_named_and_not_read(make):
    path = make({"a.csv": b"1", "b.txt": b"2"})
    assert dict(members(path, lambda n: n.endswith(".csv"))) == {
        "a.csv": b"1",
        "b.txt": None,
    }


def test_hidden_files_and_resource_forks_are_passed_over(make):
    path = make({"__MACOSX/a/._x.csv": b"x", "a/.DS_Store": b"x", "a/x.csv": b"1"})
    assert everything(path) == {"a/x.csv": b"1"}


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ([1] * 6, "more than 5 files"),
        ([1_001], "larger than 1000 bytes"),
        ([1_000] * 3 + [1], "or 3000 bytes"),
    ],
)
def test_more_than_the_limits_is_rejected(make, sizes, says):
    with pytest.raises(TraceError, match=says):
        everything(make({f"{i}.csv": b"0" * size for i, size in enumerate(sizes)}))


@pytest.mark.parametrize("name", ["../out.csv", "a/../../out.csv", "/etc/out.csv", "..\\out.csv"])
@pytest.mark.parametrize("maker", [make_zip, make_tar])
def test_a_name_that_leads_out_of_the_archive_is_rejected(maker, name, tmp_path):
    path = maker(tmp_path / "archive", {name: b"1"})
    with pytest.raises(TraceError, match="leads out of the archive"):
        everything(path)


@pytest.mark.parametrize("maker", [make_tar, make_folder])
def test_a_wanted_file_whose_name_is_no_text_is_rejected(maker, tmp_path):
    name = os.fsdecode(b"caf\xe9.csv")
    path = tmp_path / "archive"
    if maker is make_folder:
        path.mkdir()
    maker(path, {name: b"1", "._" + name: b"2"})
    with pytest.raises(TraceError, match="is not named in UTF-8: rename it"):
        everything(path)
    assert dict(members(path, lambda _: False)) == {name: None}


def test_a_zip_member_without_a_name_is_a_trace_error(tmp_path):
    path = make_zip(tmp_path / "a.zip", {"name.csv": b"1"})
    # zipfile takes a name up to its first null.
    path.write_bytes(path.read_bytes().replace(b"name.csv", b"\x00ame.csv"))
    with pytest.raises(TraceError, match="a member has no name"):
        everything(path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_a_tar_are_passed_over(kind, tmp_path):
    path = make_tar(tmp_path / "a.tar.gz", {"link": b""}, type=kind, linkname="/etc/passwd")
    assert everything(path) == {}


def test_a_tar_bomb_that_is_skipped_is_still_counted(tmp_path):
    path = make_tar(tmp_path / "a.tar.gz", {"x": b"0" * 50_000, "y": b"1"})
    with pytest.raises(TraceError, match="unpacks to too much"):
        list(members(path, lambda _: False))


@pytest.mark.parametrize("maker", [make_zip, make_tar])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_a_truncated_archive_is_a_trace_error(maker, share, tmp_path):
    whole = maker(tmp_path / "whole", {f"{i}": os.urandom(500) for i in range(4)}).read_bytes()
    broken = tmp_path / "broken"
    broken.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(TraceError):
        everything(broken)


def broken_header(whole):
    broken = bytearray(whole)
    broken[1024 + 150] ^= 0x11
    return broken


ENDS_EARLY = {
    f"{n} bytes": lambda whole, n=n: whole[:n] for n in (512, 700, 1024, 1536, 2048, 2560)
}


@pytest.mark.parametrize(
    "damage", [*ENDS_EARLY.values(), broken_header], ids=[*ENDS_EARLY, "header"]
)
def test_a_plain_tar_that_is_broken_is_never_taken_for_a_shorter_one(damage, tmp_path):
    make_tar(tmp_path / "a.tar.gz", {f"{i}": b"x" * 400 for i in range(3)})
    whole = gzip.decompress((tmp_path / "a.tar.gz").read_bytes())
    assert len(whole.rstrip(b"\0")) > 2560
    (tmp_path / "a.tar").write_bytes(damage(whole))
    with pytest.raises(TraceError, match="truncated or damaged"):
        everything(tmp_path / "a.tar")


def test_a_corrupted_zip_member_is_a_trace_error(tmp_path):
    path = make_zip(tmp_path / "a.zip", {"x": bytes(range(256)) * 3})
    data = bytearray(path.read_bytes())
    data[45] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(TraceError, match="damaged"):
        everything(path)


def test_a_file_is_read_plain_or_gzipped(tmp_path):
    (tmp_path / "plain").write_bytes(b"text")
    (tmp_path / "packed").write_bytes(gzip.compress(b"text"))
    assert read_file(tmp_path / "plain") == read_file(tmp_path / "packed") == b"text"
    assert head(tmp_path / "packed", 2) == b"te"


def test_a_gzip_bomb_is_rejected(tmp_path):
    (tmp_path / "bomb").write_bytes(gzip.compress(b"0" * 1_000_000))
    with pytest.raises(TraceError, match="larger than 1000 bytes"):
        read_file(tmp_path / "bomb", 1000)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "empty"), (b" \n ", "empty"), (gzip.compress(b"x" * 100, mtime=0)[:-6], "truncated")],
)
def test_empty_and_truncated_files_say_so(content, says, tmp_path):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(TraceError, match=says):
        read_file(tmp_path / "x")


def test_missing_files_and_folders_in_place_of_files_say_so(tmp_path):
    with pytest.raises(TraceError, match="no such file"):
        read_file(tmp_path / "nothing")
    with pytest.raises(TraceError, match="is a folder"):
        read_file(tmp_path)
    with pytest.raises(TraceError, match="no such file"):
        everything(tmp_path / "nothing")


def test_a_pipe_is_rejected_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="expected a file"):
        read_file(tmp_path / "pipe")
