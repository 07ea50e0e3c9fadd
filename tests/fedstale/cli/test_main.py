import json
import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
import typer
from small_app import SERVER, write_small_app
from typer.testing import CliRunner

from fedstale.cli import main as cli

FEDSTALE = [sys.executable, "-m", "fedstale"]


def fedstale(*arguments, cwd=None, timeout=120):
    return subprocess.run(
        [*FEDSTALE, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=timeout,
        check=False,
    )


def called(*arguments):
    """Call a command in this process, which saves the seconds that a new one takes to import."""
    result = CliRunner().invoke(cli.app, [*map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


SHORT = ["--traces", "synthetic:30", "-c", "num-server-rounds=3"]


def test_help_answers_at_once():
    used = []
    for _ in range(3):
        before = os.times()
        assert fedstale("--help").returncode == 0
        after = os.times()
        used.append(sum(after[2:4]) - sum(before[2:4]))
    # Half a second is promised. Processor time is the same on a loaded machine.
    assert min(used) < 0.75


def test_version_is_that_of_the_package():
    from fedstale import __version__

    assert fedstale("--version").stdout.strip() == f"fedstale {__version__}"


def test_the_built_in_app_runs_prints_a_table_and_writes_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = called("simulate", "digits", *SHORT, "--out", "run")
    assert run.exit_code == 0
    # Flower's log, and nothing else.
    assert all(line.startswith(("INFO :", "WARNING :")) for line in run.stderr.splitlines())
    assert "server accuracy" in run.stdout
    assert "finished: 3 rounds of the app" in run.stdout
    assert f"report: run{os.sep}report.html" in run.stdout
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert names >= {"config.toml", "events.parquet", "metrics.parquet", "model.safetensors"}


def test_json_is_one_object_that_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = called("simulate", "digits", *SHORT, "--json")
    assert run.exit_code == 0
    summary = json.loads(run.stdout)
    assert summary["status"] == "finished"
    assert (tmp_path / summary["out"] / "summary.json").is_file()


def test_an_earlier_run_can_be_repeated_from_its_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = called("simulate", "digits", *SHORT, "--seed", 7, "--out", "a")
    again = called("simulate", "a/config.toml", "--out", "b")
    assert (first.exit_code, again.exit_code) == (0, 0)
    for name in ("events.parquet", "metrics.parquet"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["simulate", "no_such_app"], "no_such_app"),
        (["simulate", "digits", "--traces", "missing.parquet"], "missing.parquet"),
        (["simulate", "digits", "--traces", "synthetic:0"], "synthetic"),
        (["simulate", "digits", "--until", "soon"], "until = 'soon'"),
        (["simulate", "digits", "-c", "num-rounds=3"], "num-server-rounds"),
        (["simulate", "digits", "-c", "= broken ="], "run-config"),
        (["simulate", "digits", "--epochs", "nothing"], "epochs"),
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


def test_a_process_of_bad_usage_says_the_same_as_a_call_and_ends_with_the_same_code(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    arguments = ("simulate", "digits", "-c", "num-rounds=3")
    process, call = fedstale(*arguments), called(*arguments)
    assert (process.returncode, process.stderr) == (call.exit_code, call.stderr)
    assert (process.stdout, call.stdout) == ("", "")


def hear_signals():
    # A background job of a shell ignores SIGINT, and so would every process below it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupted(path, number, evaluated):
    """Simulate in a folder, send a signal once a line was run, and return what stderr got.

    Args:
        path: the folder.
        number: the signal.
        evaluated: what the app does when it evaluates a version, after `mark()`.
    """
    mark = path / "first round"
    begin = "def evaluate(server_round, arrays):\n"
    called = f"{begin}    if server_round:\n        mark()\n{evaluated}"
    marks = f"def mark():\n    open({str(mark)!r}, 'w').close()\n\n\n"
    server = SERVER.replace(begin, marks + called)
    app = str(write_small_app(path / "app", server=server))
    command = [*FEDSTALE, "simulate", app, "--traces", "synthetic:50", "--out", "run"]
    command += ["-c", "rounds=100000"]
    process = subprocess.Popen(
        command,
        cwd=path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hear_signals,  # noqa: PLW1509 - nothing but a signal is set
    )
    try:
        deadline = time.monotonic() + 60
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1, error[-2000:]
    return error.decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_cleanly_and_keep_what_was_done(tmp_path, number):
    error = interrupted(tmp_path, number, "")
    assert "interrupted" in error
    assert "Traceback" not in error
    assert len(pd.read_parquet(tmp_path / "run" / "events.parquet")) > 0


SWALLOWED = """\
        import select, sys
        try:
            # Real time: `time.sleep` is virtual here.
            select.select([], [], [], 60.0)
        except:
            print("swallowed", file=sys.stderr)
"""


def test_an_app_that_swallows_ctrl_c_ends_all_the_same(tmp_path):
    error = interrupted(tmp_path, signal.SIGTERM, SWALLOWED)
    assert error.count("swallowed") == 1
    assert "interrupted" in error
    assert "Traceback" not in error


def test_a_new_app_runs_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert called("new", "my_app").exit_code == 0
    run = called("simulate", "my_app", "--traces", "synthetic:20", "--json")
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
    out = tmp_path / "devices.parquet"
    train = ("forecaster", "train", "--traces", "synthetic:20", "--kind", "ewma")
    made = [
        (("new", tmp_path / "app"), {"out": str(tmp_path / "app")}),
        (("traces", "synthesise", "--n", 3, "--days", 1, "--out", out), {"devices": 3}),
        ((*train, "--out", tmp_path / "forecaster"), {"kind": "ewma"}),
    ]
    for words, expected in made:
        result = CliRunner().invoke(cli.app, [*map(str, words), "--json"])
        assert result.exit_code == 0, result.output
        assert expected.items() <= json.loads(result.stdout).items()
