"""What the proxy's configuration lets through, read as text, and what `deploy init` writes."""

import dataclasses
import os
import re
import socket
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from typer.testing import CliRunner

from fedstale.cli.main import app
from fedstale.deployment.commands import Address
from fedstale.deployment.doors import Doors, nginx, role_of
from fedstale.deployment.local import LocalDeployment
from fedstale.deployment.superlink import _listening
from fedstale.errors import ConfigError

DOORS = Doors(
    devices=Address("0.0.0.0", 8000),
    operators=Address("0.0.0.0", 8001),
    runtime=Address("127.0.0.1", 8002),
    superlink=Path("/run/flower-superlink/superlink.sock"),
)


def servers(text):
    """Return the paths that each listener lets through, with what stands in their block."""
    found = {}
    for block in re.split(r"\n  server \{\n", text)[1:]:
        (listener,) = re.findall(r"listen (\S+) ssl;", block)
        found[listener] = dict(re.findall(r"location = (\S+) \{ (.*) \}", block))
        assert "location / { return 404; }" in block
        assert block.count("proxy_pass") == len(found[listener])
    return found


def test_each_door_lets_its_own_part_of_flower_through():
    found = servers(nginx(DOORS))
    parts = {at: {path.split("/")[2] for path in paths} for at, paths in found.items()}
    assert parts == {
        "0.0.0.0:8000": {"fleet"},
        "0.0.0.0:8001": {"control"},
        "127.0.0.1:8002": {"runtime"},
    }
    flowers = {path for _, path in PROTOBUF_REQUEST_TYPES}
    closed = flowers - {path for paths in found.values() for path in paths}
    assert closed == {"/v1/fleet/register-node", "/v1/fleet/unregister-node"}
    assert {len(paths) for paths in found.values()} == {10, 41, 21}


# By hand, from what each does in Flower 1.41, where any of them is an operator's.
LOOKING = [
    "get-auth-tokens",
    "get-login-details",
    "get-run-series",
    "list-app-associations",
    "list-apps",
    "list-automations",
    "list-connectors",
    "list-federations",
    "list-invitations",
    "list-nodes",
    "list-run-series",
    "list-run-series-events",
    "list-runs",
    "pull-artifacts",
    "refresh-auth-tokens",
    "show-federation",
    "stream-logs",
    "stream-run-events",
]


def test_who_may_only_look_changes_nothing():
    control = servers(nginx(DOORS))["0.0.0.0:8001"]
    free = {path.rpartition("/")[2] for path, does in control.items() if "403" not in does}
    assert free == set(LOOKING)
    assert "$may_register = 0" in control["/v1/control/unregister-node"]
    assert "$may_run = 0" in control["/v1/control/start-run"]
    assert role_of("/v1/control/what-comes-with-a-later-flower") == "run"


# As nginx writes names: the last part first, each special character with a backslash.
NAMES = {
    "OU=run,CN=alice": {"run"},
    "CN=alice,OU=run": {"run"},
    "CN=alice,OU=register,OU=run,O=Acme": {"run", "register"},
    r"CN=b\,ob,OU=run": {"run"},
    r"CN=bob\\,OU=run": {"run"},
    r"CN=\C3\A9ve,OU=register": {"register"},
    "CN=bob": set(),
    "": set(),
    r"CN=bob\,OU=run": set(),
    r"CN=bob\,OU=run\,OU=register": set(),
    r"CN=\,OU=run\,,O=Acme": set(),
    r"CN=bob\\\,OU=run": set(),
    r"CN=bob\\\\\,OU=run,O=Acme": set(),
    r"CN=bob\+OU=run": set(),
    r"CN=bob\2COU=run": set(),
    r"CN=bob\0A\,OU=run": set(),
    r"CN=\"bob\,OU=run\"": set(),
    r"CN=\C3\A9\,OU=run": set(),
    r"OU=run\,register,CN=bob": set(),
    r"OU=\ run,CN=bob": set(),
    "OU=runs,CN=bob": set(),
    "OU=Run,CN=bob": set(),
    "OU=run+CN=bob": set(),
    "CN=bob+OU=run": set(),
    "xOU=run,CN=bob": set(),
    "OU=#72756E,CN=bob": set(),
    "CN=" + "\\," * 20_000 + "OU=run": set(),
}


@pytest.mark.parametrize(("name", "roles"), NAMES.items(), ids=range(len(NAMES)))
def test_a_role_is_a_unit_of_its_own_in_the_name_of_a_certificate(name, roles):
    # Nothing here is written otherwise in nginx's patterns than in Python's.
    written = dict(
        re.findall(r'map \$ssl_client_s_dn \$may_(\w+) \{ default 0; "~(.*)" 1; \}', nginx(DOORS))
    )
    assert written.keys() == {"run", "register"}
    assert {role for role, pattern in written.items() if re.search(pattern, name)} == roles


@pytest.mark.parametrize("name", ["x" * 120, 'a";return 200;"', "a:b", "a b;"])
def test_a_socket_that_nginx_cannot_name(name):
    doors = dataclasses.replace(DOORS, superlink=Path("/run") / name)
    with pytest.raises(ConfigError, match="at most 107 bytes"):
        nginx(doors)


