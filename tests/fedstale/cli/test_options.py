"""Each option of simulate and compare takes effect, or is refused by its name."""

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import typer
from interruptions import no_pages
from small_app import write_small_app
from typer.testing import CliRunner

from fedstale.cli import main as cli
from fedstale.cli import simulate
from fedstale.config import SimulationConfig
from fedstale.traces import TraceSet

__all__ = ["no_pages"]

pytestmark = pytest.mark.usefixtures("no_pages")

COMMANDS = typer.main.get_command(cli.app).commands
FLAGS = {
    command: {option.name: option.opts[0] for option in COMMANDS[command].params if option.opts}
    for command in ("simulate", "compare")
}
MORE = set(simulate._MORE)
"""Settings that --set says."""
TEXTS = {"on_interrupt", "after_end", "node_config", "seed_key"}
SETTINGS = {field.name for field in fields(SimulationConfig)} - {
    "app",
    "run_config",
    "changes",
    "costs",
}
SHOWN = {"live", "as_json"}
"""Options of simulate that change what is seen of a run, and where."""
PLACES = {"app", "out", "overwrite", "resume", "measure_costs", "dry_run"}
OTHERS = {"run_config", "costs"}

GIVEN = {
    "traces": "ideal:5",
    "until": "1 rounds",
    "on_interrupt": "pause",
    "after_end": "stop",
    "node_config": "nodes.toml",
    "strategy": "FedBuff(4, 2)",
    "seed_key": "rounds",
    "executor": "inline",
    "workers": "1",
    "run_config": "local-epochs=5",
    "costs": "costs.epochs=3 costs.work.query=0.5 costs.constant-replies=true",
}
"""Values that differ from every default; of all other options a number by its type."""
REFUSED = {
    "gpus": "with executor = 'ray'",
    "client_limit_s": "can be ended only with it",
    "node_config": "no such file",
}
"""Settings that this process and its executor cannot have, and what the sentence says."""


SWITCHES = {"overwrite", "as_json", "measure_costs", "dry_run"}
"""Options without a value."""


def value_of(name):
    if name in GIVEN:
        return GIVEN[name]
    hints = get_type_hints(SimulationConfig)
    kinds = get_args(hints[name]) or (hints[name],)
    return "3" if int in kinds else "0.5"


def words_of(name):
    """Return the words of a command line that give a setting, or another option, a value."""
    if name in {*MORE, "costs"}:
        value = value_of(name)
        text = f"'{value}'" if name in TEXTS else value
        return ["--set", value if name == "costs" else f"{name.replace('_', '-')}={text}"]
    return [FLAGS["simulate"][name], *([] if name in SWITCHES else [value_of(name)])]


