"""Plans whose runs have processes of their own: what they share, and what of one that dies."""

import os
import signal
import subprocess
import sys
import time

import pytest
from two_variants import runs_of, two_variants

from fedstale.comparison.plan import run_all, state_of

# Thirteen rounds bring bad luck; more than one thread would bring other sums.
SERVER_ENDS = """    config = context.run_config
    if config["rounds"] == 13: os._exit(3)
    assert os.environ["OMP_NUM_THREADS"] == "1"
"""


@pytest.fixture
def plan(tmp_path):
    """Return a plan of two variants of the small app on some devices."""
    from small_app import SERVER, write_small_app

    server = SERVER.replace("    config = context.run_config\n", SERVER_ENDS)
    return two_variants(write_small_app(tmp_path / "app", server="import os\n" + server))


@pytest.mark.slow
def test_a_process_that_dies_is_told_and_the_others_are_done(plan, tmp_path):
    plan["variants"] = {"dies": {"run-config": {"rounds": 13}}, "one": {}}
    runs = runs_of(plan, tmp_path / "runs")
    failed = run_all(runs, workers=1, log=tmp_path / "log", watch=lambda s: None)
    assert list(failed) == [runs[0].folder]
    assert "ended with code 3" in failed[runs[0].folder]
    assert [state_of(run) for run in runs] == ["half", "done"]


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
    runs = runs_of(plan, out / "runs")
    try:
        begun = runs[1].folder / "config.toml"
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
    assert [state_of(run) for run in runs] == ["done", "half"]
