"""A page of a run at a port of this machine."""

import http.client
import threading

import pytest

from fedstale.errors import ConfigError
from fedstale.live import Board, serving


def status_of(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/data.json", headers={"Host": f"127.0.0.1:{port}"})
    return connection.getresponse().status


def test_a_port_is_taken_while_the_page_is_served_and_free_afterwards():
    with serving(Board("one"), port=0) as first:
        port = int(first.rstrip("/").rsplit(":", 1)[1])
        assert status_of(port) == 200
        with serving(Board("two"), port=port, or_any=True) as second:
            assert second != first
        with (
            pytest.raises(ConfigError, match="cannot be listened at"),
            serving(Board("x"), port=port),
        ):
            pass
    with pytest.raises(OSError, match="refused"):
        status_of(port)
    assert "fedstale-live" not in [thread.name for thread in threading.enumerate()]
    with serving(Board("four"), port=port, or_any=True) as again:
        assert again == first
