"""The proxy in front of a SuperLink, which lets each caller reach its own part alone.

Flower serves Control (what operators do), Fleet (what devices do) and Runtime (what ServerApps do)
at one port, to anyone. Here the SuperLink listens at a Unix socket that the proxy alone can reach,
and the proxy, nginx, has a door for each part. This file writes nginx's configuration, for
`fedstale up` and `fedstale deploy init` alike, and asks from outside what a stranger finds at an
address. That changes nothing there: requests are of a type that Flower takes nowhere, or come from
a key that nobody has registered, and what is open shows in how it refuses them.
"""

import datetime
import re
import secrets
import ssl
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from http.client import HTTPException, HTTPSConnection
from pathlib import Path

import httpx
import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fedstale.deployment.check import SOON_DAYS, Finding, expiries, finding
from fedstale.deployment.commands import ROLES, Address, write_certificates, write_private
from fedstale.deployment.diagnosis import check_health
from fedstale.errors import ConfigError, FedstaleError
from fedstale.files import PRIVATE_FOLDER, make_private
from fedstale.flower import command_line, features
from fedstale.flower import superlink as flower

FLEET_PATHS = tuple(
    f"/v1/fleet/{call}"
    for call in (
        *("activate-node", "deactivate-node", "send-node-heartbeat"),
        *("pull-messages", "push-messages", "get-run", "get-fab"),
        *("push-object", "pull-object", "confirm-message-received"),
    )
)
"""What a device calls. To register and unregister is the operator's."""
SOCKET = Path("/run/flower-superlink/superlink.sock")
"""Of the SuperLink, as the units have it."""
_TEMPLATE = Path(__file__).with_name("nginx.conf.in")
SETTINGS = "init.toml"
"""What a folder of a deployment was made with."""

_LOOKING = ("get-", "list-", "pull-artifacts", "refresh-auth-tokens", "show-", "stream-")
_REGISTERING = ("register-node", "unregister-node")

