"""Many nodes let in by a table of keys, given other keys and sent away, on a real SuperLink."""

import csv
import json
import os
import ssl
import stat
import subprocess
import sys
import urllib.request
from datetime import UTC, datetime
from urllib.error import HTTPError

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)
from flwr.proto.fleet_pb2 import ActivateNodeResponse
from hostile import Device
from typer.testing import CliRunner

from fedstale.cli.main import app
from fedstale.deployment.audit import AuditLog
from fedstale.deployment.check import expiries
from fedstale.deployment.commands import write_certificates, write_node_key
from fedstale.deployment.enrolment import NodeKey, read_keys
from fedstale.errors import ConfigError


def device(path):
    """Make a key file and return its owner."""
    write_node_key(path)
    return Device(load_ssh_private_key(path.read_bytes(), None))


def line(path):
    return path.with_name(f"{path.name}.pub").read_text().strip()


def write_table(path, rows):
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["name", "room", "public_key"])
        table.writerows([name, "somewhere", key] for name, key in rows)
    return path


def join(deployment, device):
    """Return the id under which a key's owner joins, or None if it may not."""
    request = urllib.request.Request(
        f"https://{deployment.at}/v1/fleet/activate-node",
        device.joining().SerializeToString(),
        device.headers(),
    )
    context = ssl.create_default_context(cafile=str(deployment.tls.ca))
    try:
        with urllib.request.urlopen(request, context=context, timeout=30) as answer:
            return ActivateNodeResponse.FromString(answer.read()).node_id
    except HTTPError as refused:
        refused.close()
        return None


@pytest.fixture
def fedstale(deployment, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", deployment.operator_environment()["FLWR_HOME"])
    audit = tmp_path / "audit.jsonl"

    def run(command, *arguments, code=0):
        result = CliRunner().invoke(
            app, ["deploy", command, *map(str, arguments), "--audit", str(audit)]
        )
        assert result.exit_code == code, result.output + result.stderr
        return result.stderr if code else result.stdout

    run.audit = lambda: [json.loads(text) for text in audit.read_text().splitlines()]
    return run


@pytest.mark.deployment
def test_a_table_of_keys_lets_nodes_in_and_each_change_is_in_the_log(
    deployment, fedstale, tmp_path
):
    names = ["kitchen", "hall", "cellar"]
    owners = {name: device(tmp_path / name) for name in names}
    stranger = device(tmp_path / "stranger")
    table = write_table(tmp_path / "nodes.csv", [(n, line(tmp_path / n)) for n in names])
    out = tmp_path / "list.csv"
    fedstale("enrol", table, "--out", out)
    listed = {row["name"]: row for row in csv.DictReader(out.read_text().splitlines())}
    ids = {name: int(row["node_id"]) for name, row in listed.items()}
    assert list(ids) == names
    keygen = subprocess.check_output(["ssh-keygen", "-lf", tmp_path / "hall.pub"], text=True)
    assert listed["hall"]["key"] == keygen.split()[1]
    try:
        # Twice changes nothing, and says the same.
        again = json.loads(fedstale("enrol", table, "--json"))["nodes"]
        assert again == {name: str(node_id) for name, node_id in ids.items()}
        assert join(deployment, stranger) is None
        assert join(deployment, owners["kitchen"]) == ids["kitchen"]

        # Another key for a name is a rotation, which keeps the id, and ends the old key.
        changed = device(tmp_path / "hall-2")
        other = write_table(tmp_path / "other.csv", [("hall", line(tmp_path / "hall-2"))])
        assert "deploy rotate" in fedstale("enrol", other, code=2)
        key, database = tmp_path / "hall-2.pub", deployment.database
        fedstale("rotate", "hall", key, "--database", database)
        assert join(deployment, owners["hall"]) is None
        assert join(deployment, changed) == ids["hall"]
        assert "was registered before" in fedstale(
            "rotate", "kitchen", key, "--database", database, code=2
        )
        assert "0 registered nodes" in fedstale(
            "rotate", "attic", key, "--database", database, code=2
        )
        # Who is known by its new key is enrolled already.
        assert str(ids["hall"]) in fedstale("enrol", other)

        # What was revoked stays outside.
        assert "0 registered nodes" in fedstale("revoke", "cellar", "attic", code=2)
        assert deployment.control.nodes()[ids["cellar"]] == "registered"
        said = json.loads(fedstale("revoke", "cellar", ids["kitchen"], "--json"))
        assert said == {
            "out": str(tmp_path / "audit.jsonl"),
            "nodes": {name: str(ids[name]) for name in ("cellar", "kitchen")},
        }
        assert join(deployment, owners["cellar"]) is None
        assert join(deployment, owners["kitchen"]) is None
        assert "revoked" in fedstale("enrol", table, code=2)
    finally:
        left = deployment.control.nodes()
        fedstale("revoke", *[i for i in ids.values() if left[i] != "unregistered"])
    seen = [
        (one["what"], one["outcome"], one["node_id"])
        for one in fedstale.audit()
        if "node_id" in one and one["outcome"] == "done"
    ]
    assert seen == [
        *(("enrol", "done", str(ids[name])) for name in names),
        ("rotate", "done", str(ids["hall"])),
        *(("revoke", "done", str(ids[name])) for name in ("cellar", "kitchen", "hall")),
    ]
    assert [one["what"] for one in fedstale.audit() if one["outcome"] == "failed"] == ["rotate"]
    first = fedstale.audit()[0]
    assert first["outcome"] == "tried"
    if deployment.doors:
        assert first["operator"] == "operator"
    age = datetime.now(UTC) - datetime.fromisoformat(first["at"])
    assert 0 <= age.total_seconds() < 600


def test_the_log_is_private_and_only_grows(tmp_path):
    path = tmp_path / "log.jsonl"
    before = os.umask(0)
    try:
        log = AuditLog(path, superlink="here")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    log.add("enrol", "done", name="a\nb")
    text = path.read_bytes()
    with pytest.raises(RuntimeError, match="broken"), log.noted("revoke", name="a"):
        raise RuntimeError("broken")
    assert path.read_bytes().startswith(text)
    lines = [json.loads(one) for one in path.read_text().splitlines()]
    assert [one["outcome"] for one in lines] == ["done", "tried", "failed"]
    assert lines[0]["name"] == "a\nb"
    assert lines[2]["reason"] == "broken"
    assert all({"at", "user", "host", "superlink"} <= one.keys() for one in lines)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        AuditLog(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        AuditLog(tmp_path / "link")


def test_lines_of_two_commands_at_once_stay_whole(tmp_path):
    code = (
        "import sys; from pathlib import Path; from fedstale.deployment.audit import AuditLog\n"
        "log = AuditLog(Path(sys.argv[1]))\n"
        "for i in range(50): log.add('enrol', 'done', name='x' * 9000)"
    )
    path = tmp_path / "log.jsonl"
    both = [subprocess.Popen([sys.executable, "-c", code, str(path)]) for _ in range(2)]
    assert [one.wait(120) for one in both] == [0, 0]
    assert len([json.loads(text) for text in path.read_text().splitlines()]) == 100


def test_a_line_is_on_the_disk_before_the_call_returns(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    log = AuditLog(tmp_path / "log.jsonl")
    log.add("enrol", "done")
    assert synced == [(tmp_path / "log.jsonl").stat().st_size]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], "below the header"),
        ([("a", "A"), ("a", "B")], r":3: the name of line 2 again"),
        ([("a", "A"), ("b", "A")], r":3: the key of line 2 again"),
        ([("a", "A"), ("17", "B")], r":3: name = '17'"),
        ([("", "A")], r":2: name = ''"),
        ([("a", "nothing")], r":2: node 'a': no public key"),
        ([("a", "ed25519")], r":2: node 'a': expected a key of a NIST curve"),
    ],
)
def test_a_table_with_a_line_that_is_unusable_is_refused_whole(tmp_path, rows, expected):
    public = ed25519.Ed25519PrivateKey.generate().public_key()
    keys = {"ed25519": public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()}
    for name in "AB":
        write_node_key(tmp_path / name)
        keys[name] = line(tmp_path / name)
    table = write_table(tmp_path / "nodes.csv", [(n, keys.get(key, key)) for n, key in rows])
    with pytest.raises(ConfigError, match=expected):
        read_keys(table)


