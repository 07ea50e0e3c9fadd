"""Simulations that are killed at random moments, and go on from any version in any process."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from interruptions import files, power_cut
from shared_fleets import synthetic
from small_app import CLIENT, write_small_app

from fedstale.simulation.run import simulate

SAME = ("events.parquet", "metrics.parquet", "model.safetensors")


@pytest.fixture
def traces():
    return synthetic(30)


@pytest.mark.parametrize("strategy", ["gap-aware", "fedbuff", "fedavg"])
@pytest.mark.usefixtures("every_version_kept", "no_pages")
def test_a_run_that_was_cut_off_at_any_version_ends_byte_for_byte(
    tmp_path, buffered, traces, strategy
):
    config = replace(buffered, run_config={"strategy": strategy, "rounds": 12})
    simulate(config, tmp_path / "whole", traces=traces)
    for cut in range(1, 12):
        folder = tmp_path / f"{cut}"
        with power_cut(lambda version, now: version == cut):  # noqa: B023 - called in the block
            simulate(config, folder, traces=traces)
        simulate(config, folder, traces=traces, resume=True)
        assert files(folder) == files(tmp_path / "whole")


@pytest.mark.usefixtures("every_version_kept")
def test_another_process_may_go_on_while_the_first_still_lives(tmp_path, buffered, traces):
    asked = replace(buffered, until="40m")
    simulate(asked, tmp_path / "run", traces=traces, pause_at=600.0)
    simulate(asked, tmp_path / "whole", traces=traces)
    script = (
        "import sys; from pathlib import Path\n"
        "from fedstale.config import SimulationConfig\n"
        "from fedstale.simulation.run import simulate\n"
        "from fedstale.traces import TraceSet\n"
        "folder = Path(sys.argv[1])\n"
        "traces = TraceSet.synthetic(30, days=7, seed=0)\n"
        "config = SimulationConfig.read(folder / 'config.toml')\n"
        "print(simulate(config, folder, traces=traces, resume=True).status)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.stdout.split()[-1:] == ["stopped"], found.stdout + found.stderr
    assert files(tmp_path / "run") == files(tmp_path / "whole")


def fedstale(*words):
    return [sys.executable, "-m", "fedstale", "simulate", *words]


SCRIPT = """
import sys
import fedstale

if __name__ == "__main__":
    fedstale.simulate(sys.argv[1], traces="ideal:4", executor="processes", workers=2, out="run")
    print("the script goes on")
"""


@pytest.mark.parametrize("is_script", [False, True], ids=["command", "script"])
@pytest.mark.parametrize("reaches_group", [False, True], ids=["process", "group"])
def test_sigterm_leaves_a_run_that_goes_on_and_no_process(tmp_path, is_script, reaches_group):
    """As docker stop and systemd send it, to a run whose clients take longer than they wait."""
    notes = tmp_path / "pids"
    begin = f"""    with open({str(notes)!r}, "a") as file:
        print(__import__("os").getpid(), file=file)
    __import__("time").sleep(100)
"""
    client = CLIENT.replace("    (w,) = message", f"{begin}    (w,) = message", 1)
    app = write_small_app(tmp_path / "app", client=client)
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["--traces", "ideal:4", "--executor", "processes", "--workers", "2", "--out", "run"]
    command = [sys.executable, "script.py", str(app)] if is_script else fedstale(str(app), *words)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **pipes)
    try:
        while process.poll() is None and not (notes.exists() and notes.read_text().endswith("\n")):
            time.sleep(0.05)
        (os.killpg if reaches_group else os.kill)(process.pid, signal.SIGTERM)
        said, _ = process.communicate(timeout=20)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 143, said
    assert "goes on" not in said or not is_script
    assert not [pid for pid in notes.read_text().split() if Path(f"/proc/{pid}").exists()]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("interrupted", "SIGTERM")
    assert "client-error" not in summary["jobs"]


@pytest.mark.slow
def test_kill_9_at_a_hundred_random_moments_loses_nothing(tmp_path):
    rng, kills = np.random.default_rng(0), 0
    words = [
        *("digits", "--traces", "synthetic:30", "-c"),
        'strategy="GapAware(8, 3)" num-server-rounds=120',
    ]
    subprocess.run(fedstale(*words, "--out", str(tmp_path / "whole")), check=True)
    for turn in range(1000):
        run = tmp_path / f"run-{turn}"
        command = fedstale(*words, "--out", str(run))
        while not (run / "summary.json").exists():
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            # The first second is imports; what matters is the rest.
            begun = time.monotonic()
            while not (run / "config.toml").exists() and process.poll() is None:
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 2.0))
            if process.poll() is None and time.monotonic() - begun < 60:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
            process.wait()
            command = fedstale("--resume", str(run))
            if kills >= 100:
                subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
        for name in SAME:
            expected = (tmp_path / "whole" / name).read_bytes()
            assert (run / name).read_bytes() == expected, (turn, name)
        if kills >= 100:
            return
    raise AssertionError(f"only {kills} kills")
