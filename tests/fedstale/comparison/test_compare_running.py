import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from compared_runs import BASE, write_finished
from hypothesis import given
from hypothesis import strategies as st

from fedstale.compare import folders, running
from fedstale.compare.plan import Plan
from fedstale.errors import ConfigError

sys.path.append(str(Path(__file__).parent.parent / "simulation"))

# Thirteen rounds bring bad luck; more than one thread would bring other sums.
SERVER_ENDS = """    config = context.run_config
    if config["rounds"] == 13: os._exit(3)
    assert os.environ["OMP_NUM_THREADS"] == "1"
"""


@given(st.text(min_size=1, max_size=100))
def test_a_folder_name_is_safe_whatever_the_variant_is_called(name):
    if not name.isprintable():
        return
    safe = folders.folder_name(name)
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", safe)
    assert len(safe) <= 64


def test_variants_that_look_alike_have_folders_of_their_own():
    names = ["a/b", "a b", "a-b", "a:b", "..", ".", "/", "\\", "a" * 200, "a" * 201]
    assert len({folders.folder_name(name) for name in names}) == len(names)


@pytest.fixture
def task(tmp_path):
    """Return a run by hand, in a folder that holds nothing yet."""
    return folders.Task(variant="A", seed=0, config=BASE, folder=tmp_path / "run")


def test_how_far_a_run_is_can_be_seen_in_its_folder(task):
    assert folders.state(task) == "new"
    write_finished(task.folder, status="stopped")
    assert folders.state(task) == "done"
    summary = task.folder / "summary.json"
    for status, state in (("failed", "failed"), ("interrupted", "half"), ("stuck", "done")):
        summary.write_text(f'{{"status": "{status}"}}')
        assert folders.state(task) == state
    summary.unlink()
    assert folders.state(task) == "half"
    (task.folder / "config.toml").unlink()
    with pytest.raises(ConfigError, match="holds something that is no run"):
        folders.state(task)


def test_what_a_killed_process_left_of_its_first_file_is_in_nobodys_way(task):
    task.folder.mkdir()
    (task.folder / ".lock").touch()
    (task.folder / ".config.toml.part").write_text("ap")
    assert folders.state(task) == "new"


def test_a_summary_that_cannot_be_read_is_one_sentence(task):
    write_finished(task.folder)
    (task.folder / "summary.json").write_text("[]")
    with pytest.raises(ConfigError, match="cannot be read"):
        folders.state(task)


def test_a_folder_with_another_run_is_an_error_that_names_what_differs(task):
    write_finished(task.folder, run_config={"strategy": "fedavg"}, devices=3)
    with pytest.raises(ConfigError) as caught:
        folders.state(task)
    assert "devices = 3 instead of None" in str(caught.value)
    assert "run-config.strategy = 'fedavg' instead of None" in str(caught.value)


def test_where_clients_run_is_no_difference(task):
    other = replace(BASE, workers=3, executor="processes", checkpoint_every=0)
    assert folders.differing(BASE, other) == ""
    assert "batched" in folders.differing(BASE, replace(BASE, executor="batched"))


@pytest.fixture
def plan(tmp_path):
    """Return a plan of two variants of the small app on some devices."""
    from small_app import SERVER, write_small_app

    server = SERVER.replace("    config = context.run_config\n", SERVER_ENDS)
    app = write_small_app(tmp_path / "app", server="import os\n" + server)
    return {
        "app": str(app),
        "traces": "synthetic:8",
        "seeds": [1],
        "run-config": {"rounds": 2},
        "variants": {"one": {}, "two": {"run-config": {"rounds": 3}}},
    }


def tasks_of(table, out):
    plan = Plan.from_table(table, where="plan")
    return [
        folders.Task(
            variant=variant,
            seed=seed,
            config=plan.config(variant, seed),
            folder=out / variant / str(seed),
        )
        for seed in plan.seeds
        for variant in plan.variants
    ]


