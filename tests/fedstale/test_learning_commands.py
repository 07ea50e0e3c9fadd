"""`fedstale agent fit-learning`, and `agent evaluate --worlds`, as a user calls them."""

import json
import shutil
import tomllib
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from short_trainings import with_few_examples, write_phones
from typer.testing import CliRunner

from fedstale.agents import world_evaluation
from fedstale.agents.env import learning_fit
from fedstale.agents.env.learning_fit import FREE, NOTHING, PROXY
from fedstale.agents.env.learning_proxy import fitted, read_proxy
from fedstale.agents.env.worlds import VARIED
from fedstale.cli import output
from fedstale.cli.learning import learning_run, read_learning_runs
from fedstale.cli.main import app
from fedstale.errors import ConfigError
from fedstale.tuning.space import Space

RUN = ["simulate", "digits", "--traces", "synthetic:20", "--until", "70m", "--quiet"]
HOW = "strategy='fedbuff' concurrency=8 buffer-size=1"


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def said(result):
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture(autouse=True)
def _few_plays(monkeypatch):
    monkeypatch.setattr(world_evaluation, "PLAYS", 100)
    with_few_examples(monkeypatch)


@pytest.fixture(scope="module")
def phones(tmp_path_factory):
    return write_phones(tmp_path_factory.mktemp("phones"))


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A run that trained for real."""
    folder = tmp_path_factory.mktemp("real") / "run"
    result = run(*RUN, "-c", HOW, "--out", folder)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def runs(real, tmp_path_factory):
    """Six runs: the real one, and five like it that learnt faster and slower."""
    folder = tmp_path_factory.mktemp("runs")
    for i, pace in enumerate((1.0, 0.9, 0.95, 1.05, 1.1, 1.15)):
        copy(
            real,
            folder / f"run-{i}",
            lambda losses, pace=pace: losses[0] * (losses / losses[0]) ** pace,
        )
    return [folder / f"run-{i}" for i in range(6)]


def copy(source, target, change):
    """Copy a run with other losses of the server."""
    shutil.copytree(source, target)
    metrics = pd.read_parquet(target / "metrics.parquet")
    is_loss = metrics["source"].eq("server") & metrics["name"].eq("loss")
    metrics.loc[is_loss, "value"] = change(metrics.loc[is_loss, "value"].to_numpy())
    metrics.to_parquet(target / "metrics.parquet")
    return target


def test_a_run_folder_tells_whose_updates_went_into_each_version(real):
    found, events = learning_run(real), pd.read_parquet(real / "events.parquet")
    assert found.app == "digits"
    assert found.n_devices == 20
    assert len(found.merged) == events["aggregated_version"].max()
    assert sum(len(devices) for devices in found.merged) == (events["aggregated_version"] > 0).sum()
    names = list(dict.fromkeys(events["device_id"]))
    fifth = events[events["aggregated_version"] == 5]["device_id"]
    assert sorted(names[place] for place in found.merged[4]) == sorted(fifth)
    assert found.losses[0] == pytest.approx(np.log(10), abs=0.1)
    assert found.losses[-1] < found.losses[0]


def test_constants_are_fitted_and_written_and_training_and_evaluation_take_them(
    runs, phones, tmp_path, monkeypatch
):
    # The fit takes seconds: the same runs are fitted once, however often the command is called.
    fits, fit = {}, learning_fit.fit_learning

    def fitted_once(known, *, seed):
        key = (*(one.name for one in known), seed)
        fits[key] = fits.get(key) or fit(known, seed=seed)
        return fits[key]

    monkeypatch.setattr(learning_fit, "fit_learning", fitted_once)
    path = tmp_path / "own.toml"
    result = run("agent", "fit-learning", *runs, "--out", path)
    assert result.exit_code == 0, result.output
    assert "learning proxy" in result.stdout
    assert "digits: 6 runs" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 120
    proxy, table = read_proxy(path), tomllib.loads(path.read_text())
    assert proxy != fitted()
    assert table["provenance"]["kept"] == [name for name in VARIED if name not in FREE]
    refused = said(run("agent", "fit-learning", *runs, "--out", path))
    assert "exists already; choose another name, or pass --overwrite" in refused
    again = run("agent", "fit-learning", *runs, "--out", path, "--overwrite", "--json")
    facts = json.loads(again.stdout)
    assert facts["constants"]["eta"] == pytest.approx(proxy.eta, rel=1e-5)
    assert {row["emulator"] for row in facts["out_of_sample"]} == {PROXY, NOTHING}

    options = ("--traces", phones, "--windows", 10, "--devices", 4, "--learning", path)
    found = run("agent", "evaluate", *options, "--worlds", 20, "--json", "--quiet")
    assert found.exit_code == 0, found.output
    facts = json.loads(found.stdout)
    assert facts["spread"] == pytest.approx(table["spread"])
    assert any("devices" in line or "rounds" in line for line in facts["outside"])


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
        *("p_finish x utility", "p_finish", "random", "FedCS", "REFL IPS", "power of choice")
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


def test_folders_without_what_is_needed_are_told_in_one_sentence(real, runs, tmp_path):
    out = ("--out", tmp_path / "own.toml")
    assert "is not a folder" in said(run("agent", "fit-learning", tmp_path / "nowhere", *out))
    assert "expected at least 5" in said(run("agent", "fit-learning", *runs[:4], *out))
    assert "is given twice" in said(run("agent", "fit-learning", *runs, runs[0], *out))
    none = copy(real, tmp_path / "none", lambda losses: losses * np.nan)
    assert "a loss of nan" in said(run("agent", "fit-learning", *runs, none, *out))
    metrics = pd.read_parquet(none / "metrics.parquet")
    metrics[~metrics["name"].eq("loss")].to_parquet(none / "metrics.parquet")
    assert "the server measured no loss" in said(run("agent", "fit-learning", *runs, none, *out))
    other = copy(real, tmp_path / "other", lambda losses: losses)
    summary = json.loads((other / "summary.json").read_text())
    (other / "summary.json").write_text(json.dumps(summary | {"app": "fashion"}))
    assert "runs of digits and fashion" in said(run("agent", "fit-learning", *runs, other, *out))
    assert not (tmp_path / "own.toml").exists()
    beside = ("--out", tmp_path / "no" / "own.toml")
    assert "does not exist; make it first" in said(run("agent", "fit-learning", *runs, *beside))


def test_a_strategy_of_flower_is_told_to_say_too_little(tmp_path):
    folder = tmp_path / "flower"
    words = ("--traces", "ideal:5", "-c", "num-server-rounds=2", "--quiet", "--out", folder)
    made = run("simulate", "digits", *words)
    assert made.exit_code == 0, made.output
    with pytest.raises(ConfigError, match="no job says which version it went into"):
        read_learning_runs([folder])


@pytest.mark.parametrize("key", ["learning", "constants", "worlds"])
def test_schedules_are_not_tuned_on_the_learning_proxy(key, tmp_path):
    space = {"app": "digits", "traces": "synthetic:20", "until": "20m", key: "own.toml"}
    with pytest.raises(ConfigError, match=f"{key}: constants of the learning proxy tune no sched"):
        Space.read(space)


def test_a_file_of_constants_is_no_space_to_tune(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text("[constants]\neta = 0.2\n")
    assert "tune no schedules" in said(run("tune", path, "--out", tmp_path / "out"))


def test_a_damaged_file_of_constants_is_named(phones, tmp_path):
    path = tmp_path / "own.toml"
    path.write_text("[constants]\neta = 'fast'\n")
    options = ("--traces", phones, "--learning", path)
    assert "own.toml: expected a table [constants]" in said(
        run("agent", "evaluate", *options, "-q")
    )
    out = ("--out", tmp_path / "agent", "--quiet")
    assert "own.toml: expected a table [constants]" in said(run("agent", "train", *options, *out))
