"""Apps loaded from their folders, and messages for them, without any Grid."""

import pytest
from loaded_apps import (
    ask,
    data_of,
    load,
    one_thread,
    opened,
    run_identity,
    small_clothes,
    small_play,
)
from made_once import make_devices_once

__all__ = [
    "ask",
    "data_of",
    "load",
    "one_thread",
    "opened",
    "run_identity",
    "small_clothes",
    "small_play",
]


@pytest.fixture(scope="module", autouse=True)
def _devices_made_once():
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_devices_once(monkeypatch)
        yield
