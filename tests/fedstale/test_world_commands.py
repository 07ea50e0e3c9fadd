"""`fedstale agent evaluate --worlds`, as a user calls it."""

import json
from types import SimpleNamespace

import pandas as pd
import pytest
from short_trainings import with_few_examples, write_phones
from typer.testing import CliRunner

from fedstale.agents import worlds as agent_worlds
from fedstale.cli import output
from fedstale.cli.main import app


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(autouse=True)
def _few_plays(monkeypatch):
    monkeypatch.setattr(agent_worlds, "PLAYS", 100)
    with_few_examples(monkeypatch)


@pytest.fixture(scope="module")
def phones(tmp_path_factory):
    return write_phones(tmp_path_factory.mktemp("phones"))


def test_worlds_are_told_in_a_table_and_a_rule_is_preferred(phones, tmp_path, monkeypatch):
    now = iter(range(0, 100_000, 60))
    monkeypatch.setattr(output, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    options = ("--traces", phones, "--windows", 10, "--devices", 4, "--worlds", 20)
    shown = run("agent", "evaluate", *options, "--out", tmp_path, "--quiet")
    assert shown.exit_code == 0, shown.output
    for word in ("advantage", "5 %", "95 %", "of 20", "matters", "Spread", "prefer"):
        assert word in shown.stdout
    assert "outside of the fit" in shown.stderr
    assert "done, " not in shown.stderr
    told = run("agent", "evaluate", *options, "--json")
    facts = json.loads(told.stdout)
    assert (facts["worlds"], facts["windows"]) == (20, 10)
    rules = {row["rule"]: row for row in facts["rules"]}
    assert set(rules) == {
        *("balanced", "p_finish", "random", "FedCS", "REFL IPS", "power of choice")
    }
    for row in rules.values():
        assert row["low"] <= row["median"] <= row["high"]
        assert row["share"] == row["ahead"] / 20
    doubtful = [rule for rule, row in rules.items() if row["share"] < 0.9]
    assert facts["prefer"] in doubtful or (not doubtful and facts["prefer"] == "agent")
    table = pd.read_csv(tmp_path / "worlds.csv")
    assert len(table) == 20
    medians = table["advantage over random"].median()
    assert medians == pytest.approx(rules["random"]["median"], abs=1e-5)