def init(folder, *more):
    words = ["deploy", "init", str(folder), "--host", "fl.example.org"]
    return CliRunner().invoke(app, [*words, "--operator", "alice=run,register", *more])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Return the folder of a server for two operators, as `deploy init` writes it."""
    folder = tmp_path_factory.mktemp("deploy") / "server"
    result = init(folder, "--operator", "bob")
    assert result.exit_code == 0, result.output
    return folder


def test_certificates_say_who_may_do_what(server):
    authority = x509.load_pem_x509_certificate((server / "device" / "ca.crt").read_bytes())
    roles = {}
    for name in ("alice", "bob"):
        shown = x509.load_pem_x509_certificate(
            (server / "operators" / name / "operator.pem").read_bytes()
        )
        shown.verify_directly_issued_by(authority)
        (usage,) = shown.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert usage == ExtendedKeyUsageOID.CLIENT_AUTH
        roles[name] = shown.subject.rfc4514_string()
    assert roles == {"alice": "OU=register,OU=run,CN=alice", "bob": "CN=bob"}
    # The server's own certificate opens no door.
    own = x509.load_pem_x509_certificate((server / "server" / "server.pem").read_bytes())
    (usage,) = own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert usage == ExtendedKeyUsageOID.SERVER_AUTH
    names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_init_once_more_changes_nothing_and_no_other_options_do(server, tmp_path):
    before = files(server)
    again = init(server, "--operator", "bob")
    assert (again.exit_code, files(server)) == (0, before)
    other = init(server)
    assert (other.exit_code, files(server)) == (2, before)
    assert "was made with other options" in other.stderr
    (tmp_path / "mine").touch()
    assert "expected a new or an empty one" in init(tmp_path).stderr


def test_what_init_writes_names_the_server_s_addresses(tmp_path):
    made = ("--devices", "0.0.0.0:1", "--operators", "0.0.0.0:2", "--runtime", "127.0.0.1:3")
    assert init(tmp_path / "new", *made).exit_code == 0
    found = {
        (path.relative_to(tmp_path / "new").parts[0], *address)
        for path, content in files(tmp_path / "new").items()
        if path.suffix in {".sh", ".service"}
        for address in re.findall(r"(fl\.example\.org|localhost):(\d)\b", content.decode())
    }
    assert found == {
        ("device", "fl.example.org", "1"),
        ("operators", "fl.example.org", "2"),
        ("server", "localhost", "3"),
    }
    # A socket of containers, which no unit has.
    result = init(tmp_path / "in containers", "--socket", "/door/link/superlink.sock")
    assert "compose.yaml" in result.output
    assert not [*(tmp_path / "in containers" / "server").glob("*.service")]
    assert (tmp_path / "in containers" / "server" / "nginx.conf").is_file()


@pytest.mark.parametrize(
    ("operator", "said"),
    [
        ("eve=rule", "role 'rule' is unknown"),
        ("eve,OU=run", "expected letters, digits"),
        ("../eve", "expected letters, digits"),
        ("server", "and not server"),
    ],
)
def test_an_operator_who_cannot_be(operator, said, tmp_path):
    result = init(tmp_path / "server", "--operator", operator)
    assert result.exit_code == 2
    assert said in result.stderr
    # Nothing is in the way of another try.
    assert init(tmp_path / "server").exit_code == 0


@pytest.fixture
def _unheard(monkeypatch):
    """Let sockets have their place, at which nothing listens."""
    monkeypatch.setattr(socket.socket, "listen", lambda *backlog: None)


@pytest.mark.usefixtures("_unheard")
def test_a_socket_is_closed_to_others(tmp_path):
    with _listening(tmp_path / "new" / "link.sock") as made:
        assert made.family == socket.AF_UNIX
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "new" / "link.sock").stat().st_mode) == 0o660
    with _listening(tmp_path / "new" / "link.sock"):
        pass
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="others may enter its folder"):
        _listening(tmp_path / "open" / "link.sock")


@pytest.mark.usefixtures("_unheard")
def test_up_finds_a_place_for_its_socket_in_a_deep_folder(tmp_path):
    deep = LocalDeployment(tmp_path / ("x" * 90), nodes=1, has_proxy=True)
    where = deep.doors.superlink
    assert len(str(where)) <= 107 < len(str(deep.folder / "proxy" / where.name))
    assert stat.S_IMODE(where.parent.stat().st_mode) == 0o700
    with _listening(where):
        assert where.exists()
    deep.__exit__()
    assert not where.parent.exists()
    flat = LocalDeployment(tmp_path / "flat", nodes=1, has_proxy=True)
    assert flat.doors.superlink.parent == flat.folder / "proxy"


def test_server_apps_as_another_user_need_root_and_a_user(monkeypatch):
    words = ["deploy", "superexec", "--insecure", "--user"]
    result = CliRunner().invoke(app, [*words, "no-such-user"])
    assert "no such user" in result.stderr
    assert "expected another one than root" in CliRunner().invoke(app, [*words, "root"]).stderr
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "only root can" in CliRunner().invoke(app, [*words, "daemon"]).stderr