def called(*words):
    result = CliRunner().invoke(cli.app, [*map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def config_of(run):
    return SimulationConfig.read(run / "config.toml")


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """Return the folder of a finished run of the small app."""
    folder = tmp_path_factory.mktemp("earlier")
    app = write_small_app(folder / "app")
    words = ["--traces", "synthetic:6", "-c", "rounds=1", "--out", folder / "run"]
    assert called("simulate", app, *words).exit_code == 0
    return folder / "run"


@pytest.fixture
def unfinished(earlier, tmp_path):
    """Return the folder of a run that was killed, with the settings of the earlier one."""
    (tmp_path / "unfinished").mkdir()
    shutil.copy(earlier / "config.toml", tmp_path / "unfinished")
    return tmp_path / "unfinished"


def test_every_option_is_tried_here():
    known = SETTINGS - MORE | SHOWN | PLACES | {"run_config", "more"}
    assert set(FLAGS["simulate"]) == known, "say below what a new option does beside a config"
    shown = {"as_json"}
    tried = {"sources", "out", "workers", "target", "reference", "overwrite"}
    assert set(FLAGS["compare"]) == shown | tried


@pytest.mark.parametrize(
    ("beside", "name"),
    [
        *(("config", name) for name in sorted(SETTINGS | OTHERS)),
        *(("app", name) for name in sorted(SETTINGS | OTHERS)),
    ],
)
def test_a_setting_changes_the_run_or_is_refused_by_name(tmp_path, earlier, name, beside):
    before = config_of(earlier)
    source = [before.app, "--traces", "synthetic:6", "-c", "rounds=1"]
    if beside == "config":
        source = [earlier / "config.toml"]
    result = called("simulate", *source, *words_of(name), "--out", tmp_path / "run")
    if name in REFUSED:
        assert result.exit_code == 2
        assert f"{name} = " in result.stderr
        assert REFUSED[name] in result.stderr
        return
    assert result.exit_code in (0, 1), result.output
    after = config_of(tmp_path / "run")
    changed = {f.name for f in fields(before) if getattr(before, f.name) != getattr(after, f.name)}
    if name in SETTINGS:
        assert changed == {name}
        assert str(getattr(after, name)) == value_of(name)
    elif name == "costs":
        assert changed == {"costs"}
        given = {"epochs": 3, "work.query": 0.5, "constant-replies": True}
        assert after.costs == {**before.costs, **given}
    else:
        assert after.run_config == {**before.run_config, "local-epochs": 5}
        # The number of epochs that is charged comes from this key.
        assert after.costs == {**before.costs, "epochs": 5}


@pytest.mark.parametrize("name", sorted((SETTINGS | OTHERS | PLACES | SHOWN) - {"app", "resume"}))
def test_beside_resume_an_option_takes_effect_or_is_refused_by_name(unfinished, name, tmp_path):
    free = {"executor", "workers"} | SHOWN
    if name == "live":
        pytest.skip("listens at a port: tests/system/cli/test_live_beside_resume.py")
    words = words_of(name) if name != "out" else ["--out", "x"]
    before = config_of(unfinished)
    result = called("simulate", "--resume", unfinished, *words)
    if name == "client_limit_s":
        assert (result.exit_code, REFUSED[name] in result.stderr) == (2, True)
        return
    if name not in free:
        assert result.exit_code == 2
        said = words[0] if words[0] != "--set" else f"--set {words[1].partition('=')[0]}"
        assert ("expected a later limit" if name == "until" else said) in result.stderr
        assert ("beside --resume" in result.stderr) == (name != "until")
        assert result.stderr.count("\n") == 1
        assert not (unfinished / "summary.json").exists()
        return
    assert result.exit_code == 0, result.output
    if name in SETTINGS:
        assert str(getattr(config_of(unfinished), name)) == words[1]
        assert config_of(unfinished).differing(before) == ""
    elif name == "as_json":
        assert json.loads(result.stdout)["status"] == "finished"


def test_an_executor_that_rounds_otherwise_is_refused_beside_resume(unfinished):
    result = called("simulate", "--resume", unfinished, "--executor", "batched")
    assert result.exit_code == 2
    assert "executor = 'exact' instead of 'batched'" in result.stderr


def test_a_run_goes_on_to_a_later_limit_by_the_command(tmp_path):
    devices = ["--traces", "synthetic:12"]
    app = write_small_app(tmp_path / "app")
    for name, until in (("run", "1 rounds"), ("whole", "3 rounds")):
        words = ["-c", "rounds=9", "--until", until, "--out", tmp_path / name]
        assert called("simulate", app, *devices, *words).exit_code == 0
    refused = called("simulate", "--resume", tmp_path / "run")
    assert refused.exit_code == 2
    assert "has stopped at its limit; expected a later until" in refused.stderr
    again = called("simulate", "--resume", tmp_path / "run", "--until", "3 rounds", "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["reason"] == "reached 3 rounds"
    # A strategy of Flower begins anew, and says so before it works.
    assert "begins anew" in again.stderr
    for name in ("events.parquet", "metrics.parquet"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


# A config means the same from any directory, and a run folder may be moved.


@pytest.mark.parametrize("resumed", [False, True])
def test_a_config_works_from_any_directory_and_after_a_move(tmp_path, monkeypatch, resumed):
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write_small_app(Path("app"))
    TraceSet.synthetic(6, days=1, seed=0).write("devices.parquet")
    words = ["--traces", "devices.parquet", "-c", "rounds=1", "--out", "run"]
    assert called("simulate", "./app", *words).exit_code == 0
    first = (tmp_path / "here" / "run" / "events.parquet").read_bytes()
    run = tmp_path / "elsewhere" / "moved"
    shutil.move("run", run)
    monkeypatch.chdir(tmp_path / "elsewhere")
    if resumed:
        (run / "summary.json").unlink()
        again, made = called("simulate", "--resume", "moved"), run
    else:
        made = tmp_path / "elsewhere" / "again"
        again = called("simulate", "moved/config.toml", "--out", "again")
    assert again.exit_code == 0, again.output
    assert (made / "events.parquet").read_bytes() == first
    assert config_of(made).app == str(tmp_path / "here" / "app")


# fedstale compare


def test_options_that_mean_nothing_for_finished_runs_are_refused_by_name(tmp_path, earlier):
    result = called("compare", earlier, "--workers", "2", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "fedstale: --workers beside folders of runs" in result.stderr
    assert not (tmp_path / "out").exists()


def test_options_of_a_plan_take_effect(tmp_path, monkeypatch, pool_here):
    monkeypatch.chdir(tmp_path)
    app = write_small_app(tmp_path / "app")
    (tmp_path / "plan.toml").write_text(
        f'app = "{app}"\ntraces = "ideal:6"\nseeds = [1]\n'
        "[run-config]\nrounds = 1\n[variants.A]\n[variants.B]\n"
    )
    words = ["compare", "plan.toml", "--out", "out", "--json"]
    first = called(*words, "--reference", "B", "--target", "accuracy 0.2")
    assert first.exit_code == 0, first.output
    made = json.loads(first.stdout)
    assert (made["reference"], made["target"]) == ("B", "accuracy 0.2")
    written = tmp_path / "out" / "runs" / "A" / "1" / "events.parquet"
    before = written.stat().st_mtime_ns
    assert called(*words).exit_code == 0
    assert written.stat().st_mtime_ns == before
    assert called(*words, "--overwrite").exit_code == 0
    assert written.stat().st_mtime_ns > before
    assert called(*words, "--workers", "0").stderr.startswith("fedstale: workers = 0: expected")
