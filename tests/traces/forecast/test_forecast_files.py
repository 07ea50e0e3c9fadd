import tomllib

import numpy as np
import pytest
import tomli_w

from fedstale.errors import ConfigError, TraceError
from fedstale.traces.forecast import LSTM, Forecaster, LastValue, embedded
from fedstale.traces.forecast.base import FILES, FLEETS


@pytest.fixture
def folder(training, held_out, tmp_path):
    LastValue().fit(training, held_out, seed=0).save(tmp_path, {"traces": "synthetic", "seed": 0})
    return tmp_path


def edit(folder, **changes):
    path = folder / "forecaster.toml"
    path.write_text(tomli_w.dumps(tomllib.loads(path.read_text()) | changes))


def test_the_description_names_schema_kind_checksum_and_provenance(folder):
    about = FILES.describe(folder)
    assert about["schema"] == 2
    assert about["kind"] == "last-value"
    assert len(about["sha256"]) == 64
    assert about["provenance"] == {"traces": "synthetic", "seed": 0}


def test_an_unknown_kind_is_rejected(folder):
    edit(folder, kind="prophet")
    with pytest.raises(TraceError, match="kind = 'prophet'"):
        Forecaster.load(folder)


def test_arrays_of_another_kind_are_rejected(folder):
    edit(folder, kind="lstm")
    with pytest.raises(TraceError, match="lacks"):
        Forecaster.load(folder)


def test_an_unknown_fleet_is_one_sentence():
    with pytest.raises(ConfigError, match="fleet = 'satellites': expected one of any, phones"):
        embedded("satellites")


def test_each_fleet_has_a_network_of_sessions_and_all_share_those_of_channels():
    states = {fleet: embedded(fleet).state_dict() for fleet in FLEETS}
    phones = states.pop("phones")
    for state in states.values():
        assert not np.array_equal(state["sessions.output"], phones["sessions.output"])
        np.testing.assert_array_equal(state["compute.gates"], phones["compute.gates"])


@pytest.mark.parametrize("name", FLEETS)
def test_a_forecaster_that_comes_along_is_an_lstm_below_400_kb(observer, name):
    forecaster = embedded(name)
    assert isinstance(forecaster, LSTM)
    assert 100_000 < sum(a.nbytes for a in forecaster.state_dict().values()) < 400_000
    survival = forecaster.forecast(observer.at(np.arange(60), 1e5)).survival
    assert np.all((survival >= 0) & (survival <= 1))
