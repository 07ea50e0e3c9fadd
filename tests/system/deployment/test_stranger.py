"""A stranger, a thief of ca.crt and an owner of a registered key attack a server while it works.

What is attacked is the deployment that `fedstale up` makes, and the one that `fedstale deploy init`
makes, with the commands of its units. Every attack is refused, and the run that goes on meanwhile
loses nothing.
"""

import grp
import os
import pwd
import re
import shutil
import socket
import socketserver
import ssl
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, closing, suppress
from http.client import HTTPException, HTTPSConnection
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from hostile import SUPERLINK, Device, message, somewhere
from places import ROOT
from shown_commands import program, shown
from small_deployment import CLIENT, PYPROJECT, SERVER, Running, means, wait_for, write_app
from typer.testing import CliRunner

from fedstale.cli.main import app as fedstale
from fedstale.deployment import commands
from fedstale.deployment.commands import Address, write_certificates, write_node_key
from fedstale.deployment.control import Control
from fedstale.deployment.diagnosis import is_healthy
from fedstale.deployment.doors import (
    FLEET_PATHS,
    other_paths,
    probe,
    spellings,
)
from fedstale.deployment.local import free_port, has_nginx
from fedstale.deployment.processes import ProcessGroup

pytestmark = [
    pytest.mark.deployment,
    pytest.mark.skipif(not has_nginx(), reason="nginx is not installed: apt-get install nginx"),
]

LIST, START = "/v1/control/list-nodes", "/v1/control/start-run"
PUSH, PULL = "/v1/fleet/push-messages", "/v1/fleet/pull-messages"
TYPE, JSON = {"Content-Type": PROTOBUF_MEDIA_TYPE}, {"Content-Type": "application/json"}


class Caller:
    """Who speaks to an address as it likes; a status of 0 is a connection that was not made."""

    def __init__(self, at, ca, certificate=None):
        self.at, self.context = at, ssl.create_default_context(cafile=str(ca))
        if certificate:
            self.context.load_cert_chain(certificate)

    def __call__(self, path, body=b"", headers=None, method="POST", **options):
        if hasattr(body, "SerializeToString"):
            body = body.SerializeToString()
        try:
            with closing(
                HTTPSConnection(self.at.host, self.at.port, context=self.context, timeout=30)
            ) as connection:
                connection.request(method, path, body, headers or TYPE, **options)
                return connection.getresponse().status
        except (OSError, HTTPException):
            return 0


def stranger(caller):
    """Yield what someone without a key tries, and what comes of it."""
    bodies = {
        LIST: ListNodesRequest(),
        START: StartRunRequest(fab=Fab(content=b"x")),
        "/v1/control/register-node": RegisterNodeRequest(public_key=Device().public),
        "/v1/runtime/acquire-task": AcquireTaskRequest(supported_task_types=["flwr-serverapp"]),
    }
    for path in (*other_paths("control"), *other_paths("runtime"), *other_paths("fleet")):
        yield path, caller(path, bodies.get(path, b"")), {404}
    for path in ("/", "/health", "/docs", "/openapi.json", "/v1/responses", "/nginx_status"):
        yield path, caller(path, method="GET"), {404}
    for target, request in bodies.items():
        for path in spellings(target):
            yield path, caller(path, request), {400, 404}
    for method in ("GET", "PUT", "HEAD", "OPTIONS", "DELETE", "TRACE", "CONNECT"):
        yield method, caller(LIST, method=method), {400, 404, 405}
        yield method, caller(PULL, method=method), {400, 404, 405}
    for path in FLEET_PATHS:
        yield path, caller(path), {401}


def owner_of_any_key(caller, victim):
    """Yield what someone tries whose key nobody has registered."""
    device = Device()
    yield "join", caller("/v1/fleet/activate-node", device.joining(), device.headers()), {412}
    for node in (victim, SUPERLINK, 0):
        yield "pull", caller(PULL, device.asking(node), device.headers()), {401}
    for path in (LIST, START, "/v1/fleet/register-node"):
        yield path, caller(path, b"", device.headers()), {404}


