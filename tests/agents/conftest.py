"""Scenarios that several tests play in; this folder's helpers are importable from those below."""

import pytest
from one_thread import one_thread
from small_scenarios import busy, scenario

from fedstale.agents.policy import scorer

__all__ = ["busy", "one_thread", "scenario"]


@pytest.fixture
def greedy(monkeypatch):
    """Rounds that agents draw are those of the highest scores."""
    monkeypatch.setattr(scorer, "TEMPERATURE", 1e-9)


@pytest.fixture
def logs(tmp_path, monkeypatch):
    """Stable-Baselines3 makes a folder at each learn() of a model without a logger."""
    monkeypatch.setenv("SB3_LOGDIR", str(tmp_path / "sb3"))
