"""nginx with the configuration that fedstale writes, in front of something that is no SuperLink.

What stands behind notes each request as it comes, so the tests see what passes and how it is
written, and how much.
"""

import datetime
import os
import socketserver
import ssl
import threading
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPSConnection
from http.server import BaseHTTPRequestHandler

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.name import _ASN1Type
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from small_deployment import wait_for

from fedstale.deployment import commands
from fedstale.deployment.commands import ROLES, Address, write_certificates
from fedstale.deployment.doors import (
    FLEET_PATHS,
    Doors,
    nginx,
    other_paths,
    spellings,
)
from fedstale.deployment.local import free_port, has_nginx
from fedstale.deployment.processes import ProcessGroup

pytestmark = pytest.mark.skipif(
    not has_nginx(), reason="nginx is not installed: apt-get install nginx"
)

PULL = "/v1/fleet/pull-messages"


class Behind(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """What nginx passes requests on to; it answers when it is let go on."""

    daemon_threads = True

    def __init__(self, path):
        super().__init__(str(path), Note)
        self.came, self.go_on = [], threading.Event()
        self.go_on.set()

    def get_request(self):
        # The handler wants an address, which a Unix socket does not have.
        return super().get_request()[0], ("nginx", 0)


class Note(BaseHTTPRequestHandler):
    def do_POST(self):
        n_bytes = len(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        self.server.came.append((self.path, n_bytes, dict(self.headers)))
        self.server.go_on.wait(30)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass


class Site:
    def __init__(self, folder, behind, doors):
        self.folder, self.behind, self.doors = folder, behind, doors

    def ask(self, at, path, body=b"", certificate=None, headers=None):
        context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        if certificate:
            context.load_cert_chain(self.folder / f"{certificate}.pem")
        with closing(HTTPSConnection(at.host, at.port, context=context, timeout=30)) as connection:
            connection.request("POST", path, body, headers or {})
            return connection.getresponse().status


@contextmanager
def site(folder, **limits):
    operators = {"all": ROLES, "run": ["run"], "register": ["register"], "look": []}
    write_certificates(folder, ["localhost", "127.0.0.1"], operators=operators, keep_authority=True)
    (folder / "state").mkdir(mode=0o700)
    at = [Address("127.0.0.1", free_port()) for _ in range(3)]
    doors = Doors(
        devices=at[0], operators=at[1], runtime=at[2], superlink=folder / "s.sock", **limits
    )
    user = "root" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(nginx(doors, user=user))
    environment = commands.environment(folder)
    found = commands.found(commands.proxy(folder / "nginx.conf", folder / "state"), environment)
    with ExitStack() as stack:
        behind = stack.enter_context(Behind(doors.superlink))
        stack.callback(behind.shutdown)
        threading.Thread(target=behind.serve_forever, daemon=True).start()
        processes = stack.enter_context(ProcessGroup())
        processes.start("nginx", found, environment=environment, log=folder / "log")
        made = Site(folder, behind, doors)
        wait_for(lambda: answers(made))
        behind.came.clear()
        yield made


def answers(made):
    try:
        return made.ask(made.doors.runtime, other_paths("runtime")[0]) == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def open_site(tmp_path_factory):
    with site(tmp_path_factory.mktemp("site"), requests_per_s=1000) as made:
        yield made


def test_each_path_passes_at_its_own_door_as_it_is_written(open_site):
    doors, behind = open_site.doors, open_site.behind
    for at, paths in (
        (doors.devices, FLEET_PATHS),
        (doors.operators, other_paths("control")),
        (doors.runtime, other_paths("runtime")),
    ):
        behind.came.clear()
        for path in (
            *FLEET_PATHS,
            *other_paths("control"),
            *other_paths("runtime"),
            "/health",
            "/v1/fleet",
        ):
            passed = open_site.ask(at, path, certificate="all")
            assert passed == (200 if path in paths else 404), path
        assert [path for path, *_ in behind.came] == list(paths)


@pytest.mark.parametrize(
    "path", [FLEET_PATHS[0], other_paths("control")[0], other_paths("runtime")[0]]
)
def test_no_other_spelling_passes_anywhere(open_site, path):
    doors, behind = open_site.doors, open_site.behind
    behind.came.clear()
    parts = {doors.devices: FLEET_PATHS, doors.operators: other_paths("control")}
    for at, paths in {**parts, doors.runtime: other_paths("runtime")}.items():
        for spelt in spellings(path):
            # A whole URL is the path itself, at the path's own door.
            is_own = spelt.startswith("https://") and path in paths
            accepted = {200} if is_own else {400, 404}
            assert open_site.ask(at, spelt, certificate="all") in accepted, spelt
    assert [came for came, *_ in behind.came] == [path]


def test_operators_do_what_their_roles_allow(open_site):
    at = open_site.doors.operators
    calls = ("list-nodes", "start-run", "register-node")
    allowed = {
        "all": (200, 200, 200),
        "run": (200, 200, 403),
        "register": (200, 403, 200),
        "look": (200, 403, 403),
        None: (404, 404, 404),
    }
    for name, statuses in allowed.items():
        for call, status in zip(calls, statuses, strict=True):
            assert open_site.ask(at, f"/v1/control/{call}", certificate=name) == status


CHOSEN = {
    "a comma": ([(NameOID.COMMON_NAME, "bob,OU=run")], False),
    "two": ([(NameOID.COMMON_NAME, "bob,OU=run,OU=register")], False),
    "a comma first": ([(NameOID.COMMON_NAME, ",OU=run,")], False),
    "backslashes": ([(NameOID.COMMON_NAME, "bob\\,OU=run")], False),
    "quotes": ([(NameOID.COMMON_NAME, '"bob",OU=run')], False),
    "a plus": ([(NameOID.COMMON_NAME, "bob+OU=run")], False),
    "a line": ([(NameOID.COMMON_NAME, "bob\n,OU=run\n")], False),
    "hexadecimal": ([(NameOID.COMMON_NAME, "bob\\2COU=run")], False),
    "other letters": ([(NameOID.COMMON_NAME, "b\u00f6b\u202e,OU=run")], False),
    "wide letters": ([(NameOID.COMMON_NAME, "bob,OU=run", _ASN1Type.BMPString)], False),
    "an organisation": (
        [(NameOID.ORGANIZATION_NAME, "Acme,OU=run"), (NameOID.COMMON_NAME, "b")],
        False,
    ),
    "a longer unit": ([(NameOID.ORGANIZATIONAL_UNIT_NAME, "run,x")], False),
    "a serial number": ([(NameOID.SERIAL_NUMBER, "1,OU=run")], False),
    "a mail address": ([(NameOID.EMAIL_ADDRESS, "a@b,OU=run")], False),
    "behind a backslash": (
        [(NameOID.ORGANIZATIONAL_UNIT_NAME, "run"), (NameOID.COMMON_NAME, "bob\\")],
        True,
    ),
    "behind a comma": (
        [(NameOID.ORGANIZATIONAL_UNIT_NAME, "run"), (NameOID.COMMON_NAME, "bob,x")],
        True,
    ),
}


def issue(folder, who, names, *, foreign=False):
    """Write a certificate of the deployment's authority, or of another one, with any name."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    signer = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    builder = x509.CertificateBuilder(
        authority.subject,
        x509.Name([x509.NameAttribute(*name) for name in names]),
        key.public_key(),
        x509.random_serial_number(),
        now - datetime.timedelta(hours=1),
        now + datetime.timedelta(days=1),
    ).add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
    made = builder.sign(ec.generate_private_key(ec.SECP256R1()) if foreign else signer, SHA256())
    own = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / f"{who}.pem").write_bytes(made.public_bytes(Encoding.PEM) + own)


@pytest.mark.parametrize("who", CHOSEN)
def test_a_role_is_in_a_unit_alone_whatever_a_name_says(open_site, who):
    names, may_run = CHOSEN[who]
    issue(open_site.folder, who, names)
    at = open_site.doors.operators
    assert open_site.ask(at, "/v1/control/list-nodes", certificate=who) == 200
    found = open_site.ask(at, "/v1/control/start-run", certificate=who)
    assert found == (200 if may_run else 403)
    assert open_site.ask(at, "/v1/control/register-node", certificate=who) == 403


def test_roles_of_another_authority_are_none(open_site):
    units = [(NameOID.ORGANIZATIONAL_UNIT_NAME, role) for role in ROLES]
    issue(open_site.folder, "other", [*units, (NameOID.COMMON_NAME, "eve")], foreign=True)
    for call in ("list-nodes", "start-run", "register-node"):
        at = open_site.doors.operators
        assert open_site.ask(at, f"/v1/control/{call}", certificate="other") == 404


def test_bodies_pass_up_to_their_limits_and_whole(open_site):
    at, behind = open_site.doors.devices, open_site.behind
    behind.came.clear()
    five = bytes(5 << 20)
    assert open_site.ask(at, "/v1/fleet/push-object", five) == 200
    assert [n_bytes for _, n_bytes, _ in behind.came] == [len(five)]
    for path, body in (
        ("/v1/fleet/push-object", bytes(9 << 20)),
        ("/v1/fleet/push-messages", five),
        (PULL, bytes(1 << 17)),
    ):
        # nginx may close before all is sent.
        with suppress(OSError):
            assert open_site.ask(at, path, body) == 413
    assert len(behind.came) == 1


def test_more_requests_than_the_rate_are_put_off(tmp_path):
    with site(tmp_path, requests_per_s=1) as made:
        found = [made.ask(made.doors.devices, PULL) for _ in range(14)]
        assert found[:9] == [200] * 9
        assert set(found[9:]) <= {200, 503}
        assert found.count(503) >= 3
        # The other doors have no such limit.
        assert {made.ask(made.doors.runtime, other_paths("runtime")[0]) for _ in range(14)} == {200}


def test_more_connections_than_the_limit_are_put_off_and_a_server_that_is_gone_too(tmp_path):
    with site(tmp_path, connections=2) as made:
        made.behind.go_on.clear()
        threads = [
            threading.Thread(target=made.ask, args=(made.doors.devices, PULL)) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(made.behind.came) == 2)
        assert made.ask(made.doors.devices, PULL) == 503
        made.behind.go_on.set()
        for thread in threads:
            thread.join()
        assert made.ask(made.doors.devices, PULL) == 200
        made.doors.superlink.unlink()
        assert made.ask(made.doors.devices, PULL) == 503


def test_headers_arrive_and_are_logged_nowhere(open_site):
    behind = open_site.behind
    behind.came.clear()
    headers = {"flwr-signature": "S3cret", "flwr-timestamp": "now", "flwr-public-key": "K3y"}
    assert open_site.ask(open_site.doors.devices, PULL, headers=headers) == 200
    ((_, _, came),) = behind.came
    assert headers.items() <= came.items()
    logs = [open_site.folder / "log", *(open_site.folder / "state").glob("*.log")]
    text = "".join(log.read_text() for log in logs)
    assert PULL in text
    assert "S3cret" not in text
    assert "K3y" not in text
