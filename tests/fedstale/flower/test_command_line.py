"""What Flower's commands do, in our process, against Flower's own parts."""

import logging
import ssl
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.cli import utils
from flwr.common.config import get_metadata_from_config
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, Status, SubStatus
from flwr.supercore.cli import flower_superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.logger import console_handler
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.utils import get_flwr_home
from flwr.supernode.fleet_http_client import FleetHttpClient
from hostile import Device
from loopback import Loopback
from superlink_app import SuperLink
from typer.testing import CliRunner

from fedstale.cli import deploy, main
from fedstale.cli.output import app_log
from fedstale.deployment import doors
from fedstale.deployment.commands import Address
from fedstale.deployment.control import Control
from fedstale.errors import ConfigError, FedstaleError
from fedstale.flower import command_line, supernode
from fedstale.simulation.flower_app import FlowerApp


@pytest.fixture(scope="module")
def link():
    return SuperLink(lambda app: app)


@pytest.fixture
def served(link):
    """Serve a SuperLink; return its URL."""
    with Loopback().installed() as here, here.asgi(link.app) as (_, port):
        yield f"http://127.0.0.1:{port}"


def test_control_registers_and_lists_nodes_and_lists_runs(link, served):
    device = Device()
    with closing(command_line.ControlClient(served, ssl.create_default_context())) as client:
        node_id = client.register_node(device.public)
        (node,) = [one for one in client.list_nodes() if one.public_key == device.public]
        assert (node.node_id, node.status) == (node_id, "registered")
        runs = client.runs()
    assert list(runs) == [link.run_id]
    assert (runs[link.run_id].fab_id, runs[link.run_id].status.status) == ("", "running")


def test_a_run_that_a_superlink_has_lost_is_a_sentence(link, served, monkeypatch):
    at, client = served.partition("://")[2], command_line.ControlClient
    # The loopback speaks no TLS.
    monkeypatch.setattr(command_line, "ControlClient", lambda url, context: client(served, context))
    monkeypatch.setattr(ssl, "create_default_context", lambda **_: None)
    with closing(Control(Address.parse(at), Path("ca.crt"))) as control:
        assert control.ended(link.run_id, limit_s=1e-9)[0] == "unknown"
        with pytest.raises(FedstaleError, match=r"run 7 is not in the database .* checkpoints"):
            control.ended(7, limit_s=30.0)


def test_a_key_of_nobody_is_refused_and_that_of_a_node_is_not(served, monkeypatch, tmp_path):
    (ca := tmp_path / "ca.crt").write_bytes(b"")
    flowers = FleetHttpClient.from_server_address
    # The loopback speaks no TLS.
    monkeypatch.setattr(
        FleetHttpClient,
        "from_server_address",
        lambda at, insecure, root_certificates, interceptors: flowers(
            at, insecure=True, root_certificates=None, interceptors=interceptors
        ),
    )
    at, device = served.partition("://")[2], Device()
    with pytest.raises(httpx.HTTPStatusError, match="412 Precondition"):
        command_line.activate(at, ca, device.key)
    with closing(command_line.ControlClient(served, ssl.create_default_context())) as client:
        node_id = client.register_node(device.public)
        command_line.activate(at, ca, device.key)
        assert {one.node_id: one.status for one in client.list_nodes()}[node_id] == "online"


def test_the_flwr_command_verifies_as_it_is_told(monkeypatch):
    monkeypatch.setattr(utils, "ControlHttpClient", utils.ControlHttpClient)
    asked, context = [], ssl.create_default_context()
    command_line.verify_with(lambda *about: asked.append(about) or context)
    # As flwr makes its client.
    made = utils.ControlHttpClient.from_server_address("a.org:1", False, None, [])
    made.close()
    assert asked == [("a.org:1", True)]
    assert isinstance(made, ControlHttpClient)
    assert "ControlHttpClient" in utils.init_http_client_from_connection.__code__.co_names


def test_constants_are_flowers(monkeypatch, tmp_path):
    assert command_line.HEARTBEAT_S == HEARTBEAT_DEFAULT_INTERVAL
    assert command_line.PROTOBUF == PROTOBUF_MEDIA_TYPE
    assert supernode.CLIENT_APP == TaskType.CLIENT_APP
    ends = Status.FINISHED, SubStatus.COMPLETED, SubStatus.STOPPED
    assert ends == ("finished", "completed", "stopped")
    for home in ("", str(tmp_path)):
        monkeypatch.setenv("FLWR_HOME", home)
        assert command_line.flower_home() == get_flwr_home()


