"""Devices of the spaces that are searched."""

import pytest
from made_once import make_devices_once


@pytest.fixture(scope="module", autouse=True)
def _devices_made_once():
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_devices_once(monkeypatch)
        yield
