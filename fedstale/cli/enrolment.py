"""`fedstale deploy enrol`, `rotate` and `revoke`: who may be a node of a SuperLink."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedstale.cli.output import AsJson, one_sentence, say, say_json
from fedstale.errors import ConfigError

if TYPE_CHECKING:
    from fedstale.deployment.audit import AuditLog
    from fedstale.deployment.enrolment import Registry

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
    log = AuditLog(audit or database.parent / LOG, database=str(database))
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
    from flwr.supercore.utils import get_flwr_home

    from fedstale.deployment.audit import LOG, AuditLog
    from fedstale.deployment.enrolment import Registry

    registry = Registry.of(superlink)
    return registry, AuditLog(audit or get_flwr_home() / LOG, **registry.who)