def test_a_key_is_read_as_ssh_keygen_writes_it(tmp_path):
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", tmp_path / "k"], check=True
    )
    key = NodeKey.parse("k", line(tmp_path / "k"))
    shown = subprocess.check_output(["ssh-keygen", "-lf", tmp_path / "k.pub"], text=True)
    assert key.fingerprint == shown.split()[1]


def test_certificates_that_end_are_told_before(tmp_path):
    for days in (1, 13, 40):
        folder = tmp_path / str(days)
        folder.mkdir()
        write_certificates(folder, ["localhost"], operators={"me": []}, days=days)
    assert expiries(tmp_path / "40" / "ca.crt", None) == []
    (soon,) = expiries(tmp_path / "13" / "me.pem")
    assert (soon.is_fault, "ends in 12 days" in soon.text) == (False, True)
    gone = tmp_path / "gone"
    gone.mkdir()
    write_certificates(gone, ["localhost"], days=-1)
    (ended,) = expiries(gone / "ca.crt")
    assert (ended.is_fault, "has ended" in ended.text) == (True, True)
    # Both authorities are in the file while one follows the other.
    both = tmp_path / "both.crt"
    both.write_bytes((gone / "ca.crt").read_bytes() + (tmp_path / "40" / "ca.crt").read_bytes())
    assert expiries(both) == []
    with pytest.raises(ConfigError, match="is no certificate"):
        expiries(tmp_path / "40" / "server.key")


@pytest.mark.deployment
def test_check_says_that_a_certificate_ends_soon(deployment, tmp_path, monkeypatch):
    monkeypatch.setattr("fedstale.deployment.check.SOON_DAYS", 60)
    monkeypatch.setattr("fedstale.deployment.probe.SOON_DAYS", 60)
    at, ca = str(deployment.at), str(deployment.tls.ca)
    result = CliRunner().invoke(app, ["check", "--server", at, "--ca", ca])
    assert f"note: the certificate in {ca} ends in 29 days: renew it" in result.stdout
    monkeypatch.setenv("FLWR_HOME", deployment.operator_environment()["FLWR_HOME"])
    result = CliRunner().invoke(app, ["check", "digits", "up"])
    assert result.exit_code == 0, result.stdout
    for name in ("ca.crt", "operator.pem") if deployment.doors else ("ca.crt",):
        assert f"{deployment.folder / name} ends in 29 days" in result.stdout
