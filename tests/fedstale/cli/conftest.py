"""What the tests of commands share: devices for their runs, and no processes."""

import pytest
from made_once import make_devices_once
from pool_here import pool_here

__all__ = ["pool_here"]


@pytest.fixture(scope="module", autouse=True)
def _devices_made_once():
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_devices_once(monkeypatch)
        yield