@pytest.mark.parametrize("curve", [ec.SECP256R1, ec.SECP384R1, ec.SECP521R1, ec.SECP256K1])
def test_keys_are_taken_and_written_as_flower_does(curve):
    key = ec.generate_private_key(curve()).public_key()
    assert command_line.public_pem(key) == public_key_to_bytes(key)


def test_a_run_that_goes_on_is_found_by_its_app_and_its_settings():
    directory = FlowerApp.find("digits").directory
    fab_id = get_metadata_from_config(command_line.project_config(directory))[0]

    def run(status, **changes):
        about = {"fab_id": fab_id, "override_config": {"a": 1}, **changes}
        return SimpleNamespace(status=SimpleNamespace(status=status), **about)

    runs = {
        1: run("finished"),
        2: run("running", fab_id="other/app"),
        3: run("running", override_config={"a": 2}),
    }
    control = object.__new__(Control)
    control._client = SimpleNamespace(runs=lambda: runs)
    assert control.unfinished(directory, "a=1") is None
    runs[4] = run("running")
    assert control.unfinished(directory, "a=1") == 4


def test_flower_superexec_is_another_user_before_it_runs(monkeypatch):
    done = []
    monkeypatch.setitem(
        flower_superexec.__globals__, "run_superexec", lambda **options: done.append(options)
    )
    for name in ("warn_if_flwr_update_available", "event", "disable_process_dumping"):
        monkeypatch.setitem(flower_superexec.__globals__, name, lambda *given, **named: None)
    monkeypatch.setattr(
        sys, "argv", ["flower-superexec", "--insecure", "--runtime-api-address", "a:1"]
    )
    supernode.run_program_superexec(lambda: done.append("ready"))
    assert done[0] == "ready"
    assert done[1]["insecure"] is True


def test_flower_superexec_that_would_not_become_another_user_does_not_run(monkeypatch):
    monkeypatch.setattr(supernode, "program", lambda name: lambda: print("runs as root"))
    with pytest.raises(ConfigError, match="expected one that runs run_superexec"):
        supernode.run_program_superexec(print)


def test_flowers_log_is_shown_by_its_own_handler_or_one_like_any(monkeypatch):
    assert command_line.console() is console_handler
    monkeypatch.setattr(logging.getLogger("flwr"), "handlers", [])
    with app_log():
        logging.getLogger("fedstale").warning("still said")


def test_a_program_that_is_not_installed_is_named():
    with pytest.raises(ConfigError, match=r"^flower-oven: not installed for "):
        command_line.program("flower-oven")


def test_without_a_name_a_command_says_which_and_ends(without, tmp_path):
    without(
        "flwr.common.config:flatten_dict",
        "flwr.cli.build:build_fab_from_disk",
        "flwr.common.serde:run_from_proto",
    )
    with pytest.raises(ConfigError, match=r"^apps: Flower .* has no flwr.common.config:flatten"):
        FlowerApp.find("digits")
    with pytest.raises(ConfigError, match=r"^app bundles: "):
        command_line.bundle(tmp_path)
    with pytest.raises(ConfigError, match=r"^Control: "):
        command_line.ControlClient("https://a.org", ssl.create_default_context())


def test_server_apps_get_no_other_user_without_the_name_for_it(without, monkeypatch):
    without("flwr.supercore.cli.flower_superexec:run_superexec")
    monkeypatch.setattr(deploy, "account_of", lambda user: user)
    result = CliRunner().invoke(deploy.app, ["superexec", "--user", "somebody", "--insecure"])
    assert result.exit_code == 2
    assert "ServerApps of another user: Flower" in result.stderr


def test_flwr_runs_without_a_certificate_where_none_can_be_shown(without, monkeypatch):
    without("flwr.cli.utils:ControlHttpClient")
    ran, client = [], utils.ControlHttpClient
    monkeypatch.setattr(command_line, "program", lambda name: lambda: ran.append(sys.argv))
    monkeypatch.setattr(sys, "argv", [])
    assert CliRunner().invoke(main.app, ["flwr", "list"]).exit_code == 0
    assert ran == [["flwr", "list"]]
    assert utils.ControlHttpClient is client


def test_a_strangers_key_that_cannot_be_tried_is_no_fault(without, tmp_path):
    without("flwr.supernode.fleet_http_client:FleetHttpClient")
    found = doors._unknown_key(Address("127.0.0.1", 1), tmp_path)
    assert not found.is_fault
    assert "not tried" in found.text
