"""`fedstale deploy enrol`, `tokens`, `join`, `rotate` and `revoke`: who may be a node."""

import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedstale.cli.output import UNITS_S, AsJson, amount, note, one_sentence, say, say_json
from fedstale.errors import ConfigError
from fedstale.files import exposure

if TYPE_CHECKING:
    from fedstale.deployment.audit import AuditLog
    from fedstale.deployment.enrolment import Registry

_LONGEST, _LONGEST_S = 256, 365 * 86_400.0

SuperLink = Annotated[
    str | None,
    typer.Option("--superlink", "-s", help="Name in Flower's config.toml; default the only one."),
]
Audit = Annotated[
    Path | None,
    typer.Option(
        help="Log of who did what, only ever added to; default enrolment.jsonl in Flower's home, "
        "or beside the database."
    ),
]


@one_sentence()
def enrol(
    table: Annotated[Path, typer.Argument(help="CSV with the columns name and public_key.")],
    superlink: SuperLink = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the list of nodes as CSV.")
    ] = None,
    audit: Audit = None,
    as_json: AsJson = False,
) -> None:
    """Register many nodes; those that are registered already stay as they are.

    The list has the id of each node. Nothing is registered if a line of the table is unusable.
    """
    from fedstale.deployment.enrolment import read_keys, write_list

    keys = read_keys(table)
    registry, log = _registry(superlink, audit)
    try:
        nodes = registry.enrol(keys, log)
    finally:
        registry.close()
    if out is not None:
        write_list(nodes, out)
    if as_json:
        say_json(out or table, nodes={node.name: str(node.node_id) for node in nodes})
        return
    for node in nodes:
        typer.echo(f"{node.node_id:>20}  {node.status:<10}  {node.key}  {node.name}")


@one_sentence()
def tokens(
    database: Annotated[Path, typer.Option(help="Of the SuperLink, on this machine.")],
    count: Annotated[int, typer.Option(help="How many.", min=1, max=10_000)] = 1,
    valid: Annotated[str, typer.Option(help="Until they expire, such as 30m, 24h or 7d.")] = "24h",
    revoke: Annotated[
        bool, typer.Option("--revoke", help="Make none: let all expire that nobody has used.")
    ] = False,
    audit: Audit = None,
    as_json: AsJson = False,
) -> None:
    """Make one-time tokens, each of which lets one device join, and print them this once.

    Run it on the server, as the user whose database it is. The server keeps only their hashes.
    """
    from fedstale.deployment.audit import LOG, AuditLog
    from fedstale.deployment.joining import token_id
    from fedstale.deployment.tokens import Tokens

    valid_s = amount("valid", valid, UNITS_S)
    if not 0 < valid_s <= _LONGEST_S:
        raise ConfigError(f"valid = {valid!r}: expected a time above 0 and up to 365d")
    kept = Tokens.of(database)
    log = AuditLog(audit or database.parent / LOG, superlink=str(database))
    if revoke:
        gone = kept.revoke(log)
        say(f"{len(gone)} tokens have expired", database, as_json=as_json, revoked=gone)
        return
    made = kept.make(count, valid_s, log)
    if as_json:
        say_json(database, tokens={token_id(token): token for token in made})
        return
    note(f"valid for {valid}, each for one device; they are not shown again")
    for token in made:
        typer.echo(token)


@one_sentence()
def join(
    server: Annotated[str, typer.Option(help="The devices' door, HOST:PORT.")],
    ca: Annotated[Path, typer.Option(help="Certificate of the server's authority, ca.crt.")],
    token_file: Annotated[str, typer.Option(help="File that holds the token; - reads stdin.")],
    key: Annotated[
        Path, typer.Option(help="Private key of this node; made, in a private folder, if new.")
    ] = Path("node/key"),
    name: Annotated[
        str | None, typer.Option(help="Of this node; default the name of this machine.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Register this device as a node, with a one-time token.

    Its private key stays here. If it is cut short, the same command goes on.
    """
    from fedstale.deployment.commands import Address
    from fedstale.deployment.joining import join as joined

    at, wanted = Address.parse(server), name or socket.gethostname()
    node_id = joined(at, ca, _token(token_file), key, wanted, say=note)
    say(
        f"joined as node {node_id}, {wanted}: fedstale node shows "
        f"--auth-supernode-private-key {key}",
        key,
        as_json=as_json,
        node_id=str(node_id),
        name=wanted,
    )


def _token(file: str) -> str:
    """Return the token that a file holds, which others must not read."""
    path = Path(file)
    try:
        if file != "-" and (found := exposure(path)):
            raise ConfigError(f"token-file: {found}")
        token = (sys.stdin.read() if file == "-" else path.read_text(encoding="ascii")).strip()
    except (OSError, UnicodeDecodeError) as problem:
        # What it holds is in no message.
        cause = problem.strerror if isinstance(problem, OSError) else "it is no text"
        raise ConfigError(f"token-file = {file!r} cannot be read: {cause}") from None
    if not token or not token.isascii() or not token.isprintable() or len(token) > _LONGEST:
        raise ConfigError(f"token-file = {file!r}: expected one token of fedstale deploy tokens")
    return token


@one_sentence()
def rotate(
    node: Annotated[str, typer.Argument(help="Name or id.")],
    key: Annotated[Path, typer.Argument(help="The device's new public key, NODE.pub.")],
    database: Annotated[Path, typer.Option(help="Of the SuperLink, on this machine.")],
    audit: Audit = None,
    as_json: AsJson = False,
) -> None:
    """Give a node another key; its id, and its history on the server, stay.

    Run it on the server, as the user whose database it is, after the device's SuperNode has ended
    and before it starts with the new key. The old key is rejected from then on.
    """
    from fedstale.deployment.audit import LOG, AuditLog
    from fedstale.deployment.enrolment import NodeKey
    from fedstale.deployment.enrolment import rotate as changed

    try:
        line = key.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"key = {str(key)!r} cannot be read: {problem}") from None
    log = AuditLog(audit or database.parent / LOG, superlink=str(database))
    node_id = changed(database, node, NodeKey.parse(node, line), log)
    say(f"node {node_id} has another key", key, as_json=as_json)


@one_sentence()
def revoke(
    nodes: Annotated[list[str], typer.Argument(help="Names or ids.")],
    superlink: SuperLink = None,
    audit: Audit = None,
    as_json: AsJson = False,
) -> None:
    """Unregister nodes; Flower never takes their keys again."""
    registry, log = _registry(superlink, audit)
    try:
        gone = registry.revoke(nodes, log)
    finally:
        registry.close()
    if as_json:
        say_json(log.path, nodes={node.name: str(node.node_id) for node in gone})
        return
    for node in gone:
        typer.echo(f"{node.node_id:>20}  revoked  {node.name}")


def _registry(superlink: str | None, audit: Path | None) -> "tuple[Registry, AuditLog]":
    from fedstale.deployment.audit import LOG, AuditLog
    from fedstale.deployment.enrolment import Registry
    from fedstale.flower import command_line

    registry = Registry.of(superlink)
    return registry, AuditLog(audit or command_line.flower_home() / LOG, **registry.who)
