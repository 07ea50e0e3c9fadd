"""What `fedstale.agents` exports, used as in a script."""

import pytest
from shared_fleets import synthetic

from fedstale import agents


def test_every_exported_name_is_there():
    assert sorted(agents.__all__) == agents.__all__
    for name in agents.__all__:
        assert getattr(agents, name).__module__.startswith("fedstale.agents.")
    with pytest.raises(AttributeError, match="no attribute 'Elsewhere'"):
        _ = agents.Elsewhere


def test_an_agent_is_trained_and_evaluated_in_a_few_lines(tmp_path):
    settings = agents.EpisodeSettings(devices=(2, 8), rounds=3, window_s=3600.0)
    scenarios = agents.Scenarios.of(synthetic(80, days=1), forecasts="oracle", settings=settings)
    training = agents.Training(updates=1, windows=1, validation_windows=2)
    agent = agents.train(scenarios.training, scenarios.validation, training, tmp_path)
    playing = agents.contenders(scenarios.testing, [agent])
    found = agents.evaluate({name: playing[name] for name in ("agent", "random")}, windows=10)
    assert set(found.table["contender"]) == {"agent", "random"}
    assert not agents.AgentSelector(tmp_path).fault
