"""Scenarios that several tests play in; this folder's helpers are importable from those below."""

import pytest
import torch

from fedstale.agents.env.episodes import EpisodeSettings
from fedstale.agents.env.scenario import Scenario
from fedstale.traces import TraceSet


@pytest.fixture(scope="session")
def scenario():
    settings = EpisodeSettings(devices=(8, 20), rounds=4)
    return Scenario.of(
        TraceSet.synthetic(40, days=1, seed=0), forecasts="oracle", settings=settings
    )


@pytest.fixture(autouse=True)
def _one_thread():
    """Models this small lose time to threads, most of all while other tests run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