# Flower cuts arrays into objects of 5 MB, and names each in the message: some 70 bytes for one. An
# app's bundle has at most 10 MB.
_BODY = "64k"
_BODIES = {
    "/v1/fleet/push-object": "8m",
    "/v1/fleet/push-messages": "4m",
    "/v1/control/start-run": "16m",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """Addresses of the proxy, and its limits for one client address."""

    devices: Address
    """For SuperNodes; open to the network."""
    operators: Address
    """For who shows a certificate of the authority."""
    runtime: Address
    """For SuperExecs and ServerApps of this machine."""
    superlink: Path
    """Unix socket of the SuperLink."""
    requests_per_s: int = 50
    """From one address at the devices' door, with bursts of eight seconds. What is more gets 503,
    and a SuperNode tries again. A node that waits makes one request in twenty seconds, one that
    sends a large model some ten a second; many nodes may share an address."""
    connections: int = 1024
    """From one address at the devices' door at once, that have made a request. A node that waits
    for work has one, which the SuperLink holds for up to 20 s."""


def role_of(path: str) -> str | None:
    """Return the role that a path of Control takes; None: any certificate will do.

    Example:
        >>> role_of("/v1/control/list-nodes"), role_of("/v1/control/start-run")
        (None, 'run')
        >>> role_of("/v1/control/register-node")
        'register'
    """
    call = path.rpartition("/")[2]
    if call.startswith(_LOOKING):
        return None
    return "register" if call in _REGISTERING else "run"


def nginx(doors: Doors, *, user: str = "") -> str:
    """Return nginx's configuration.

    Certificates (ca.crt, server.pem, server.key) are looked for beside the file; logs and buffers
    go to nginx's prefix. No header is logged: headers hold signatures and tokens.

    Args:
        doors: where to listen.
        user: whom nginx becomes if root starts it; empty where another user does.

    Raises:
        ConfigError: the path of the socket is too long, or has a character that it cannot have.
    """
    socket = str(doors.superlink)
    if len(socket.encode()) > 107 or set(socket) & set("\"'\\;{}$:\n"):
        raise ConfigError(
            f"socket = {socket!r}: expected at most 107 bytes, and no quotes, colon, semicolon, "
            "braces, dollar or backslash: choose a shorter or plainer folder"
        )
    filled = {
        "user": f"user {user};" if user else "# Started by the user as whom it runs.",
        "socket": socket,
        **{name: str(getattr(doors, name)) for name in ("devices", "operators", "runtime")},
        "connections": str(doors.connections),
        "rate": str(doors.requests_per_s),
        "burst": str(8 * doors.requests_per_s),
        "body": _BODY,
        **{f"may {role}": _unit(role) for role in ROLES},
        "devices' paths": _only(FLEET_PATHS),
        "operators' paths": _only(other_paths("control")),
        "runtime's paths": _only(other_paths("runtime")),
    }
    return re.sub(r"\[\[(.+?)\]\]", lambda found: filled[found[1]], _TEMPLATE.read_text("utf-8"))


@cache
def other_paths(part: str) -> tuple[str, ...]:
    """Return the paths of a part of a SuperLink that are not for devices.

    Args:
        part: "control", "runtime" or "fleet".

    Raises:
        ConfigError: this Flower does not say.
    """
    paths = (path for _, path in flower.calls() if path.startswith(f"/v1/{part}/"))
    return tuple(path for path in paths if path not in FLEET_PATHS)


def _unit(role: str) -> str:
    r"""Return nginx's pattern of a certificate's name (RFC 2253) that has a role as a unit.

    A comma with a backslash before it is no end of a part: who may choose a common name could write
    a unit into it. A backslash is written as \x5c, which nginx hands on as it is.
    """
    return rf"~^(?:(?:[^\x5c]|\x5c.)*,)?OU={role}(?:,|$)"


def _only(paths: Sequence[str]) -> str:
    """Return the locations that let paths through and answer anything else with 404."""
    lines = [
        "if ($request_uri != $uri) { return 404; }",
        "if ($request_method != POST) { return 404; }",
        "location / { return 404; }",
    ]
    for path in paths:
        body = _BODIES.get(path)
        role = role_of(path) if path in other_paths("control") else None
        held = f"if ($may_{role} = 0) {{ return 403; }} " if role else ""
        limit = f"client_max_body_size {body}; " if body else ""
        lines.append(f"location = {path} {{ {held}{limit}proxy_pass http://superlink; }}")
    return "\n".join(f"    {line}" for line in lines)


def write_server(
    folder: Path,
    doors: Doors,
    hosts: Sequence[str],
    operators: Mapping[str, Sequence[str]],
    *,
    days: int,
) -> None:
    """Write a folder for each machine of a deployment: the server, a device, each operator.

    Each holds certificates, units and a script that puts them in place. The same once more changes
    nothing.

    Args:
        folder: a new one, or one that the same arguments have made; made private.
        doors: of the server.
        hosts: names and addresses by which devices and operators reach it; localhost is added for
            the server's own parts.
        operators: names, with what each may do beyond looking.
        days: until the certificates end.

    Raises:
        ConfigError: a host, a name, a role or a path cannot be, or the folder holds something else.
    """
    configuration = nginx(doors)
    at = {name: str(getattr(doors, name)) for name in ("devices", "operators", "runtime")}
    asked = {"hosts": [*hosts], "operators": {k: [*v] for k, v in operators.items()}, "days": days}
    settings = tomli_w.dumps({**asked, "doors": at, "socket": str(doors.superlink)}).encode()
    if (made := folder / SETTINGS).is_file():
        if made.read_bytes() != settings:
            raise ConfigError(
                f"folder = {str(folder)!r} was made with other options, which {SETTINGS} in it "
                "holds: expected the same ones, or a new folder"
            )
        return
    if any(not path.is_dir() for path in folder.rglob("*")):
        raise ConfigError(f"folder = {str(folder)!r}: expected a new or an empty one")
    make_private(folder)
    folder.chmod(PRIVATE_FOLDER)
    make_private(server := folder / "server")
    names = [*hosts, *(name for name in ("localhost", "127.0.0.1") if name not in hosts)]
    tls = write_certificates(server, names, operators=operators, days=days, keep_authority=True)
    (server / "ca.key").replace(folder / "ca.key")
    write_private(server / "superexec.secret", secrets.token_bytes(32))
    write_private(server / "nginx.conf", configuration.encode())
    filled = {
        "superlink.example.org:8000": str(Address(hosts[0], doors.devices.port)),
        "superlink.example.org:8001": str(Address(hosts[0], doors.operators.port)),
        "localhost:8002": f"localhost:{doors.runtime.port}",
    }
    # In containers the SuperLink's socket is elsewhere, and compose.yaml starts the parts.
    if doors.superlink == SOCKET:
        _write_host("server", server, filled)
    own = {name: folder / "operators" / name for name in operators}
    for kind, place in (("device", folder / "device"), *(("operator", at) for at in own.values())):
        make_private(place.parent)
        _write_host(kind, place, filled)
        write_private(place / tls.ca.name, tls.ca.read_bytes())
    for name, place in own.items():
        (server / f"{name}.pem").replace(place / "operator.pem")
    write_private(made, settings)


def _write_host(kind: str, folder: Path, filled: Mapping[str, str]) -> None:
    """Write the units and scripts of a machine, with addresses in the place of the examples."""
    make_private(folder)
    for path in sorted((Path(__file__).parent / "hosts" / kind).iterdir()):
        text = path.read_text(encoding="utf-8")
        for example, address in filled.items():
            text = text.replace(example, address)
        write_private(folder / path.name, text.encode())


_LIMIT_S = 10.0
_CLOSED = {400, 401, 403, 404, 405}
_ELSE = ("/", "/health", "/docs", "/openapi.json", "/v1/responses")
_TOO_MANY_BYTES = 1 << 30


def probe(at: Address, ca: Path) -> list[Finding]:
    """Probe a SuperLink's address as a stranger with the authority's certificate.

    Args:
        at: where devices connect.
        ca: certificate of the authority, as every device has it.

    Returns:
        One finding for each thing that was looked at; a fault where something is open.

    Raises:
        ConfigError: the certificate file cannot be used.
    """
    try:
        check_health(at, ca)
    except ConfigError:
        raise
    except FedstaleError as problem:
        return [*expiries(ca), Finding(str(problem))]
    door = _Door(at, ca)
    try:
        with closing(door):
            return [
                *expiries(ca),
                door.certificate(),
                door.old_tls(),
                door.closed("Control", other_paths("control")),
                door.closed("Runtime", other_paths("runtime")),
                door.closed("registering", other_paths("fleet")),
                door.closed("all else", _ELSE),
                door.tricks(),
                door.oversize(),
                _unknown_key(at, ca),
            ]
    except (OSError, HTTPException, httpx.HTTPError) as problem:
        return [finding("breaks_off", at=at, problem=str(problem) or type(problem).__name__)]


def spellings(path: str) -> Iterator[str]:
    """Return ways to write a path, or one that leads to it, so that a filter may overlook it.

    Example:
        >>> next(spellings("/v1/control/list-nodes"))
        '//v1/control/list-nodes'
    """
    door = FLEET_PATHS[0]
    yield from (f"/{path}", path.replace("/", "//"), path.upper(), f"{path}/", f"/.{path}")
    yield from (f"/{path[1:].replace('/', '%2f')}", path.replace("/v1", "/%761"))
    yield from (f"/v1/fleet/..{path[3:]}", f"/v1/fleet/%2e%2e{path[3:]}", f"{door}/../../..{path}")
    yield from (
        f"{door}/..%2f..%2f..{path}",
        f"{door}%00/../../..{path}",
        f"{door}/..;/..;/..{path}",
    )
    yield from (
        f"{path}?x",
        f"{path};x",
        f"{path}%00",
        f"{path}%20",
        f"{path}#{door}",
        f"{path}%23",
    )
    yield from (path.replace("/", "\\"), path.replace("/", "/%2e/"), f"https://localhost{path}")
    yield from (f"{door}?{path}", f"{door}#{path}", f"{door}/{path}", f"{door}%3f{path}")


class _Door:
    """Connections of a stranger to one address."""

    def __init__(self, at: Address, ca: Path) -> None:
        self._at = at
        self._context = ssl.create_default_context(cafile=str(ca))
        self._connection = HTTPSConnection(
            at.host, at.port, context=self._context, timeout=_LIMIT_S
        )

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()

    def status(self, method: str, path: str) -> int:
        """Return the status of a request that Flower takes nowhere, with the path as it is."""
        self._connection.request(method, path, body=b"-", headers={"Content-Type": "text/plain"})
        with self._connection.getresponse() as response:
            response.read()
            return response.status

    def certificate(self) -> Finding:
        """Return until when the certificate is valid."""
        self._connection.connect()
        shown = ssl.get_server_certificate((self._at.host, self._at.port), timeout=_LIMIT_S)
        end = x509.load_pem_x509_certificate(shown.encode()).not_valid_after_utc
        days = (end - datetime.datetime.now(datetime.UTC)).days
        soon = ", renew it" if days < SOON_DAYS else ""
        return finding("certificate", version=self._connection.sock.version(), days=days, soon=soon)

    def old_tls(self) -> Finding:
        """Return whether a version of TLS that is broken is spoken."""
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.set_ciphers("ALL:@SECLEVEL=0")
        with warnings.catch_warnings():
            # That it is deprecated is why one asks.
            warnings.simplefilter("ignore", DeprecationWarning)
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        connection = HTTPSConnection(self._at.host, self._at.port, context=old, timeout=_LIMIT_S)
        try:
            with closing(connection):
                connection.connect()
        except OSError:
            return finding("no_old_tls")
        return finding("old_tls")

    def closed(self, what: str, paths: Sequence[str]) -> Finding:
        """Return whether all of some paths are closed."""
        found = {path: self.status("POST", path) for path in paths}
        opened = {path: status for path, status in found.items() if status not in _CLOSED}
        if opened:
            path, status = next(iter(opened.items()))
            about = {"n_open": len(opened), "path": path, "status": status}
            return finding("open", what=what, n=len(paths), **about)
        return finding("closed", what=what, n=len(paths))

    def tricks(self) -> Finding:
        """Return whether a path can be written so that it passes."""
        tried, passed = 0, []
        for target in ("/v1/control/list-nodes", "/v1/runtime/acquire-task"):
            for path in spellings(target):
                tried += 1
                if self.status("POST", path) not in {*_CLOSED, 414}:
                    passed.append(path)
        for method in ("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"):
            tried += 1
            if self.status(method, FLEET_PATHS[0]) not in _CLOSED:
                passed.append(f"{method} {FLEET_PATHS[0]}")
        if passed:
            return finding("tricks", n_passed=len(passed), n=tried, path=passed[0])
        return finding("no_tricks", n=tried)

    def oversize(self) -> Finding:
        """Return whether a large body is refused before it is sent."""
        path = "/v1/fleet/push-messages"
        try:
            with closing(
                HTTPSConnection(
                    self._at.host, self._at.port, context=self._context, timeout=_LIMIT_S / 5
                )
            ) as connection:
                connection.putrequest("POST", path)
                connection.putheader("Content-Type", command_line.PROTOBUF)
                connection.putheader("Content-Length", str(_TOO_MANY_BYTES))
                connection.endheaders()
                refused = connection.getresponse().status == httpx.codes.REQUEST_ENTITY_TOO_LARGE
        except TimeoutError:
            refused = False
        return finding("no_oversize" if refused else "oversize")


def _unknown_key(at: Address, ca: Path) -> Finding:
    """Probe whether a node joins with a key that nobody has registered."""
    if not features.has("a stranger's key"):
        return finding("unknown_key_not_tried")
    try:
        command_line.activate(str(at), ca, ec.generate_private_key(ec.SECP384R1()))
    except httpx.HTTPStatusError as problem:
        return finding("unknown_key_refused", status=problem.response.status_code)
    return finding("unknown_key")
