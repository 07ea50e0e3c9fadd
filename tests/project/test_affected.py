"""Which tests a change touches, by the table of tests/affected.py."""

import importlib.util
from pathlib import Path

import pytest
from places import ROOT


@pytest.fixture(scope="module")
def affected():
    spec = importlib.util.spec_from_file_location("affected", ROOT / "tests" / "affected.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_path_of_the_table_is_there(affected):
    for begin, tests in affected.TOUCHED.items():
        assert (ROOT / begin).exists(), begin
        assert all((ROOT / name).exists() for name in tests), begin


def test_every_folder_of_system_tests_is_that_of_some_subject(affected):
    system = {name for tests in affected.TOUCHED.values() for name in tests} - {affected.PAGES}
    named = {name.split("/")[2] for name in system}
    folders = {path.parent.name for path in (ROOT / "tests" / "system").glob("*/test_*.py")}
    assert folders <= named


def test_every_folder_of_the_product_has_a_line(affected):
    for folder in ("fedstale", "traces", "strategies", "agents"):
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if len(path.relative_to(ROOT).parts) > 2 or folder != "fedstale":
                assert any(name.startswith(begin) for begin in affected.TOUCHED), name


def test_the_line_that_says_most_of_a_path_counts(affected):
    assert "tests/system/deployment" not in affected.touched(["strategies/weighting/gap.py"])
    assert "tests/system/deployment" in affected.touched(["strategies/server/loop.py"])
    assert "tests/system/deployment" in affected.touched(["fedstale/deployment/tokens.py"])


def test_everyday_tests_and_the_change_log_touch_nothing_else(affected):
    assert affected.touched(["tests/traces/test_trip.py", "CHANGELOG.md"]) == []


@pytest.mark.parametrize("path", ["pyproject.toml", "fedstale/config.py", "tests/fixtures/tiny.py"])
def test_what_no_line_names_touches_everything(affected, path):
    assert affected.touched([path, "strategies/weighting/gap.py"]) == sorted(affected.ALL)


def test_a_system_test_touches_itself_and_what_its_folder_shares_the_folder(affected):
    kills = "tests/system/deployment/test_kills.py"
    assert affected.touched([kills]) == [kills]
    assert affected.touched([kills, "tests/system/deployment/conftest.py"]) == [
        str(Path(kills).parent)
    ]
    assert affected.touched(["tests/system/conftest.py"]) == ["tests/system"]


def git_that_knows(answers):
    return lambda *words: answers.get(words[0])


def test_a_change_begins_six_hours_before_its_last_commit(affected, monkeypatch):
    asked = []

    def git(*words):
        asked.append(words)
        return {"show": "50000", "rev-list": "c"}[words[0]]

    monkeypatch.setattr(affected, "git", git)
    assert affected.first_of_change() == "c"
    assert f"--before={50000 - 6 * 3600}" in asked[-1]


@pytest.mark.parametrize("known", [{}, {"show": "50000", "rev-list": ""}])
def test_where_nothing_tells_the_beginning_it_is_not_guessed(affected, monkeypatch, known):
    monkeypatch.setattr(affected, "git", git_that_knows(known))
    assert affected.first_of_change() is None


def test_without_a_beginning_all_are_told(affected, monkeypatch, capsys):
    monkeypatch.setattr(affected, "git", git_that_knows({}))
    monkeypatch.setattr("sys.argv", ["affected.py"])
    affected.main()
    assert capsys.readouterr().out.split() == list(affected.ALL)
