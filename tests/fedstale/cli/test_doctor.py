import getpass
import json
import socket
import sys

from typer.testing import CliRunner

from fedstale.cli.main import app
from fedstale.machine import release


def test_a_report_of_a_fault_has_versions_and_the_machine_but_not_whose_it_is():
    text = CliRunner().invoke(app, ["doctor"]).stdout
    facts = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert facts["flwr"] == release("flwr")
    assert facts["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert facts["program flwr"] == "found"
    assert f"torch: {facts['torch']}" in text.splitlines()
    for private in (socket.gethostname(), f"/{getpass.getuser()}", sys.prefix):
        assert private not in text


def test_what_is_not_installed_is_said(monkeypatch):
    monkeypatch.setattr("fedstale.cli.main._PACKAGES", ("no-such-package",))
    facts = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert facts["no-such-package"] == "not installed"
