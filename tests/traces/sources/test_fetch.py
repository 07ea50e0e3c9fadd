import hashlib
import json
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from types import MappingProxyType

import pytest
from loopback import Loopback

from fedstale.errors import TraceError
from fedstale.traces import TraceSet
from fedstale.traces.sources import SOURCES, RemoteFile, catalogue, fetch

CONTENT = json.dumps({"a": [[1, 2]], "b": [[3, 4]] * 20_000}).encode()
SHA = hashlib.sha256(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.asked.append(self.path)
        part = self.path.strip("/")
        if part == "missing":
            self.send_error(404)
            return
        if part == "moved":
            self.send_response(302)
            self.send_header("Location", "/ok")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = {"empty": b"", "a.up": b"1\n", "a.down": b"1\n"}.get(part, CONTENT)
        self.send_response(200)
        if part != "unstated":
            self.send_header("Content-Length", str(len(body) + 10 * (part == "cut")))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if part == "cut" else body)
        self.close_connection = True

    def log_message(self, *args):
        pass


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def server():
    """Return a server that this process alone can reach."""
    with Loopback().installed() as here, closing(here.Server(("127.0.0.1", 0), Handler)) as server:
        server.asked = []
        yield server


@pytest.fixture
def at(server):
    return lambda part: f"http://127.0.0.1:{server.server_port}/{part}"


@pytest.fixture
def with_files(monkeypatch):
    """Let a source have other files than its published ones."""

    def change(name, *files):
        sources = dict(SOURCES) | {name: replace(SOURCES[name], files=files)}
        monkeypatch.setattr(catalogue, "SOURCES", MappingProxyType(sources))

    return change


def test_a_file_arrives_whole_and_can_be_read(tmp_path, at):
    path = fetch("flash", tmp_path / "new" / "folder", url=at("ok"))
    assert path == tmp_path / "new" / "folder" / "ready_strict.json"
    assert path.read_bytes() == CONTENT
    assert TraceSet.read(path).n_devices == 2


def test_a_checksum_that_was_not_known_is_recorded(tmp_path, at):
    path = fetch("flash", tmp_path, url=at("ok"))
    assert path.with_name(f"{path.name}.sha256").read_text() == f"{SHA}  ready_strict.json\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "ready_strict.json",
        "ready_strict.json.sha256",
    ]


def test_a_checksum_that_is_known_is_checked_and_not_recorded(tmp_path, at, with_files):
    with_files("flash", RemoteFile(filename="x.json", url=at("ok"), sha256=SHA))
    assert fetch("flash", tmp_path).read_bytes() == CONTENT
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_wrong_checksum_keeps_nothing_and_leaves_the_old_file(tmp_path, at):
    (tmp_path / "5G-production-dataset.zip").write_bytes(b"old")
    with pytest.raises(TraceError, match=r"sha256 is .* expected abc729"):
        fetch("gnettrack", tmp_path, url=at("ok"))
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [
        ("5G-production-dataset.zip", b"old")
    ]


def test_a_file_that_is_there_and_right_is_not_fetched_again(tmp_path, at, server, with_files):
    with_files("flash", RemoteFile(filename="x.json", url=at("ok"), sha256=SHA))
    fetch("flash", tmp_path)
    fetch("flash", tmp_path)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("missing", "the server answers 404"),
        ("cut", "ended after|broken off"),
        ("empty", "ended after 0"),
    ],
)
def test_a_download_that_fails_leaves_nothing_behind(tmp_path, at, part, says):
    with pytest.raises(TraceError, match=says):
        fetch("flash", tmp_path, url=at(part))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", ["ok", "unstated"])
def test_a_file_that_is_too_large_is_rejected_whether_or_not_it_says_so(
    tmp_path, at, part, monkeypatch
):
    monkeypatch.setattr(catalogue, "MAX_BYTES", 1000)
    with pytest.raises(TraceError, match="larger than 1000 bytes"):
        fetch("flash", tmp_path, url=at(part))
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_up_to_the_size(tmp_path, at):
    seen = []
    fetch("flash", tmp_path, url=at("ok"), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_an_interrupt_leaves_nothing_behind(tmp_path, at):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("flash", tmp_path, url=at("ok"), progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_moves_the_file_is_followed(tmp_path, at, server):
    assert fetch("flash", tmp_path, url=at("moved")).read_bytes() == CONTENT
    assert server.asked == ["/moved", "/ok"]


def test_a_source_of_several_files_becomes_a_folder(tmp_path, at, with_files):
    files = (RemoteFile(filename="a.up", url=""), RemoteFile(filename="a.down", url=""))
    with_files("mahimahi", *files)
    path = fetch("mahimahi", tmp_path, url=at(""))
    assert path == tmp_path / "mahimahi"
    assert TraceSet.read(path).known == ("downlink", "uplink")


def test_a_server_that_is_not_there_is_one_sentence(tmp_path, server, at):
    url = at("ok")
    server.close()
    with pytest.raises(TraceError, match="cannot be reached"):
        fetch("flash", tmp_path, url=url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x/y", "x", ""])
def test_only_the_web_is_asked(tmp_path, url):
    with pytest.raises(TraceError, match="expected http"):
        fetch("flash", tmp_path, url=url)


@pytest.mark.parametrize("url", ["http://", "http://a b/", "http://[::1", "http://x:port/"])
def test_an_address_that_is_none_is_one_sentence(tmp_path, url):
    with pytest.raises(TraceError):
        fetch("flash", tmp_path, url=url)


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(TraceError, match="expected one of flash, flash_days"):
        fetch("nonsense", tmp_path)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(TraceError, match="file: File exists"):
        fetch("flash", tmp_path / "file", url="http://127.0.0.1:9/")