def owner_of_registered_key(caller, device, victim, run_id):
    """Yield what the owner of a registered device tries."""

    def push(*messages):
        return caller(PUSH, device.pushing(*messages), device.headers())

    own = message(run_id, device.node_id, SUPERLINK, reply_to=somewhere())
    order = message(run_id, SUPERLINK, victim)
    yield "an order", push(order), {400}
    yield "an order beside a reply", push(own, order), {400}
    yield "a reply of another", push(message(run_id, victim, SUPERLINK, somewhere())), {400}
    yield "a letter", push(message(run_id, device.node_id, victim, somewhere())), {400}
    yield "another's work", caller(PULL, device.asking(victim), device.headers()), {401}
    headers = device.headers()
    yield "its own work", caller(PULL, device.asking(), headers), {200}
    yield "the same again", caller(PULL, device.asking(), headers), {503}
    yield "a replay with another body", caller(PUSH, device.pushing(own), headers), {503}
    big = PushObjectRequest(run_id=run_id, object_content=bytes(9 << 20))
    yield "a large object", caller("/v1/fleet/push-object", big, device.headers()), {413, 0}
    yield "a large message", caller(PUSH, bytes(5 << 20), device.headers()), {413, 0}
    chunks = iter([bytes(1 << 20)] * 9)
    yield "in chunks", caller(PUSH, chunks, device.headers(), encode_chunked=True), {413, 0}
    for path in (LIST, START, "/v1/runtime/get-nodes", "/v1/fleet/unregister-node"):
        yield path, caller(path, b"", device.headers()), {404}


def attack(server, folder):
    """Attack a server, with the run of another going on; return what was not refused."""
    devices = Caller(server.devices, server.ca)
    public = write_node_key(folder / "bought")
    victim = next(iter(server.control.nodes()))
    ((run_id, _),) = [one for one in server.control.runs().items() if one[1][0] == "running"]
    bought = load_ssh_private_key((folder / "bought").read_bytes(), None)
    device = Device(bought, server.control.register(public))
    before = set(server.control.nodes()), set(server.control.runs())
    tried = [
        *stranger(devices),
        *owner_of_any_key(devices, victim),
        *owner_of_registered_key(devices, device, victim, run_id),
    ]
    # The operators' door, with no certificate and with one of another authority.
    (folder / "other").mkdir()
    write_certificates(folder / "other", ["x"], operators={"eve": commands.ROLES})
    for certificate in (None, folder / "other" / "eve.pem"):
        caller = Caller(server.operators, server.ca, certificate)
        tried += [(path, caller(path), {404, 0}) for path in (LIST, START, PULL)]
    passed = [(what, status) for what, status, refused in tried if status not in refused]
    assert (set(server.control.nodes()), set(server.control.runs())) == before, passed
    assert len(tried) > 150
    return passed


@pytest.fixture
def up(deployment):
    """Return the deployment that `fedstale up` makes."""
    deployment.devices, deployment.operators = deployment.doors.devices, deployment.doors.operators
    deployment.ca = deployment.tls.ca
    return deployment


CONFIG = "strategy='gap-aware' rounds=3 concurrency=3 buffer-size=1 train-s=1.0"


def assert_complete(lines):
    """Assert that a run has all its versions, of updates of its own nodes alone."""
    found = means(lines)
    assert set(found) == {0, 1, 2, 3}, lines
    assert all(0 < found[v] - found[v - 1] <= 3.0 for v in (1, 2, 3)), found
    assert not [line for line in lines if "reject" in line or "timeout" in line], lines


def test_up_is_attacked_and_its_run_loses_nothing(up, tmp_path):
    app = write_app(tmp_path / "adder")
    run = Running(up, app, CONFIG)
    run.until(lambda: any(s == "running" for s, _ in up.control.runs().values()))
    open_to_strangers = attack(up, tmp_path)
    assert open_to_strangers == []
    assert_complete(run.end())
    logs = [*up.folder.glob("*.log"), *up.folder.glob("proxy/*.log")]
    said = "".join(log.read_text(errors="replace") for log in logs)
    assert PUSH in said
    assert not [signature for signature in Device.signatures if signature in said]


def test_an_operator_does_what_its_certificate_says_and_is_in_the_audit_log(up, tmp_path):
    caller = Caller(up.operators, up.ca, up.folder / "operator.pem")
    assert caller(LIST, ListNodesRequest()) == 200
    # Its certificate opens this door alone, and this door is for Control alone.
    assert caller(PULL) == caller("/v1/runtime/get-nodes") == caller(f"/{LIST}") == 404
    assert Caller(up.devices, up.ca, up.folder / "operator.pem")(LIST) == 404
    assert Caller(up.doors.runtime, up.ca, up.folder / "operator.pem")(LIST) == 404
    audit = (up.folder / "proxy" / "audit.log").read_text()
    assert re.search(rf'"[^"]*CN=operator[^"]*" \w+ "POST {LIST}" 200', audit), audit


def test_the_door_of_server_apps_wants_the_secret(up):
    caller = Caller(up.doors.runtime, up.ca)
    request = AcquireTaskRequest(supported_task_types=["flwr-serverapp"])
    assert caller("/v1/runtime/acquire-task", request) == 401
    assert caller(LIST, ListNodesRequest()) == 404
    assert caller(PULL) == 404


