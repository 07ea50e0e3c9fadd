import json

import pytest
from typer.testing import CliRunner

from fedstale.cli.main import app


@pytest.fixture
def runs(tmp_path):
    """Return the folders of a run with a device that lies, and of one without."""
    from stated_run import told, write_stated

    liar = write_stated(tmp_path / "liar", told(0, [0] * 9, 1.0) + told(1, [1, 0], 0.5))
    return liar, write_stated(tmp_path / "honest", told(1, [1, 0], 0.5))


def called(*words):
    return CliRunner().invoke(app, ["audit", *map(str, words)])


def test_the_table_and_the_verdict_are_printed(runs):
    result = called(runs[0])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].split()[:4] == ["tested", "stated", "kept", "brier"]
    assert lines[1].split()[:4] == ["phone-0", "9", "1.000", "0.000"]
    assert "over" in lines[1]
    assert lines[2].split()[:3] == ["phone-1", "2", "0.500"]
    assert "What 1 of 2 devices state does not hold" in result.output


def test_an_alarm_fails_the_command_where_it_is_asked_to(runs):
    assert called(runs[0], "--fail-on-alarm").exit_code == 1
    assert called(runs[1], "--fail-on-alarm").exit_code == 0


def test_json_has_all_devices_and_no_nan(runs):
    result = called(runs[0], "--json", "--fail-on-alarm")
    assert result.exit_code == 1
    found = json.loads(result.stdout, parse_constant=pytest.fail)
    assert found["alarms"] == 1
    first = found["devices"][0]
    assert (first["device_id"], first["node_id"], first["direction"]) == ("phone-0", 1000, "over")
    assert first["crps_s"] is None
    assert first["alarm"] is True


def test_what_cannot_be_audited_is_one_sentence_and_exit_code_2(runs, tmp_path):
    for words in ((tmp_path,), (runs[0], runs[0]), (tmp_path / "none",)):
        result = called(*words)
        assert result.exit_code == 2
        assert result.stderr.startswith("fedstale: run")
        assert result.stderr.count("\n") == 1
