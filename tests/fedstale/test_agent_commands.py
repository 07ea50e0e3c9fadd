import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from fedstale.agents.evaluation import HEURISTIC
from fedstale.agents.policy import scorer
from fedstale.agents.policy.scorer import initial
from fedstale.cli import agent as agent_commands
from fedstale.cli import output
from fedstale.cli.main import app


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def agent_in(folder):
    weights = initial(np.random.default_rng(0))
    scorer.save(scorer.Agent(weights=weights, provenance={}), folder)
    return folder


def test_a_folder_with_an_agent_is_rejected_in_one_sentence(tmp_path):
    result = run("agent", "train", "--traces", "synthetic:20", "--out", agent_in(tmp_path))
    assert result.exit_code == 2
    assert "holds an agent; expected a new folder, or --resume" in result.stderr


def test_traces_that_do_not_exist_are_told_in_one_sentence(tmp_path):
    result = run("agent", "train", "--traces", "nowhere.parquet", "--out", tmp_path)
    assert result.exit_code == 2
    assert result.stderr.startswith("fedstale: traces = 'nowhere.parquet'")


def test_a_folder_without_an_agent_or_forecaster_is_named(tmp_path):
    result = run("agent", "evaluate", tmp_path, "--traces", "synthetic:20")
    assert result.exit_code == 2
    assert "no agent.toml there" in result.stderr
    result = run(
        "agent",
        "evaluate",
        agent_in(tmp_path),
        "--traces",
        "synthetic:20",
        "--forecaster",
        tmp_path,
    )
    assert result.exit_code == 2
    assert "no forecaster.toml there" in result.stderr


def test_an_agent_is_shown_with_what_it_learnt_from_and_its_faults(tmp_path):
    shown = run("agent", "show")
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert "fleets: phones, desktops, cars, mixed" in lines
    assert lines[-1] == "faults: none"
    # One that prefers who will not finish.
    weights = initial(np.random.default_rng(0))
    weights["beta"][:] = -1.0
    scorer.save(scorer.Agent(weights=weights, provenance={}), tmp_path / "bad")
    found = json.loads(run("agent", "show", tmp_path / "bad", "--json").stdout)
    assert found["faults"]
    refused = run("agent", "show", tmp_path / "nowhere")
    assert refused.exit_code == 2
    assert refused.stderr.count("\n") == 1


def test_without_tensorboard_it_is_said_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    result = run("agent", "train", "--traces", "synthetic:20", "--out", tmp_path, "--tensorboard")
    assert result.exit_code == 2
    assert "pip install 'fedstale[tensorboard]'" in result.stderr


def test_an_agent_without_rivals_to_beat_is_rejected(tmp_path):
    result = run("agent", "evaluate", "--traces", "synthetic:20", "--windows", 1)
    assert result.exit_code == 2


def test_an_evaluation_leaves_a_page_and_prints_tables_that_fit(tmp_path):
    options = ("--traces", "synthetic:40", "--windows", 10, "--devices", 8, "--out", tmp_path)
    result = run("agent", "evaluate", *options)
    assert result.exit_code == 0, result.output
    assert "(1 training seed)" in result.stdout
    tables = [line for line in result.stdout.splitlines() if not line.startswith(("syn", "All"))]
    assert max(map(len, tables)) <= 100
    assert "nan" not in result.stdout.lower()
    page = (tmp_path / "evaluation.html").read_text()
    assert "agent from scratch: no such agent was given (--scratch)." in page
    assert {"evaluation.csv", "windows.csv"} <= {path.name for path in tmp_path.iterdir()}


@pytest.fixture
def small(monkeypatch):
    """Make trainings short."""
    train_all = agent_commands.train_all

    def shortly(trainings, *args, **options):
        less = {"windows": 1, "validate_every": 1, "validation_windows": 4}
        short = {folder: replace(training, **less) for folder, training in trainings.items()}
        return train_all(short, *args, **options)

    monkeypatch.setattr(agent_commands, "train_all", shortly)


@pytest.mark.slow
def test_two_seeds_are_trained_and_all_contenders_are_compared(tmp_path, small):
    out = tmp_path / "agent"
    options = ("--traces", "synthetic:60", "--windows", 10)
    result = run("agent", "train", *options, "--out", out, "--updates", 2, "--seeds", 2)
    assert result.exit_code == 0, result.output
    assert len(re.findall(r"seed \d  update \d/2  held out", result.stderr)) == 4
    assert HEURISTIC in result.stdout
    assert "the best of 2 trainings" in (out / "training.html").read_text()
    assert (out / "evaluation.html").is_file()
    assert "(2 training seeds)" in result.stdout
    best = scorer.load(out).provenance["validation"]
    each = [scorer.load(out / f"seed-{seed}").provenance["validation"] for seed in (0, 1)]
    assert best == max(each)

    again = run("agent", "train", *options, "--out", out, "--updates", 2, "--seeds", 2, "--resume")
    assert again.exit_code == 0, again.output
    assert again.stdout == result.stdout

    found = run("agent", "evaluate", out, *options, "--json", "--scratch", out / "seed-0")
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)
    by_name = {row["contender"]: row for row in rows if row["metric"] == "reward"}
    names = {"agent", HEURISTIC, "p_finish", "LinUCB", "random", "FedCS", "REFL IPS"}
    assert names | {"agent from scratch"} <= set(by_name)
    assert by_name["agent"]["difference"] is None
    low, high = by_name["random"]["low"], by_name["random"]["high"]
    assert low <= by_name["random"]["difference"] <= high


@pytest.mark.slow
def test_one_agent_learns_on_two_fleets_and_is_tested_on_each(tmp_path, small):
    fleets = ("synthetic:40", "synthetic:30@desktops")
    options = [word for fleet in fleets for word in ("--traces", fleet)]
    out = tmp_path / "agent"
    how = ("--no-forecasts", "--windows", 10, "--updates", 2, "--json", "--out", out)
    result = run("agent", "train", *options, *how)
    assert result.exit_code == 0, result.output
    assert {row["traces"] for row in json.loads(result.stdout)} == set(fleets)
    assert scorer.load(out).provenance["traces"] == list(fleets)
    assert (out / "fleet-1" / "evaluation.csv").exists()
    assert (out / "fleet-1" / "evaluation.html").exists()


def test_forecasters_are_one_for_all_fleets_or_one_for_each(tmp_path):
    fleets = ("--traces", "synthetic:20") * 3
    result = run("agent", "train", *fleets, *("--forecaster", "embedded") * 2, "--out", tmp_path)
    assert result.exit_code == 2
    assert "2 forecasters for 3 traces: expected one, or one each" in result.stderr


def test_an_evaluation_tells_how_far_it_is(monkeypatch):
    # The clock of the lines, not of the work, moves a minute at each look.
    now = iter(range(0, 100_000, 60))
    monkeypatch.setattr(output, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    options = ("--traces", "synthetic:40", "--windows", 10, "--devices", 8)
    result = run("agent", "evaluate", *options)
    assert result.exit_code == 0, result.output
    assert re.search(r"^75% done, forecasts of validation, \d+\.\d min left$", result.stderr, re.M)
    assert re.search(r"^\d+% done, playing: LinUCB, \d+\.\d min left$", result.stderr, re.M)
    silent = run("agent", "evaluate", *options, "--quiet")
    assert "done, " not in silent.stderr