def digests(folder):
    names = ("events.parquet", "metrics.parquet")
    return [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names]


def test_what_is_done_is_kept_and_what_is_half_done_goes_on(plan, tmp_path):
    tasks, log = tasks_of(plan, tmp_path / "runs"), tmp_path / "log.txt"
    seen, environment = [], dict(os.environ)
    assert running.run(tasks, workers=1, log=log, watch=lambda s: seen.append(dict(s))) == []
    assert set(seen[0].values()) == {0.0}
    assert set(seen[-1].values()) == {1.0}
    assert dict(os.environ) == environment
    one, two = (task.folder for task in tasks)
    written, expected = (one / "summary.json").stat().st_mtime_ns, digests(two)
    for name in ("summary.json", "events.parquet", "metrics.parquet"):
        (two / name).unlink()
    assert [folders.state(task) for task in tasks] == ["done", "half"]
    assert running.run(tasks, workers=2, log=log, watch=lambda shares: None) == []
    assert (one / "summary.json").stat().st_mtime_ns == written
    assert digests(two) == expected
    # Nothing is left to do, so nothing is started.
    assert running.run(tasks, workers=1, log=Path("/nowhere/log"), watch=lambda s: None) == []


def test_traces_of_several_runs_are_read_once_and_make_no_difference(plan, tmp_path, monkeypatch):
    loaded, load = [], running.trace_spec.load

    def counted(spec, *, seed):
        loaded.append((spec, seed))
        return load(spec, seed=seed)

    monkeypatch.setattr(running.trace_spec, "load", counted)
    together, alone = tasks_of(plan, tmp_path / "together"), tasks_of(plan, tmp_path / "alone")
    log = tmp_path / "log"
    assert running.run(together, workers=2, log=log, watch=lambda s: None) == []
    assert loaded == [("synthetic:8", 1)]
    assert not list(tmp_path.glob(".traces-*"))
    assert running.run(alone[1:], workers=1, log=log, watch=lambda s: None) == []
    assert len(loaded) == 1
    assert digests(alone[1].folder) == digests(together[1].folder)


@pytest.mark.slow
def test_a_process_that_dies_is_told_and_the_others_are_done(plan, tmp_path):
    plan["variants"] = {"dies": {"run-config": {"rounds": 13}}, "one": {}}
    tasks = tasks_of(plan, tmp_path / "runs")
    (failed,) = running.run(tasks, workers=1, log=tmp_path / "log", watch=lambda s: None)
    assert failed.task.variant == "dies"
    assert "ended with code 3" in failed.reason
    assert [folders.state(task) for task in tasks] == ["half", "done"]


def test_a_run_that_cannot_begin_is_one_sentence_that_names_it(plan, tmp_path):
    plan["variants"] = {"one": {"traces": "no-such-file.parquet"}}
    tasks = tasks_of(plan, tmp_path / "runs")
    with pytest.raises(ConfigError, match="variant 'one', seed 1: traces = 'no-such-file"):
        running.run(tasks, workers=1, log=tmp_path / "log", watch=lambda s: None)


COMMAND = """
import typer
from fedstale.cli.compare import compare
app = typer.Typer()
app.command()(compare)
app()
"""


@pytest.mark.slow
def test_ctrl_c_leaves_what_is_done(plan, tmp_path):
    import tomli_w

    plan["variants"] = {"one": {}, "endless": {"run-config": {"rounds": 10**6}}}
    path, out = tmp_path / "plan.toml", tmp_path / "out"
    path.write_text(tomli_w.dumps(plan))
    command = [sys.executable, "-c", COMMAND, str(path), "--out", str(out), "--workers", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    tasks = tasks_of(plan, out / "runs")
    try:
        begun = tasks[1].folder / "config.toml"
        end = time.monotonic() + 120
        while not begun.is_file() and time.monotonic() < end:
            time.sleep(0.1)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted with 1 of 2 runs done; the same command goes on" in said
    assert [folders.state(task) for task in tasks] == ["done", "half"]
