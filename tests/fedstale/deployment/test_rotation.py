"""Another key for a node, in the database that the installed Flower makes."""

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from databases import on_disk
from hostile import Device
from typer.testing import CliRunner

from fedstale.cli.main import app as fedstale


@pytest.fixture
def link(tmp_path):
    return on_disk(lambda app: app, tmp_path / "link.db")


def activates(link, device):
    """Return whether Flower lets a device in."""
    answer = link.post("/v1/fleet/activate-node", device, device.joining(), device.headers())
    return answer.is_success


def write_public(path, key):
    path.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return path


def rotate(node, key, database, code=0):
    words = ["deploy", "rotate", str(node), str(key), "--database", str(database)]
    result = CliRunner().invoke(fedstale, words)
    assert result.exit_code == code, result.output + result.stderr
    return result.stderr if code else result.stdout


def test_another_key_keeps_the_node_s_id_and_ends_the_old_key(link, tmp_path):
    old, new = link.victim, Device(node_id=link.victim.node_id)
    key, at = write_public(tmp_path / "new.pub", new.key), tmp_path / "link.db"
    assert f"node {old.node_id} has another key" in rotate(old.node_id, key, at)
    assert link.state.get_node_id_by_public_key(new.public) == old.node_id
    assert link.state.get_node_id_by_public_key(old.public) is None
    assert not activates(link, old)
    assert "was registered before" in rotate(link.mallory.node_id, key, at, code=2)
    assert "0 registered nodes" in rotate("attic", key, at, code=2)


def test_other_keys_and_files_that_are_no_database_are_one_sentence(tmp_path):
    (none := tmp_path / "none").write_bytes(b"nothing" * 1000)
    key = write_public(tmp_path / "key.pub", Device().key)
    other = write_public(tmp_path / "other.pub", ed25519.Ed25519PrivateKey.generate())
    assert "expected a key of a NIST curve" in rotate("a", other, none, code=2)
    assert "no public key of OpenSSH" in rotate("a", none, none, code=2)
    assert "expected the file of flower-superlink" in rotate("a", key, none, code=2)
    assert "expected the file of flower-superlink" in rotate("a", key, tmp_path / "x", code=2)
