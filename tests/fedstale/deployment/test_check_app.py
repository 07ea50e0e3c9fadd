"""What fedstale check finds in an app before it goes out."""

import json
import re

import pytest
import typer
from loopback import Loopback
from places import APPS
from small_deployment import PYPROJECT, write_app
from typer.testing import CliRunner

from fedstale.app_folder import BUILT_IN
from fedstale.cli import apps as app_commands
from fedstale.deployment.check import check_app, check_superlink
from fedstale.deployment.commands import write_certificates
from fedstale.errors import ConfigError
from fedstale.flower.features import moved, resolves
from fedstale.simulation.flower_app import FlowerApp

NOBODYS = 8000
"""A port at which nothing listens."""
commands = typer.Typer()
commands.command()(app_commands.up)
commands.command()(app_commands.check)


@pytest.fixture(autouse=True)
def _alone():
    """Connect within this process, where nobody answers."""
    with Loopback().installed():
        yield


@pytest.fixture
def app(tmp_path):
    return write_app(tmp_path / "adder")


def faults(app, run_config=""):
    return [
        finding.text for finding in check_app(FlowerApp.find(app), run_config) if finding.is_fault
    ]


def notes(app):
    return [finding.text for finding in check_app(FlowerApp.find(app)) if not finding.is_fault]


def append(app, text, file="client_app.py"):
    path = app / "adder" / file
    path.write_text(path.read_text() + "\n" + text + "\n")


def test_a_sound_app_has_no_findings(app):
    assert check_app(FlowerApp.find(app), "rounds=2 strategy='fedavg'") == []


@pytest.mark.parametrize("folder", [*APPS.values(), BUILT_IN / "template" / "starter-app"])
def test_apps_of_the_project_have_no_faults(folder):
    assert faults(folder) == []


def test_a_data_file_that_the_app_names_is_a_fault_and_another_a_note(app):
    (app / "adder" / "weights.npz").write_bytes(b"x")
    (app / "notes.txt").write_text("x")
    assert faults(app) == []
    assert "adder/weights.npz, notes.txt" in notes(app)[0]
    append(app, "PATH = 'data/' + 'x' or 'adder/weights.npz'")
    assert "adder/weights.npz is not sent to devices" in faults(app)[0]


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("adder/test_data.py", "adder.test_data"),
        ("lib/tools.py", "lib.tools"),
        ("adder/secret.py", "adder.secret"),
    ],
)
def test_modules_that_the_bundle_leaves_out(app, file, named):
    (app / file).parent.mkdir(exist_ok=True)
    (app / file).write_text("X = 1")
    (app / ".gitignore").write_text("secret.py\n")
    append(app, f"import {named}")
    assert f"imports {named}, which Flower leaves out" in faults(app)[0]


@pytest.mark.parametrize("name", ["fedstale", "numpy", "json"])
def test_a_folder_that_hides_an_installed_package(app, name):
    (app / name).mkdir()
    (app / name / "__init__.py").touch()
    assert f"hides the package {name}" in faults(app)[0]


READS = "def f(context):\n    c = context.{}\n    return c['{}']"
FOUND = {
    "import no_such_package.part": "line .* not installed here and not declared: install no-such",
    "def late():\n    from flwr.common.record import RecordSet, Array": (
        r"line .* has no flwr.common.record.RecordSet \(now RecordDict of flwr.app\), "
        r"flwr.common.record.Array \(now Array of flwr.app\)$"
    ),
    "import flwr.common.record": r"has no flwr.common.record \(see flwr.app and flwr.common\)$",
    "from flwr.server import driver, Grid": r"has no flwr.server.driver \(see flwr.serverapp\)$",
    "from flwr.client.client_app import Context": r"client_app.Context \(now of flwr.app\)$",
    "from flwr.client import mod, Nothing": r"has no flwr\.client\.Nothing$",
    READS.format("run_config", "train-x"): "the run-config key 'train-x'.* expected 'train-s'",
    "def f(:": "is no Python",
}
NOTED = {
    "import sklearn": r"add 'scikit-learn' to \[project\] dependencies",
    READS.format("node_config", "room"): "--node-config 'room=...'",
}


@pytest.mark.parametrize("code", [*FOUND, *NOTED])
def test_what_a_file_of_an_app_lacks_is_found(app, code):
    append(app, code)
    found = check_app(FlowerApp.find(app))
    assert [one.is_fault for one in found if re.search({**FOUND, **NOTED}[code], one.text)] == [
        code in FOUND
    ]
    assert all("client_app.py" in one.text for one in found if one.is_fault)


@pytest.mark.parametrize(
    ("stage", "answer"),
    [
        ("Compression('int8')", "CompressionMod()"),
        ("ForecastRequest()", "ForecastMod().client_app()"),
        ("LocalWork(0.5)", "fedstale.client.local_steps"),
        ("Relay('ring', 5)", "ScreenMod(...)"),
    ],
)
def test_a_stage_that_nothing_in_the_app_answers_is_noted(app, stage, answer):
    append(app, f'# {answer}\nTEXT = "FedBuff(20, 5, stages=[{stage}])"', "server_app.py")
    (note,) = [text for text in notes(app) if "nothing in the app answers it" in text]
    assert f"the strategy has {stage.split('(')[0]}," in note
    assert f"add {answer} to the ClientApp" in note
    name = answer.split("(")[0].rpartition(".")[2]
    append(app, f"from fedstale.client import {name}")
    assert not [text for text in notes(app) if "nothing in the app answers it" in text]


