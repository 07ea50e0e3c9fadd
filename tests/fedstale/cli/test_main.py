"""The command `fedstale`: what it says, how it ends, and what it writes."""

import json
import os
import signal
import subprocess
import sys

import pandas as pd
import pytest
import typer
from small_app import SERVER, write_small_app
from typer.testing import CliRunner

from fedstale.cli import main as cli
from fedstale.traces import TraceSet


def called(*arguments):
    """Call a command in this process, which saves the seconds that a new one takes to import."""
    result = CliRunner().invoke(cli.app, [*map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


SHORT = ["--traces", "synthetic:30", "-c", "num-server-rounds=3"]


@pytest.mark.smoke
def test_version_is_that_of_the_package_and_nothing_heavy_is_imported_for_it():
    from fedstale import __version__

    command = [sys.executable, "-X", "importtime", "-m", "fedstale", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == f"fedstale {__version__}"
    # Half a second is promised for what only speaks of commands.
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"numpy", "pandas", "pyarrow", "torch", "flwr", "ray"}


def test_the_built_in_app_runs_prints_a_table_and_writes_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = called("simulate", "digits", *SHORT, "--out", "run")
    assert run.exit_code == 0
    assert all(line.startswith("WARNING :") for line in run.stderr.splitlines())
    assert "│ accuracy " in run.stdout
    assert "devices finished (3 rounds of the app) after " in run.stdout
    assert f"report: run{os.sep}report.html" in run.stdout
    assert f"log: run{os.sep}log.txt" in run.stdout
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert names >= {"config.toml", "events.parquet", "metrics.parquet", "model.safetensors"}


def test_json_is_one_object_that_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = called("simulate", "digits", *SHORT, "--json")
    assert run.exit_code == 0
    summary = json.loads(run.stdout)
    assert summary["status"] == "finished"
    assert (tmp_path / summary["out"] / "summary.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["simulate", "no_such_app"], "no_such_app"),
        (["simulate", "digits", "--traces", "missing.parquet"], "missing.parquet"),
        (["simulate", "digits", "--traces", "synthetic:0"], "synthetic"),
        (["simulate", "digits", "--until", "soon"], "until = 'soon'"),
        (["simulate", "digits", "-c", "num-rounds=3"], "num-server-rounds"),
        (["simulate", "digits", "-c", "= broken ="], "run-config"),
        (["simulate", "digits", "--set", "costs.epochs=true"], "epochs"),
        (["simulate", "digits", "--set", "costs.exampels=3"], "unknown key 'exampels'"),
        (["simulate", "digits", "--set", "examples"], "set = 'examples'"),
        (["simulate", "digits", "-c", "local-epochs=0.5"], "expected a whole number of epochs"),
        (["simulate", "digits", "--set", "partition=3"], "expected 'partitions'"),
        (["simulate", "digits", "--set", "partitions='a'"], "partitions = 'a'"),
        (["simulate", "missing.toml"], "missing.toml"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_2(tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    run = called(*arguments)
    assert run.exit_code == 2
    assert sentence in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


SWALLOWED = """
        try:
            signal.raise_signal(NUMBER)
        except:
            print("swallowed", file=sys.stderr)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("swallows", [False, True])
def test_ctrl_c_and_sigterm_end_cleanly_and_keep_what_was_done(
    tmp_path, monkeypatch, number, swallows
):
    monkeypatch.chdir(tmp_path)
    begin = "def evaluate(server_round, arrays):\n"
    raises = SWALLOWED if swallows else "        signal.raise_signal(NUMBER)\n"
    ends = f"{begin}    if server_round == 2:\n{raises.replace('NUMBER', str(int(number)))}"
    server = "import signal, sys\n" + SERVER.replace(begin, ends)
    write_small_app(tmp_path / "app", server=server)
    words = ("--traces", "ideal:5", "-c", "rounds=100000", "--out", "run")
    run = called("simulate", "./app", *words)
    assert run.exit_code == (143 if number == signal.SIGTERM else 1), run.output
    assert run.stderr.count("swallowed") == swallows
    name = "SIGTERM" if number == signal.SIGTERM else "Ctrl-C"
    assert f"interrupted: {name}; fedstale simulate --resume run goes on" in run.stderr
    assert "Traceback" not in run.stderr
    # Jobs and values of two rounds; the swallowed signal ends the third, once it is sent.
    kept = [len(pd.read_parquet(tmp_path / "run" / f"{n}.parquet")) for n in ("events", "metrics")]
    assert kept == ([19, 10] if swallows else [14, 8])


def test_a_new_app_runs_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert called("new", "my_app").exit_code == 0
    run = called("simulate", "my_app", "--traces", "ideal:5", "--json")
    assert run.exit_code == 0, run.stderr
    assert json.loads(run.stdout)["rounds"] > 0


def commands(group, *path):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)
        else:
            yield pytest.param(command, id=" ".join((*path, name)))


FLOWERS = {"flwr", "superlink", "superexec", "node"}
"""Commands that become one of Flower's, whose options and output are its own."""


@pytest.mark.parametrize("command", list(commands(typer.main.get_command(cli.app))))
def test_every_command_has_help_an_example_and_json(command):
    options = {option for parameter in command.params for option in parameter.opts}
    assert ("--json" in options) == (command.name not in FLOWERS)
    assert command.help
    assert "Example" in command.epilog


def test_what_was_made_is_one_json_object(tmp_path):
    out, devices = tmp_path / "devices.parquet", tmp_path / "phones.parquet"
    TraceSet.synthetic(10, days=2, seed=0).write(devices)
    train = ("forecaster", "train", "--traces", devices, "--kind", "last-value", "--examples", 100)
    made = [
        (("new", tmp_path / "app"), {"out": str(tmp_path / "app")}),
        (("traces", "convert", "synthetic:3", "--out", out), {"devices": 3}),
        ((*train, "--out", tmp_path / "forecaster"), {"kind": "last-value"}),
    ]
    for words, expected in made:
        result = CliRunner().invoke(cli.app, [*map(str, words), "--json"])
        assert result.exit_code == 0, result.output
        assert expected.items() <= json.loads(result.stdout).items()
