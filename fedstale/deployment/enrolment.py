"""Many nodes at once: keys in, a list of nodes out, and a log of who let whom in.

To register and to unregister is Flower's own; `Registry` asks for it as `flwr supernode register`
does, over the operators' door. A new key for a node that stays the same node is not: Flower gives
each key an id of its own, and a server's history of a node (how long it takes, how often it fails,
what it is trusted with) is by that id. So `rotate` changes the key in the SuperLink's database, on
the server, and the id stays.

Each change is in a log before it is tried, and again when it is known what came of it.
"""

import csv
import io
import sqlite3
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, Self

import httpx
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_public_key,
)
from cryptography.x509.oid import NameOID

from fedstale.deployment.audit import AuditLog
from fedstale.deployment.control import control_client, operators_side
from fedstale.errors import ConfigError, FedstaleError
from fedstale.flower import command_line
from fedstale.traces.io.atomic import replacing

COLUMNS = ("name", "public_key")
"""What a table of keys must have: a name of one's own, and a line as in node-0.pub."""
LISTED = ("name", "node_id", "key", "status")
NIST = ec.SECP192R1, ec.SECP224R1, ec.SECP256R1, ec.SECP384R1, ec.SECP521R1
"""Curves of the keys that Flower takes."""
GONE = "unregistered"
"""Status of a node that was revoked."""
_LOCK_S = 30.0


@dataclass(frozen=True, slots=True)
class NodeKey:
    """The public half of a node's key, and what its owner calls the node."""

    name: str
    pem: bytes
    """As Flower stores it."""
    fingerprint: str
    """As `ssh-keygen -l` shows it."""

    @classmethod
    def parse(cls, name: str, line: str) -> Self:
        """Read a key from the line of a .pub file.

        Raises:
            ConfigError: it is none that Flower takes.
        """
        try:
            key = load_ssh_public_key(line.strip().encode())
        except (ValueError, UnsupportedAlgorithm) as problem:
            raise ConfigError(f"node {name!r}: no public key of OpenSSH: {problem}") from None
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, NIST):
            raise ConfigError(
                f"node {name!r}: expected a key of a NIST curve: ssh-keygen -t ecdsa -b 384"
            )
        blob = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1]
        digest = b64encode(sha256(b64decode(blob)).digest()).decode().rstrip("=")
        return cls(name, command_line.public_pem(key), f"SHA256:{digest}")


@dataclass(frozen=True, slots=True)
class Node:
    """A node as the SuperLink has it."""

    name: str
    node_id: int
    key: str
    """Fingerprint."""
    status: str
    """registered, online, offline or unregistered."""


def read_keys(table: Path) -> list[NodeKey]:
    """Read a table of keys, all of it or nothing.

    Args:
        table: CSV with the columns `name` and `public_key`; others are left alone.

    Raises:
        ConfigError: the file or a line of it is unusable, or a name or a key occurs twice.
    """
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise ConfigError(f"{table} cannot be read: {problem}") from None
    if not rows or not set(COLUMNS) <= set(rows[0]):
        raise ConfigError(f"{table}: expected lines below the header {','.join(COLUMNS)}")
    keys: list[NodeKey] = []
    seen: dict[object, int] = {}
    for line, row in enumerate(rows, start=2):
        name = (row["name"] or "").strip()
        if not name or name.isdecimal():
            raise ConfigError(f"{table}:{line}: name = {name!r}: expected one that is no number")
        try:
            key = NodeKey.parse(name, row["public_key"] or "")
        except ConfigError as problem:
            raise ConfigError(f"{table}:{line}: {problem}") from None
        for what in (name, key.pem):
            if what in seen:
                kind = "name" if what == name else "key"
                raise ConfigError(f"{table}:{line}: the {kind} of line {seen[what]} again")
            seen[what] = line
        keys.append(key)
    return keys


class Client(Protocol):
    """What a SuperLink says and does of nodes, over a network or not."""

    def list_nodes(self) -> Sequence[Any]:
        """Return all nodes that were ever registered: `node_id`, `public_key`, `name`, `status`."""

    def register_node(self, public_key: bytes, name: str) -> int:
        """Register the owner of a key, in PEM; return the node's id."""

    def unregister_node(self, node_id: int) -> None:
        """Reject a node's key from now on."""

    def close(self) -> None:
        """Disconnect."""


