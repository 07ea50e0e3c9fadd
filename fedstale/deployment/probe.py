"""What a stranger finds who reaches a SuperLink's address, asked from outside.

Nothing is changed there: requests are of a type that Flower takes nowhere, or come from a key that
nobody has registered, and what is open shows in how it refuses them.
"""

import datetime
import ssl
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing
from http.client import HTTPException, HTTPSConnection
from pathlib import Path

import httpx
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fedstale.deployment.check import SOON_DAYS, Finding, expiries
from fedstale.deployment.commands import Address
from fedstale.deployment.diagnosis import check_health
from fedstale.deployment.doors import CLOSED_PATHS, CONTROL_PATHS, FLEET_PATHS, RUNTIME_PATHS
from fedstale.errors import ConfigError, FedstaleError
from fedstale.flower import command_line, features

_LIMIT_S = 10.0
_CLOSED = {400, 401, 403, 404, 405}
_ELSE = ("/", "/health", "/docs", "/openapi.json", "/v1/responses")
_TOO_MANY_BYTES = 1 << 30


def probe(at: Address, ca: Path) -> list[Finding]:
    """Ask a SuperLink's address what it lets a stranger do who has the authority's certificate.

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
                door.closed("Control", CONTROL_PATHS),
                door.closed("Runtime", RUNTIME_PATHS),
                door.closed("registering", CLOSED_PATHS),
                door.closed(
                    "all else", ("/", "/health", "/docs", "/openapi.json", "/v1/responses")
                ),
                door.tricks(),
                door.oversize(),
                _unknown_key(at, ca),
            ]
    except (OSError, HTTPException, httpx.HTTPError) as problem:
        return [Finding(f"{at} breaks off: {str(problem) or type(problem).__name__}")]


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
        text = f"{self._connection.sock.version()}; the certificate is valid for {days} days"
        soon = ", renew it" if days < SOON_DAYS else ""
        return Finding(f"{text}{soon}", is_fault=False)

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
            return Finding("TLS older than 1.2 is refused", is_fault=False)
        return Finding("TLS older than 1.2 is spoken")

    def closed(self, what: str, paths: Sequence[str], method: str = "POST") -> Finding:
        """Return whether all of some paths are closed."""
        found = {path: self.status(method, path) for path in paths}
        opened = {path: status for path, status in found.items() if status not in _CLOSED}
        if opened:
            path, status = next(iter(opened.items()))
            return Finding(
                f"{what} is open: {len(opened)} of {len(paths)} paths, such as {path} ({status})"
            )
        return Finding(f"{what} is closed: {len(paths)} of {len(paths)} paths", is_fault=False)

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
            return Finding(f"{len(passed)} of {tried} tricks with paths pass, such as {passed[0]}")
        return Finding(f"none of {tried} tricks with paths passes", is_fault=False)

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
        if refused:
            return Finding("a body of 1 GB is refused before it is sent", is_fault=False)
        return Finding("a body of 1 GB is waited for: there is no limit")


def _unknown_key(at: Address, ca: Path) -> Finding:
    """Return whether a node joins whose key nobody has registered."""
    if not features.has("a stranger's key"):
        return Finding("a key that nobody registered is not tried", is_fault=False)
    try:
        command_line.activate(str(at), ca, ec.generate_private_key(ec.SECP384R1()))
    except httpx.HTTPStatusError as problem:
        status = problem.response.status_code
        return Finding(f"a key that nobody registered is refused ({status})", is_fault=False)
    return Finding("a key that nobody registered is let in")
