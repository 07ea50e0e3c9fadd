"""What fedstale check finds in the apps that come with fedstale, as they run."""

import pytest
import typer
from loopback import Loopback
from small_deployment import write_app
from typer.testing import CliRunner

from fedstale.cli import apps as app_commands
from fedstale.deployment.check import check_messages
from fedstale.simulation.flower_app import FlowerApp

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


def command(*arguments):
    return CliRunner().invoke(commands, arguments)


@pytest.mark.parametrize("name", ["digits"])
def test_the_built_in_apps_read_their_share(name):
    found = check_messages(FlowerApp.find(name), "strategy='fedbuff' work=0.5 normalise='steps'")
    assert [finding.text for finding in found if "share" in finding.text] == []