class Registry:
    """The nodes of a SuperLink, as who may register nodes may change them."""

    who: dict[str, str]
    """The SuperLink, and the name in the operator's certificate if it shows one."""

    def __init__(self, client: Client, **who: str) -> None:
        """Ask a client, on behalf of someone."""
        self._client, self.who = client, who

    @classmethod
    def of(cls, name: str | None) -> Self:
        """Return that of a SuperLink in Flower's config.toml.

        Args:
            name: in the file; None takes the only one.

        Raises:
            ConfigError: there is none of this name, or its certificates cannot be used.
        """
        at, ca, certificate = operators_side(name)
        who = {"superlink": str(at)}
        if certificate is not None:
            shown = x509.load_pem_x509_certificate(certificate.read_bytes())
            names = shown.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
            who["operator"] = str(names[0].value) if names else ""
        return cls(control_client(at, ca, certificate), **who)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def listed(self) -> dict[bytes, Node]:
        """Return all nodes that were ever registered, by their key.

        Raises:
            FedstaleError: the SuperLink does not say.
        """
        with self._answers():
            found = self._client.list_nodes()
        return {
            bytes(one.public_key): Node(one.name, int(one.node_id), "", str(one.status))
            for one in found
        }

    def enrol(self, keys: Sequence[NodeKey], log: AuditLog) -> list[Node]:
        """Register the nodes of some keys, but for those that are registered.

        Args:
            keys: of the nodes.
            log: of what is done.

        Returns:
            The nodes in the order of their keys.

        Raises:
            FedstaleError: a key was revoked before, a name belongs to another key, or the SuperLink
                rejects one; those before it are registered.
        """
        known = self.listed()
        owners = {node.name: pem for pem, node in known.items() if node.status != GONE}
        for key in keys:
            if key.pem in known and known[key.pem].status == GONE:
                raise FedstaleError(
                    f"node {key.name!r}: its key was revoked, which Flower never takes back: make "
                    "another key on the device"
                )
            if owners.get(key.name, key.pem) != key.pem:
                raise FedstaleError(
                    f"node {key.name!r} is registered with another key: fedstale deploy rotate "
                    "changes it and keeps the node's id"
                )
        nodes = []
        for key in keys:
            node = known.get(key.pem)
            if node is None:
                about = {"name": key.name, "key": key.fingerprint}
                with log.noted("enrol", **about) as found, self._answers():
                    node_id = self._client.register_node(key.pem, key.name)
                    found["node_id"] = str(node_id)
                node = Node(key.name, node_id, "", "registered")
            nodes.append(Node(node.name or key.name, node.node_id, key.fingerprint, node.status))
        return nodes

    def revoke(self, who: Sequence[str], log: AuditLog) -> list[Node]:
        """Unregister nodes: their keys are rejected from now on, and for ever.

        Args:
            who: names or ids, all of them known, or nothing is done.
            log: of what is done.

        Raises:
            FedstaleError: a node is unknown, or the SuperLink rejects one.
        """
        nodes = [node for node in self.listed().values() if node.status != GONE]
        chosen = []
        for one in who:
            found = [node for node in nodes if one in {node.name, str(node.node_id)}]
            if len(found) != 1:
                raise FedstaleError(f"node {one!r}: {len(found)} registered nodes have this name")
            chosen += found
        for node in chosen:
            about = {"name": node.name, "node_id": str(node.node_id)}
            with log.noted("revoke", **about), self._answers():
                self._client.unregister_node(node.node_id)
        return chosen

    @contextmanager
    def _answers(self) -> Iterator[None]:
        try:
            yield
        except (httpx.HTTPError, OSError) as problem:
            at = self.who["superlink"]
            raise FedstaleError(f"the SuperLink at {at} does not do it: {problem}") from None


def rotate(database: Path, node: str, key: NodeKey, log: AuditLog) -> int:
    """Give a node another key, on the server; its id, and all that goes by it, stays.

    The old key is rejected from then on: let the device's SuperNode end before, and start with the
    new key after.

    Args:
        database: of the SuperLink, which may be running.
        node: name or id.
        key: the new one.
        log: of what is done.

    Returns:
        The node's id.

    Raises:
        ConfigError: this is no database of a SuperLink.
        FedstaleError: there is no such node, or the key was used before.
    """
    if not database.is_file():
        raise ConfigError(f"database = {str(database)!r}: expected the file of flower-superlink")
    try:
        with closing(sqlite3.connect(database, timeout=_LOCK_S)) as opened:
            return _rotate(opened, node, key, log)
    except sqlite3.IntegrityError:
        raise FedstaleError(
            f"node {node!r}: the new key was registered before: make another one on the device"
        ) from None
    except sqlite3.Error as problem:
        raise ConfigError(
            f"database = {str(database)!r}: {problem}; expected the file of flower-superlink, "
            "which this user may write"
        ) from None


def _rotate(opened: sqlite3.Connection, node: str, key: NodeKey, log: AuditLog) -> int:
    found = opened.execute("SELECT node_id, name FROM node WHERE status != ?", (GONE,)).fetchall()
    # SQLite holds 64 bits with a sign, and ids of nodes have none.
    ids = [signed for signed, name in found if node in {name, str(signed % 2**64)}]
    if len(ids) != 1:
        raise FedstaleError(f"node {node!r}: {len(ids)} registered nodes have this name")
    node_id = ids[0] % 2**64
    about = {"name": node, "node_id": str(node_id), "key": key.fingerprint}
    with log.noted("rotate", **about):
        opened.execute("UPDATE node SET public_key = ? WHERE node_id = ?", (key.pem, ids[0]))
        opened.commit()
    return node_id


def write_list(nodes: Sequence[Node], out: Path) -> None:
    """Write nodes as a table, whole or not at all."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(LISTED)
    table.writerows([node.name, node.node_id, node.key, node.status] for node in nodes)
    with replacing(out) as file:
        file.write(text.getvalue().encode())
