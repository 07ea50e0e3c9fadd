"""Another key for a node, in the database that the installed Flower makes."""

import re
import sqlite3
from contextlib import closing

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from databases import on_disk
from hostile import Device
from places import ROOT


@pytest.fixture
def link(tmp_path):
    return on_disk(lambda app: app, tmp_path / "link.db")


def activates(link, device):
    """Return whether Flower lets a device in."""
    answer = link.post("/v1/fleet/activate-node", device, device.joining(), device.headers())
    return answer.is_success


def test_another_key_keeps_the_node_s_id_and_ends_the_old_key(link, tmp_path):
    old, new = link.victim, Device(node_id=link.victim.node_id)
    # What ssh-keygen -e -m PKCS8 writes.
    pem = new.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "kitchen.pem").write_bytes(pem)
    page = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
    command = re.search(r'"(UPDATE node .*)"', page)[1].replace("'kitchen'", "?")
    with closing(sqlite3.connect(tmp_path / "link.db")) as opened, opened:
        opened.create_function("readfile", 1, lambda name: (tmp_path / name).read_bytes())
        opened.execute("UPDATE node SET name = 'kitchen' WHERE node_id = ?", (signed(old.node_id),))
        assert opened.execute(command, ("attic",)).rowcount == 0
        assert opened.execute(command, ("kitchen",)).rowcount == 1
    assert link.state.get_node_id_by_public_key(new.public) == old.node_id
    assert link.state.get_node_id_by_public_key(old.public) is None
    assert not activates(link, old)


def signed(node_id):
    """Return an id as SQLite holds it, whose numbers have a sign."""
    return node_id - 2**64 if node_id >= 2**63 else node_id
