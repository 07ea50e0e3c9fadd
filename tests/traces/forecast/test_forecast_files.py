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


def test_writing_leaves_nothing_half_written(folder):
    assert {p.name for p in folder.iterdir()} == {"forecaster.toml", "forecaster.safetensors"}


def test_a_folder_without_a_forecaster_is_one_sentence(tmp_path):
    with pytest.raises(TraceError, match="forecaster train"):
        Forecaster.load(tmp_path)


def test_another_version_is_rejected(folder):
    edit(folder, schema=99)
    with pytest.raises(TraceError, match="schema = 99, expected 2"):
        Forecaster.load(folder)


def test_an_unknown_kind_is_rejected(folder):
    edit(folder, kind="prophet")
    with pytest.raises(TraceError, match="kind = 'prophet'"):
        Forecaster.load(folder)


def test_altered_arrays_are_rejected(folder):
    path = folder / "forecaster.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(TraceError, match="altered or cut short"):
        Forecaster.load(folder)


def test_truncated_arrays_are_rejected(folder):
    path = folder / "forecaster.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(TraceError, match="altered or cut short"):
        Forecaster.load(folder)


def test_missing_arrays_are_rejected(folder):
    (folder / "forecaster.safetensors").unlink()
    with pytest.raises(TraceError, match="cannot be read"):
        Forecaster.load(folder)


def test_a_description_that_is_no_toml_is_rejected(folder):
    (folder / "forecaster.toml").write_bytes(b"\xff\x00not toml")
    with pytest.raises(TraceError, match="cannot be read"):
        Forecaster.load(folder)


def test_arrays_of_another_kind_are_rejected(folder):
    edit(folder, kind="ewma")
    with pytest.raises(TraceError, match="lacks"):
        Forecaster.load(folder)


def test_arrays_that_are_not_finite_are_rejected(training, held_out, tmp_path):
    forecaster = LastValue().fit(training, held_out, seed=0)
    forecaster.spread = np.full_like(forecaster.spread, np.nan)
    forecaster.save(tmp_path)
    with pytest.raises(TraceError, match="not finite"):
        Forecaster.load(tmp_path)


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
    assert sum(a.nbytes for a in forecaster.state_dict().values()) < 400_000
    survival = forecaster.forecast(observer.at(np.arange(60), 1e5)).survival
    assert np.all((survival >= 0) & (survival <= 1))
