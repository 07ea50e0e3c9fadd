"""Agents are trained by the command in processes of their own, and on several generated fleets."""

import json

from short_trainings import with_short_trainings
from typer.testing import CliRunner

from fedstale.agents.evaluation import HEURISTIC
from fedstale.agents.policy import scorer
from fedstale.cli.main import app


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_two_seeds_are_trained_and_all_contenders_are_compared(tmp_path, monkeypatch):
    with_short_trainings(monkeypatch)
    out = tmp_path / "agent"
    options = ("--traces", "synthetic:60", "--windows", 10)
    result = run("agent", "train", *options, "--out", out, "--updates", 2, "--seeds", 2)
    assert result.exit_code == 0, result.output
    assert HEURISTIC in result.stdout
    assert "(2 training seeds)" in result.stdout
    best = scorer.load(out).provenance["validation"]
    each = [scorer.load(out / f"seed-{seed}").provenance["validation"] for seed in (0, 1)]
    assert best == max(each)

    found = run("agent", "evaluate", out, *options, "--json")
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)
    by_name = {row["contender"]: row for row in rows if row["metric"] == "reward"}
    names = {"agent", HEURISTIC, "p_finish", "random", "FedCS", "REFL IPS"}
    assert names <= set(by_name)
    assert by_name["agent"]["difference"] is None
    low, high = by_name["random"]["low"], by_name["random"]["high"]
    assert low <= by_name["random"]["difference"] <= high


def test_one_agent_learns_on_two_fleets_and_is_tested_on_each(tmp_path, monkeypatch):
    with_short_trainings(monkeypatch)
    fleets = ("synthetic:40", "synthetic:30@desktops")
    options = [word for fleet in fleets for word in ("--traces", fleet)]
    out = tmp_path / "agent"
    how = ("--windows", 10, "--updates", 2, "--json", "--out", out)
    result = run("agent", "train", *options, *how)
    assert result.exit_code == 0, result.output
    assert {row["traces"] for row in json.loads(result.stdout)} == set(fleets)
    assert scorer.load(out).provenance["traces"] == list(fleets)
    assert (out / "fleet-1" / "evaluation.csv").exists()
