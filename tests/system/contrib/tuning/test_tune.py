"""Searches by Ray: what they find, what they write, and that they go on."""

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import tomli_w
from short_searches import ASKED, LEFT_OVERS, collected, decisions
from spaces import table

import fedstale
from fedstale.config import SimulationConfig
from fedstale.contrib.tuning import tune
from fedstale.contrib.tuning.search import Proposals, Report, SearchJob
from fedstale.contrib.tuning.space import Space
from fedstale.errors import ConfigError
from fedstale.simulation.run import simulate
from fedstale.traces import TraceSet

SAME = ("events.parquet", "metrics.parquet", "model.safetensors")

__all__ = ["collected"]

pytestmark = LEFT_OVERS


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """Return a search with one worker and its folder."""
    folder = tmp_path_factory.mktemp("tuned") / "out"
    return tune(table(**ASKED), out=folder, workers=1, seed=5), folder


@pytest.mark.slow
def test_a_search_is_a_plain_loop_of_simulations_byte_for_byte(tmp_path, capsys):
    search = {"strategy": ["FedBuff(6, 2)", "GapAware(6, 2)"]}
    own = {"num-server-rounds": 1000}
    given = table(search=search, run_config=own, trials=2, until="8m", rungs=["3m"])
    how = {"search": "random", "stop": "none", "workers": 2, "progress": True}
    found = tune(given, out=tmp_path / "tuned", **how)
    shown = capsys.readouterr().err
    assert "configuration 1: complete" in shown
    assert "runs are over" in shown
    assert list(found.trials["status"]) == ["complete"] * 2
    for number, parameters in enumerate(trial.parameters for trial in found.tried):
        for seed in (1, 2):
            config = SimulationConfig(
                app="digits",
                traces="synthetic:20",
                until="8m",
                seed=seed,
                executor="inline",
                run_config={**own, **parameters, "seed": seed},
            )
            plain = tmp_path / f"plain-{number}-{seed}"
            simulate(config, plain, traces=TraceSet.load(config.traces, seed=seed))
            tuned = tmp_path / "tuned" / "trials" / f"{number:03}" / f"seed-{seed}"
            for name in SAME:
                assert (tuned / name).read_bytes() == (plain / name).read_bytes()


def seen(run):
    """Return the mean accuracy that looks at a run would have found in its last eighth."""
    at_s, values = run.curve("accuracy", "server")
    changes = at_s[at_s > run.end_s * 0.875]
    edges = [run.end_s * 0.875, *changes, run.end_s]
    held = [values[at_s <= begin][-1] for begin in edges[:-1]]
    return np.dot(held, np.diff(edges)) / (run.end_s * 0.125)


def test_a_search_stops_some_and_reports_the_mean_over_seeds(searched):
    found, folder = searched
    assert set(found.trials["status"]) == {"complete", "stopped"}
    for trial in found.tried:
        own = folder / "trials" / f"{trial.number:03}"
        ends = [fedstale.read_run(own / f"seed-{seed}") for seed in (1, 2)]
        assert {run.end_s for run in ends} == {found.space.instants_s[trial.last.rung]}
        assert trial.last.value == pytest.approx(np.mean([seen(run) for run in ends]))


def test_everything_is_written_and_what_is_best_was_held_out(searched):
    found, folder = searched
    written = pd.read_csv(folder / "trials.csv")
    assert len(written) == len(found.trials) == 6
    complete = written[written["status"] == "complete"]
    assert found.best.number == complete.loc[complete["accuracy at 480 s"].idxmax(), "trial"]
    assert set(written.loc[written["status"] == "stopped", "stopped_at_s"]) <= {120.0, 240.0}
    held_out = found.comparison
    assert {one.name for one in held_out.variants} <= {"best", "runner-up", "defaults"}
    assert {run.seed for one in held_out.variants for run in one.runs} == {11, 12}
    # The plan is one of `fedstale compare`, and the settings are those of a run.
    plan = tomllib.loads((folder / "plan.toml").read_text(encoding="utf-8"))
    assert fedstale.Plan.from_table(plan, where="plan.toml").reference == "defaults"
    best = SimulationConfig.read(folder / "best.toml")
    assert best.run_config["learning-rate"] == found.best.parameters["learning-rate"]
    config = fedstale.Plan.from_table(plan, where="plan").config("best", 11)
    concurrency = found.best.parameters["strategy.concurrency"]
    strategy = f"FedBuff(concurrency={concurrency}, buffer_size=2)"
    assert config.run_config["strategy"] == strategy
    assert (folder / "held-out" / "comparison.html").is_file()
    assert found.verdict.split(":")[0] in found._repr_html_()