@pytest.mark.parametrize(
    ("rule", "stated", "lacks"),
    [
        (
            "Filtered(\"regoin == 'eu'\")",
            "['region', \"gpu\"]",
            "'regoin', .* stated: gpu, region,",
        ),
        ("Filtered('region == \"eu\" and gpu')", "['region']", "'gpu', .* stated: region,"),
        ("Quota('zone', 2)", "('region',)", "'zone', .* stated: region,"),
        ("Filtered('gpu')", "None", "'gpu', .* stated: nothing,"),
        ("Filtered(\"region in ('gpu', 'b') or not True\")", "['region']", ""),
        ("Filtered('gpu')", "NAMES", ""),
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_a_property_that_no_device_states_is_a_fault(app, rule, stated, lacks, as_text):
    options = "" if stated == "None" else f"properties={stated}"
    append(app, f"MOD = lambda NAMES: ForecastMod({options})")
    strategy = f"FedBuff(20, 5, selector={rule})"
    append(app, f"TEXT = {strategy!r}" if as_text else f"S = lambda: {strategy}", "server_app.py")
    found = [text for text in faults(app) if "the strategy chooses devices by" in text]
    assert bool(found) == bool(lacks)
    assert re.search(lacks, " ".join(found))


def test_fedstale_must_be_declared(app):
    text = PYPROJECT.replace('"fedstale", ', "")
    (app / "pyproject.toml").write_text(text)
    assert "add 'fedstale' to [project] dependencies" in faults(app)[0]


def test_an_import_that_may_fail_does_not_count(app):
    append(app, "try:\n    import no_such_package\nexcept ImportError:\n    pass")
    append(app, "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import no_such_stub")
    assert check_app(FlowerApp.find(app)) == []


def test_an_override_that_the_app_does_not_know(app):
    assert "'round' is unknown: expected 'rounds'" in faults(app, "round=2")[0]
    assert "run-config = 'rounds'" in faults(app, "rounds")[0]


def test_a_bundle_that_is_too_big_or_too_deep(app):
    deep = app.joinpath("adder", *"abcdefghij")
    deep.mkdir(parents=True)
    (deep / "x.py").touch()
    assert "cannot make a bundle" in faults(app)[0]


def links(tmp_path, monkeypatch, text):
    (tmp_path / "config.toml").write_text(text)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))


def test_superlinks_of_flowers_configuration(tmp_path, monkeypatch):
    text = f'[superlink]\ndefault = "a"\n[superlink.a]\naddress = "127.0.0.1:{NOBODYS}"\n'
    text += 'insecure = true\n[superlink.local]\naddress = ":local:"\n'
    text += '[superlink.b]\naddress = "127.0.0.1"\n'
    links(tmp_path, monkeypatch, text)
    assert check_superlink("local") == []
    (finding,) = check_superlink("a")
    assert finding.is_fault
    assert "nothing listens" in finding.text
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        check_superlink("b")
    with pytest.raises(ConfigError, match=r"'c' is not in .*expected one of \['a', 'b', 'local'\]"):
        check_superlink("c")


def test_without_flowers_configuration_or_with_a_broken_one(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="it names none"):
        check_superlink("a")
    links(tmp_path, monkeypatch, "= =")
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        check_superlink("a")


def command(*arguments):
    return CliRunner().invoke(commands, arguments)


def test_the_command_lists_faults_and_says_so_by_its_exit_code(app):
    run = command("check", str(app))
    assert (run.exit_code, run.stderr) == (0, "")
    assert "no fault found" in run.stdout
    run = command("check", str(app), "--run-config", "x=1", "--json")
    assert run.exit_code == 1
    assert json.loads(run.stdout)[0]["fault"] is True


def test_up_starts_nothing_for_an_app_with_faults(app, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = command("up", str(app), "--run-config", "x=1")
    assert run.exit_code == 2
    assert "'x' is unknown" in run.stderr
    assert not (tmp_path / "runs").exists()


def test_check_wants_an_app_or_a_server(tmp_path):
    run = command("check")
    assert run.exit_code == 2
    assert "expected an app, or --server" in run.stderr
    (tmp_path / "ca.crt").write_text("no certificate")
    server = ["--server", f"127.0.0.1:{NOBODYS}", "--ca"]
    run = command("check", *server, str(tmp_path / "ca.crt"))
    assert run.exit_code == 2
    assert "no PEM certificate" in run.stderr
    tls = write_certificates(tmp_path, ["localhost"])
    run = command("check", *server, str(tls.ca))
    assert run.exit_code == 1
    assert "nothing listens" in run.stdout


def test_up_does_not_touch_a_folder_that_holds_something_else(app, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.txt").touch()
    run = command("up", str(app), "--out", "own", "--overwrite")
    assert run.exit_code == 2
    assert "is not empty" in run.stderr
    assert (tmp_path / "own" / "thesis.txt").exists()


def test_every_dropped_name_is_gone_and_is_there_where_the_table_says():
    moves = [
        (f"{module}:{old}", f"{door}:{new or old}")
        for module, doors in moved().items()
        for door, entries in doors.items()
        for old, _, new in (entry.partition(">") for entry in entries.split())
    ]
    assert [old for old, _ in moves if resolves(old)] == []
    assert [new for _, new in moves if not resolves(new)] == []