class Tunnel(socketserver.BaseRequestHandler):
    """Carries bytes to the SuperLink's socket and back, as ssh -L does."""

    def handle(self):
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(self.server.link))
            back = threading.Thread(target=self.carry, args=(link, self.request))
            back.start()
            self.carry(self.request, link)
            back.join()

    @staticmethod
    def carry(source, target):
        with suppress(OSError):
            while some := source.recv(1 << 16):
                target.sendall(some)
            target.shutdown(socket.SHUT_WR)


def test_flwr_itself_needs_a_certificate_or_a_tunnel_to_the_socket(up, tmp_path):
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Tunnel) as tunnel:
        tunnel.daemon_threads, tunnel.link = True, up.doors.superlink
        threading.Thread(target=tunnel.serve_forever, daemon=True).start()
        port = tunnel.server_address[1]
        (tmp_path / "config.toml").write_text(
            f'[superlink.tunnel]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
            f'[superlink.door]\naddress = "{up.operators}"\nroot-certificates = "{up.ca}"\n'
        )
        environment = commands.environment(tmp_path)
        said = {}
        for name in ("tunnel", "door"):
            words = ["flwr", "supernode", "list", name, "--format", "json"]
            run = subprocess.run(
                commands.found(words, environment),
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            said[name] = run.stdout + run.stderr
        tunnel.shutdown()
    node = str(next(iter(up.node_ids.values())))
    assert node in said["tunnel"], said
    assert node not in said["door"], said


def test_check_asks_from_outside(up):
    asked = ["check", "--server", str(up.devices), "--ca", str(up.ca)]
    result = CliRunner().invoke(fedstale, asked)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) == 9
    for said in ("valid for 29 days", "Control is closed: 41 of 41", "Runtime is closed: 21 of 21"):
        assert any(said in line for line in lines), said


def other_user():
    """Return a user for ServerApps who can run this Python, or none."""
    folders = [one for p in (sys.prefix, sys.base_prefix) for one in (Path(p), *Path(p).parents)]
    is_reachable = all(folder.stat().st_mode & 0o001 for folder in folders)
    return "daemon" if is_reachable and os.geteuid() == 0 else ""


class DocsDeployment:
    """What units start, their commands word for word but for places and free ports."""

    def __init__(self, folder):
        self.folder, self.processes = folder, ProcessGroup()
        ports = [free_port() for _ in range(3)]
        self.devices, self.operators, runtime = (Address("127.0.0.1", port) for port in ports)
        self.user = other_user()
        self.places = {
            "/etc/flower": str(folder / "my-server" / "server"),
            "%d": str(folder / "my-server" / "server"),
            "/opt/fedstale/bin/": "",
            "/var/lib/flower-doors": str(folder / "doors"),
            "/var/lib/flower/": f"{folder}/state/",
            "/run/flower-superlink": str(folder / "socket"),
            "${SUPERLINK}": str(self.devices),
            "${NODE_CONFIG}": "partition-id=0 num-partitions=10",
            "%i": str(free_port()),
            "localhost:8002": f"localhost:{runtime.port}",
        }
        (folder / "doors").mkdir()
        (folder / "state").mkdir(mode=0o700)
        (folder / "home").mkdir(mode=0o700)
        if os.geteuid() == 0:
            # Root's nginx runs as nobody, whose group may enter, as flower-door does in the units.
            (folder / "socket").mkdir()
            shutil.chown(folder / "socket", group=grp.getgrnam("nogroup").gr_name)
            (folder / "socket").chmod(0o2750)
            shutil.chown(folder / "home", self.user or "root")
        page = (ROOT / "docs" / "deploy.md").read_text()
        (init,) = re.findall(r"^(fedstale deploy init .*?[^\\])\n", page, re.M | re.S)
        words = init.replace("\\\n", " ").split()[1:]
        words[2] = str(folder / "my-server")
        words += ["--devices", str(self.devices), "--operators", str(self.operators)]
        words += ["--runtime", str(runtime), "--socket", str(folder / "socket" / "superlink.sock")]
        result = CliRunner().invoke(fedstale, words)
        assert result.exit_code == 0, result.output
        self.database = folder / "state" / "superlink.db"
        self.ca = folder / "my-server" / "server" / "ca.crt"
        self.certificate = folder / "my-server" / "operators" / "alice" / "operator.pem"
        # Other users than their owner read it, as below /etc.
        for way in (self.ca.parent, self.ca.parent.parent):
            way.chmod(0o711)
        self.ca.chmod(0o644)
        self.control = Control(self.operators, self.ca, self.certificate)
        self.environment = commands.environment(folder / "operator")
        (folder / "operator").mkdir()
        link = commands.connection("mine", self.operators, self.ca, self.certificate)
        (folder / "operator" / "config.toml").write_text(link)

    def start(self, name, home, changes=None):
        """Start a command of a unit."""
        (words,) = [words for words in shown() if program(words) == name]
        for old, new in {**(changes or {}), **self.places}.items():
            words = [word.replace(old, new) for word in words]
        if "--user" in words:
            at = words.index("--user")
            words[at : at + 2] = ["--user", self.user] if self.user else []
        log, environment = self.folder / f"{name.split()[-1]}.log", commands.environment(home)
        found = commands.found(words, environment)
        self.processes.start(str(log), found, environment=environment, log=log)
        return log

    def __enter__(self):
        with ExitStack() as started:
            started.enter_context(self.processes)
            started.push(lambda *problem: self.control.close())
            self.start("fedstale deploy superlink", self.folder / "state")
            self.start("nginx", self.folder / "state")
            wait_for(lambda: is_healthy(self.devices, self.ca))
            self.start("fedstale deploy superexec", self.folder / "home")
            write_node_key(self.folder / "node-0")
            self.operate("supernode", "register", str(self.folder / "node-0.pub"), "mine")
            key = {"%d/node.key": str(self.folder / "node-0")}
            self.start("fedstale node", self.folder / "node", key)
            wait_for(lambda: list(self.control.nodes().values()) == ["online"])
            self.ends = started.pop_all()
        return self

    def __exit__(self, *problem):
        self.ends.close()

    def operate(self, *words):
        """Run an operator's command, and return its lines."""
        found = commands.found(["fedstale", "flwr", *words], self.environment)
        with self.processes.output_of("flwr", found, environment=self.environment) as output:
            return [*output]


