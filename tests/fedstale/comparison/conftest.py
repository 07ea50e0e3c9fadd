"""Plans and runs that are compared."""

import pytest
from made_once import make_devices_once
from pool_here import pool_here

__all__ = ["pool_here"]


@pytest.fixture(scope="module", autouse=True)
def _devices_made_once():
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_devices_once(monkeypatch)
        yield
