"""Scenarios that several tests play in; this folder's helpers are importable from those below."""

import numpy as np
import pytest
from one_thread import one_thread
from shared_fleets import synthetic
from small_episodes import fleet, one_kind

from fedstale.agents.env.episodes import EpisodeSettings
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.policy import scorer

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def scenario():
    settings = EpisodeSettings(devices=(8, 20), rounds=4)
    return Scenario.of(synthetic(40, days=1), forecasts="oracle", settings=settings)


@pytest.fixture(scope="session")
def busy():
    """Windows with a dozen candidates for several slots, of which some are over before the rest."""
    n = 20
    traces = fleet([[(0.0, 9000.0)]] * n, compute=np.linspace(0.5, 2.0, n))
    settings = EpisodeSettings(
        devices=(12, 16), rounds=6, window_s=450.0, concurrency_share=(0.3, 0.6)
    )
    return Scenario.of(traces, forecasts="oracle", settings=settings, kinds=one_kind())


@pytest.fixture
def greedy(monkeypatch):
    """Rounds that agents draw are those of the highest scores."""
    monkeypatch.setattr(scorer, "TEMPERATURE", 1e-9)


@pytest.fixture
def logs(tmp_path, monkeypatch):
    """Stable-Baselines3 makes a folder at each learn() of a model without a logger."""
    monkeypatch.setenv("SB3_LOGDIR", str(tmp_path / "sb3"))
