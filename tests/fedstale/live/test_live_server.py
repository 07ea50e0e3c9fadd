"""What a page of a run answers; `test_live_in_a_browser.py` opens it."""

import http.client
import json
import threading
from contextlib import closing

import pytest
from loopback import Loopback
from told_run import ToldRun

from fedstale.errors import ConfigError
from fedstale.live import Board, serving


def get(port, path, host="127.0.0.1", method="GET"):
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request(method, path, headers={"Host": f"{host}:{port}"})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def port_of(url):
    return int(url.split(":")[2].split("/")[0])


@pytest.fixture(autouse=True)
def _unheard():
    """Serve within this process."""
    with Loopback().installed():
        yield


@pytest.fixture
def board():
    board = Board("digits")
    ToldRun(board).moved(10.0, online=4, in_flight=1)
    return board


def test_the_page_and_its_parts_are_served(board):
    with serving(board, port=0) as url:
        assert url.startswith("http://127.0.0.1:")
        for path, start in (
            ("/", b"<!doctype html>"),
            ("/page.css", b":root"),
            ("/page.js", b'"use strict"'),
            ("/live.js", b'"use strict"'),
        ):
            status, headers, body = get(port_of(url), path)
            assert (status, body[: len(start)]) == (200, start)
            assert "default-src 'none'" in headers["Content-Security-Policy"]
        data = json.loads(get(port_of(url), "/data.json")[2])
        assert ["online", "4"] in data["cards"]


def test_the_page_names_no_address_but_its_own(board):
    with serving(board, port=0) as url:
        page = get(port_of(url), "/")[2].decode()
    assert "://" not in page


@pytest.mark.parametrize("path", ["/nothing", "/../pyproject.toml", "//etc/passwd", "/page.html"])
def test_nothing_else_is_served(board, path):
    with serving(board, port=0) as url:
        assert get(port_of(url), path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(board, method):
    with serving(board, port=0) as url:
        assert get(port_of(url), "/data.json", method=method)[0] == 405


def test_a_page_of_another_site_that_points_here_gets_nothing(board):
    with serving(board, port=0) as url:
        assert get(port_of(url), "/data.json", host="evil.example")[0] == 400
        assert get(port_of(url), "/", host="evil.example")[0] == 400
        assert get(port_of(url), "/data.json", host="localhost")[0] == 200


@pytest.mark.parametrize(
    "host", ["[", "[::1", "a]b", "[x]", "[" * 9000, "\xbd", ""], ids=lambda value: value[:8]
)
def test_a_host_that_is_none_is_refused_and_nothing_is_logged(board, host, caplog):
    with serving(board, port=0) as url:
        for path in ("/", "/data.json", "/nothing"):
            assert get(port_of(url), path, host=host)[0] == 400
    assert not caplog.records


def test_the_server_and_its_thread_are_gone_afterwards(board):
    with serving(board, port=0) as url:
        pass
    with pytest.raises(OSError, match="refused"):
        get(port_of(url), "/")
    assert "fedstale-live" not in [thread.name for thread in threading.enumerate()]


def test_a_port_that_another_program_has_is_refused_and_free_again_at_its_end():
    with serving(Board("one")) as first:
        port = int(first.rstrip("/").rsplit(":", 1)[1])
        with serving(Board("two")) as second:
            assert second != first
        with (
            pytest.raises(ConfigError, match=f"live = {port} cannot be listened at"),
            serving(Board("x"), port=port),
        ):
            pass
    with serving(Board("four"), port=port) as again:
        assert again == first
