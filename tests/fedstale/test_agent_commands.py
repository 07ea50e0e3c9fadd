"""`fedstale agent train`, `evaluate` and `show`, as a user calls them."""

import json

import numpy as np
import pytest
from short_trainings import with_few_examples, with_short_trainings, write_phones
from typer.testing import CliRunner

from fedstale.agents.evaluation import HEURISTIC
from fedstale.agents.policy import scorer
from fedstale.agents.policy.scorer import initial
from fedstale.cli.main import app


@pytest.fixture(scope="module")
def phones(tmp_path_factory):
    return write_phones(tmp_path_factory.mktemp("phones"))


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def agent_in(folder):
    weights = initial(np.random.default_rng(0))
    scorer.save(scorer.Agent(weights=weights, provenance={}), folder)
    return folder


@pytest.fixture(scope="module")
def evaluated(phones, tmp_path_factory):
    """Return the folder of an evaluation, and what it said."""
    out = tmp_path_factory.mktemp("evaluated")
    with pytest.MonkeyPatch.context() as monkeypatch:
        with_few_examples(monkeypatch)
        options = ("--traces", phones, "--windows", 10, "--devices", 4, "--out", out)
        result = run("agent", "evaluate", *options)
    assert result.exit_code == 0, result.output
    return out, result


def test_an_evaluation_leaves_and_prints_tables_that_fit(evaluated):
    out, result = evaluated
    assert "(1 training seed)" in result.stdout
    tables = [line for line in result.stdout.splitlines() if not line.startswith(("syn", "All"))]
    assert max(map(len, tables)) <= 100
    assert "nan" not in result.stdout.lower()
    assert {"evaluation.csv", "windows.csv"} <= {path.name for path in out.iterdir()}


@pytest.mark.slow
def test_an_agent_is_trained_and_tested_without_a_word_beside_json(phones, tmp_path, monkeypatch):
    with_few_examples(monkeypatch)
    with_short_trainings(monkeypatch)
    out = tmp_path / "agent"
    how = ("--windows", 10, "--updates", 2, "--json", "--out", out)
    result = run("agent", "train", "--traces", phones, *how)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert {row["traces"] for row in rows} == {str(phones)}
    by_name = {row["contender"]: row for row in rows if row["metric"] == "reward"}
    assert {"agent", HEURISTIC, "p_finish", "random", "FedCS", "REFL IPS"} <= set(by_name)
    assert by_name["agent"]["difference"] is None
    assert by_name["random"]["low"] <= by_name["random"]["difference"] <= by_name["random"]["high"]
    assert scorer.load(out).provenance["traces"] == [phones.name]
    assert {"progress.jsonl", "evaluation.csv"} <= {path.name for path in out.iterdir()}
    # Another goes on from it, for another reward.
    how = ("--windows", 10, "--updates", 1, "--out", tmp_path / "after")
    words = ("--traces", phones, "--from", out, "--objective", "priced", *how)
    result = run("agent", "train", *words)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == scorer.load(tmp_path / "after").advice
    first, after = scorer.load(out), scorer.load(tmp_path / "after")
    assert first.provenance["reward"] == {"time": 0.0, "waste": 0.0}
    assert after.provenance["reward"] == {"time": 0.1, "waste": 0.3}
    assert after.provenance["from"] == scorer.digest(first.weights)
    # In one step weights go less far than from one start to another.
    other = initial(np.random.default_rng(1))["candidate"]
    moved = np.abs(after.weights["candidate"] - first.weights["candidate"]).max()
    assert moved < 0.1 < np.abs(first.weights["candidate"] - other).max()


FLEET = ("--traces", "synthetic:20")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("train", *FLEET, "--out", "agent"),
            "holds an agent; expected a new folder",
        ),
        (
            ("train", "--traces", "nowhere.parquet", "--out", "new"),
            "fedstale: traces = 'nowhere.parquet'",
        ),
        (("train", *FLEET, "--from", "nowhere", "--out", "new"), "nowhere"),
        (
            ("train", *FLEET * 3, *("--forecaster", "embedded") * 2, "--out", "new"),
            "2 forecasters for 3 traces: expected one, or one each",
        ),
        (("evaluate", "empty", *FLEET), "no agent.toml there"),
        (("evaluate", "agent", *FLEET, "--forecaster", "agent"), "no forecaster.toml there"),
        (("evaluate", *FLEET, "--windows", 1), "x>=10"),
    ],
)
def test_what_cannot_be_trained_or_tested_is_one_sentence(tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    agent_in(tmp_path / "agent")
    (tmp_path / "empty").mkdir()
    result = run("agent", *words)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
