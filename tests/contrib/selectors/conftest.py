"""What tests of networks need: the same bits on any machine, and no log beside the tests."""

import pytest
from one_thread import one_thread
from small_scenarios import scenario

__all__ = ["one_thread", "scenario"]


@pytest.fixture
def logs(tmp_path, monkeypatch):
    """Stable-Baselines3 makes a folder at each learn() of a model without a logger."""
    monkeypatch.setenv("SB3_LOGDIR", str(tmp_path / "sb3"))
