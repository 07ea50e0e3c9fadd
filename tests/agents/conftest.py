"""Scenarios that several tests play in; this folder's helpers are importable from those below."""

import pytest

from fedstale.agents.env.episodes import EpisodeSettings
from fedstale.agents.env.scenario import Scenario
from fedstale.traces import TraceSet


@pytest.fixture(scope="session")
def scenario():
    settings = EpisodeSettings(devices=(8, 20), rounds=4)
    return Scenario.of(
        TraceSet.synthetic(40, days=1, seed=0), forecasts="oracle", settings=settings
    )