READING = """
    import os
    names = config["names"].split(",")
    names += [f"/proc/{os.getppid()}/mem", f"/proc/{os.getppid()}/environ"]
    read = []
    for name in names:
        try:
            with open(name, "rb") as file:
                file.read(1)
            read.append(name)
        except PermissionError:
            pass
        except OSError:
            read.append(name)
    print(f"uid {os.getuid()} read {','.join(read)}", flush=True)
"""


@pytest.fixture
def docs():
    # Another user must be able to enter, which pytest's own folders forbid.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        with DocsDeployment(Path(folder)) as made:
            yield made


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_docs_are_attacked_and_their_server_apps_read_no_secret(docs, tmp_path):
    secret = ("server/server.key", "server/superexec.secret", "operators/alice/operator.pem")
    secret = (*secret, "ca.key")
    names = [str(docs.folder / "my-server" / name) for name in secret]
    names += [str(docs.folder / "state" / "superlink.db"), str(docs.folder / "socket")]
    first = "    config = context.run_config\n"
    server = SERVER.replace(first, first + READING)
    project = PYPROJECT.replace("rounds = 1", f'rounds = 1\nnames = "{",".join(names)}"')
    app = write_app(tmp_path / "adder", pyproject=project, server=server)
    client = CLIENT.replace('context.node_config["partition-id"]', "0")
    (app / "adder" / "client_app.py").write_text(client)
    config = CONFIG.replace("concurrency=3", "concurrency=1")
    docs.operate("run", str(app), "mine", "--run-config", config)
    wait_for(lambda: any(s == "running" for s, _ in docs.control.runs().values()))
    assert attack(docs, tmp_path) == []
    ((run_id, _),) = docs.control.runs().items()
    wait_for(lambda: docs.control.runs()[run_id][0].startswith("finished"))
    assert docs.control.runs()[run_id][0] == "finished:completed"
    lines = docs.operate("log", str(run_id), "mine", "--show")
    assert_complete(lines)
    (said,) = [line for line in lines if line.startswith("uid ")]
    if not docs.user:
        # What cannot be separated without root, or where others cannot run this Python.
        assert "superexec.secret" in said
    else:
        assert said.split() == ["uid", str(pwd.getpwnam(docs.user).pw_uid), "read"]
    assert not [f.text for f in probe(docs.devices, docs.ca) if f.is_fault]
    # bob may look, and nothing else.
    bob = Caller(
        docs.operators, docs.ca, docs.folder / "my-server" / "operators" / "bob" / "operator.pem"
    )
    assert bob(LIST, ListNodesRequest()) == 200
    assert bob(START) == bob("/v1/control/register-node") == bob("/v1/control/stop-run") == 403
