import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from compared_runs import BASE, write_finished
from hypothesis import given
from hypothesis import strategies as st
from small_app import write_small_app
from two_variants import digests, loads_noted, runs_of, two_variants

from fedstale.comparison.plan import PlannedRun, folder_name, run_all, state_of
from fedstale.errors import ConfigError


@given(st.text(min_size=1, max_size=100))
def test_a_folder_name_is_safe_whatever_the_variant_is_called(name):
    if not name.isprintable():
        return
    safe = folder_name(name)
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", safe)
    assert len(safe) <= 64


def test_variants_that_look_alike_have_folders_of_their_own():
    names = ["a/b", "a b", "a-b", "a:b", "..", ".", "/", "\\", "a" * 200, "a" * 201]
    assert len({folder_name(name) for name in names}) == len(names)


@pytest.fixture
def planned(tmp_path):
    """Return a run by hand, in a folder that holds nothing yet."""
    return PlannedRun(variant="A", config=BASE, folder=tmp_path / "run")


def test_how_far_a_run_is_can_be_seen_in_its_folder(planned):
    assert state_of(planned) == "new"
    write_finished(planned.folder, status="stopped")
    assert state_of(planned) == "done"
    summary = planned.folder / "summary.json"
    for status, state in (("failed", "failed"), ("interrupted", "half"), ("stuck", "done")):
        summary.write_text(f'{{"status": "{status}"}}')
        assert state_of(planned) == state
    summary.unlink()
    assert state_of(planned) == "half"
    (planned.folder / "config.toml").unlink()
    with pytest.raises(ConfigError, match="holds something that is no run"):
        state_of(planned)


def test_what_a_killed_process_left_of_its_first_file_is_in_nobodys_way(planned):
    planned.folder.mkdir()
    (planned.folder / ".lock").touch()
    (planned.folder / ".config.toml.part").write_text("ap")
    assert state_of(planned) == "new"


def test_a_summary_that_cannot_be_read_is_one_sentence(planned):
    write_finished(planned.folder)
    (planned.folder / "summary.json").write_text("[]")
    with pytest.raises(ConfigError, match="cannot be read"):
        state_of(planned)


def test_a_folder_with_another_run_is_an_error_that_names_what_differs(planned):
    write_finished(planned.folder, run_config={"strategy": "fedavg"}, devices=3)
    with pytest.raises(ConfigError) as caught:
        state_of(planned)
    assert "devices = 3 instead of None" in str(caught.value)
    assert "run-config.strategy = 'fedavg' instead of None" in str(caught.value)


def test_where_clients_run_is_no_difference(planned):
    other = replace(BASE, workers=3, executor="processes", checkpoint_every=0)
    assert BASE.differing(other) == ""
    assert "batched" in BASE.differing(replace(BASE, executor="batched"))


@pytest.fixture
def plan(tmp_path):
    """Return a plan of two variants of the small app on some devices."""
    return two_variants(write_small_app(tmp_path / "app"))


def test_what_is_done_is_kept_and_what_is_half_done_or_failed_goes_on(plan, tmp_path, pool_here):
    runs, seen = runs_of(plan, tmp_path / "runs"), []
    how = {"workers": 2, "log": tmp_path / "log.txt", "watch": lambda s: seen.append(dict(s))}
    assert run_all(runs, **how) == {}
    assert set(seen[0].values()) == {0.0}
    assert set(seen[-1].values()) == {1.0}
    one, two = (run.folder for run in runs)
    assert "[ROUND 1/" in (one / "log.txt").read_text(), "each run has its log, with Flower's"
    written, expected = (one / "summary.json").stat().st_mtime_ns, digests(two)
    for name in ("summary.json", "events.parquet", "metrics.parquet"):
        (two / name).unlink()
    assert [state_of(run) for run in runs] == ["done", "half"]
    assert run_all(runs, **how) == {}
    assert (one / "summary.json").stat().st_mtime_ns == written
    assert digests(two) == expected
    summary = json.loads((two / "summary.json").read_text())
    (two / "summary.json").write_text(json.dumps({**summary, "status": "failed"}))
    assert run_all(runs, **how) == {}
    assert [state_of(run) for run in runs] == ["done", "done"]


def test_where_all_is_done_no_process_is_started(plan, tmp_path, pool_here, monkeypatch):
    runs = runs_of(plan, tmp_path / "runs")
    how = {"workers": 1, "watch": lambda shares: None}
    assert run_all(runs, **how, log=tmp_path / "log") == {}
    monkeypatch.undo()
    assert run_all(runs, **how, log=Path("/nowhere/log")) == {}


def test_traces_of_several_runs_are_read_once_and_make_no_difference(
    plan, tmp_path, monkeypatch, pool_here
):
    loaded = loads_noted(monkeypatch)
    together, alone = runs_of(plan, tmp_path / "together"), runs_of(plan, tmp_path / "alone")
    log = tmp_path / "log"
    assert run_all(together, workers=2, log=log, watch=lambda s: None) == {}
    assert loaded == [("synthetic:8", 1)]
    assert not list(tmp_path.glob(".traces-*"))
    assert run_all(alone[1:], workers=1, log=log, watch=lambda s: None) == {}
    # Here a run alone has read them; there its process would.
    assert loaded == [("synthetic:8", 1)] * 2
    assert digests(alone[1].folder) == digests(together[1].folder)


def test_a_run_that_cannot_begin_is_one_sentence_that_names_it(plan, tmp_path, pool_here):
    plan["variants"] = {"one": {"traces": "no-such-file.parquet"}}
    runs = runs_of(plan, tmp_path / "runs")
    with pytest.raises(ConfigError, match="variant 'one', seed 1: traces = 'no-such-file"):
        run_all(runs, workers=1, log=tmp_path / "log", watch=lambda s: None)