@pytest.mark.slow
def test_one_worker_and_a_seed_give_the_same_trials_and_decisions_again(searched, tmp_path):
    _, folder = searched
    tune(table(**ASKED), out=tmp_path, workers=1, seed=5)
    assert decisions(tmp_path) == decisions(folder)


def test_a_search_that_is_over_runs_nothing_again(searched, monkeypatch):
    found, folder = searched
    # Whatever starts Ray is not there.
    monkeypatch.setitem(sys.modules, "fedstale.contrib.tuning.engine", None)
    again = tune(table(**ASKED), out=folder, workers=1, seed=5)
    assert again.verdict == found.verdict


def over(given, folder, *reports, **words):
    """Return what comes of a search whose only configuration is over."""
    task = SearchJob(space=Space.read(given), folder=folder)
    with Proposals(task) as proposals:
        proposals.require_same()
        trial = proposals.next()
        proposals.ended(replace(trial, reports=reports), **words)
    return tune(given, out=folder, workers=1)


def test_if_all_fail_the_first_reason_is_said(tmp_path):
    report = Report(rung=0, value=math.nan, failure="no memory")
    with pytest.raises(ConfigError, match=r"1 of 1 configurations failed.*no memory"):
        over(table(search={"strategy.concurrency": [5]}, trials=1), tmp_path, report)
    (row,) = pd.read_csv(tmp_path / "trials.csv").to_dict("records")
    assert (row["status"], row["reason"]) == ("failed", "no memory")
    assert math.isnan(row["accuracy at 180 s"])


def test_a_target_that_none_reaches_is_said(tmp_path):
    reports = [Report(rung=i, value=720.0, n_never=2) for i in range(3)]
    given = table(
        search={"strategy.concurrency": [5]}, trials=1, objective="time to accuracy 0.999"
    )
    with pytest.raises(ConfigError, match="no configuration reached it in any run until 720 s"):
        over(given, tmp_path, *reports)
    (row,) = pd.read_csv(tmp_path / "trials.csv").to_dict("records")
    assert row["never"] == 2


@pytest.mark.slow
def test_a_search_that_was_killed_goes_on_and_repeats_no_finished_run(searched, tmp_path):
    _, whole = searched
    (tmp_path / "space.toml").write_text(tomli_w.dumps(table(**ASKED)), encoding="utf-8")
    words = "import fedstale.cli.main; fedstale.cli.main.app()"
    command = [sys.executable, "-c", words, "tune", "space.toml", "-o", "out"]
    command += ["--workers", "1", "--seed", "5"]
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    out, until = tmp_path / "out", time.monotonic() + 200
    while time.monotonic() < until:
        time.sleep(0.02)
        done = decisions(out) if (out / "study.db").is_file() else []
        if any(trial["status"] == "complete" for trial in done):
            break
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = [trial["number"] for trial in decisions(out) if trial["status"] == "complete"]
    assert 0 < len(decisions(out)) < 6 + 1
    kept = {
        path: path.stat().st_mtime_ns
        for number in done
        for path in (out / "trials" / f"{number:03}").rglob("summary.json")
    }
    assert len(kept) == 2 * len(done) > 0
    again = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False
    )
    assert again.returncode == 0, again.stderr
    assert decisions(out) == decisions(whole)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


ASKING = """
import os, sys
from pathlib import Path
os.environ.pop("RAY_AUTH_MODE", None), os.environ.pop("RAY_AUTH_TOKEN", None)
import ray
ports = Path(sys.argv[1]).glob("fedstale-*/ray/session_latest/gcs_server_port_*")
found = max(ports, key=lambda path: path.stat().st_mtime)
ray.init(address=f"127.0.0.1:{found.read_text()}")
print("let in")
"""


@pytest.mark.slow
def test_who_has_no_token_is_not_let_in(tmp_path):
    asked = []

    def ask(trial):
        if not asked:
            command = [sys.executable, "-c", ASKING, tempfile.gettempdir()]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            # Ray asks again and again, for minutes.
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            asked.append(process.communicate()[0])

    tune(table(**ASKED), out=tmp_path, workers=1, watch=ask)
    assert b"InvalidAuthToken" in asked[0]
    assert b"let in" not in asked[0]
