import json
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from made_record import lines_of, run, written
from typer.testing import CliRunner

import fedstale
from fedstale.cli.main import app
from fedstale.contrib.audit import verify
from fedstale.contrib.audit.record import RECORD

MINE = """
from fedstale.strategies.selection import Selector


class First(Selector):
    def select(self, candidates, k, now, rng):
        return candidates.node_ids[:k].tolist()


number = 3
"""


def ran(*arguments):
    return CliRunner().invoke(app, ["audit", "--verify", *map(str, arguments)])


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    found = fedstale.simulate(
        "digits",
        traces="synthetic:20",
        until="3 rounds",
        out=folder / "run",
        run_config={"strategy": "FedBuff(10, 5, selector=AgentSelector(), stages=[AuditRecord()])"},
    )
    return found.folder


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Return a folder with the server's key, public in three forms, as deployments have them."""
    folder = tmp_path_factory.mktemp("keys")
    key = ec.generate_private_key(ec.SECP384R1())
    none = serialization.NoEncryption()
    pem, form = serialization.Encoding.PEM, serialization.PublicFormat
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, none)
    public = key.public_key()
    (folder / "server.key").write_bytes(secret)
    (folder / "server.pub").write_bytes(public.public_bytes(pem, form.SubjectPublicKeyInfo))
    ssh = public.public_bytes(serialization.Encoding.OpenSSH, form.OpenSSH)
    (folder / "server.ssh").write_bytes(ssh)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
    now = datetime(2026, 1, 1, tzinfo=UTC)
    made = x509.CertificateBuilder(name, name, public, 1, now, now + timedelta(days=9))
    (folder / "server.crt").write_bytes(made.sign(key, hashes.SHA256()).public_bytes(pem))
    other = rsa.generate_private_key(65537, 2048).public_key()
    (folder / "rsa.pub").write_bytes(other.public_bytes(pem, form.SubjectPublicKeyInfo))
    (folder / "none.pub").write_text("no key")
    return folder


def test_a_record_that_holds_is_said_with_its_head(record):
    done = ran(record)
    head = json.loads((record / "summary.json").read_text())["record"]["head"]
    n = len(lines_of(record / RECORD))
    assert done.exit_code == 0, done.output
    first, second = done.output.splitlines()
    assert first.startswith(f"the record holds: {n} lines, and all ")
    assert second == f"head {head}"
    assert ran(record, "--head", head).exit_code == 0


def test_what_is_wrong_ends_with_exit_code_1(record, tmp_path):
    path = written(tmp_path / "r", lines_of(record / RECORD)[:-1])
    done = ran(path)
    assert done.exit_code == 1
    assert "the last one and not the end of a run" in done.output
    assert "the record does not hold: 1 fault found" in done.output
    facts = json.loads(ran(path, "--json").stdout)
    assert not facts["holds"]
    assert len(facts["faults"]) == 1


def test_picks_that_cannot_be_made_again_end_with_exit_code_3(tmp_path, monkeypatch):
    (tmp_path / "my_rules.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    from my_rules import First

    found = run(tmp_path / "run", First(), until="3 rounds")
    done = ran(found.folder)
    assert done.exit_code == 3
    assert "the selector is 'my_rules.First', which is not of fedstale" in done.output
    assert ran(found.folder, "--selector", "my_rules:First").exit_code == 0
    for name in ("my_rules", "my_rules:Second", "nothing:First", "my_rules:number", ":"):
        done = ran(found.folder, "--selector", name)
        assert done.exit_code == 2, name
        assert f"selector = {name!r}" in done.output


def test_a_signature_of_the_head_is_checked(record, keys, tmp_path):
    head = verify(record).head
    signature = tmp_path / "head.sig"
    key = serialization.load_pem_private_key((keys / "server.key").read_bytes(), None)
    signature.write_bytes(key.sign(head.encode(), ec.ECDSA(hashes.SHA256())))
    for public in ("server.pub", "server.ssh", "server.crt"):
        assert ran(record, "--signature", signature, "--key", keys / public).exit_code == 0
    other = written(tmp_path / "r", lines_of(record / RECORD)[:-1])
    shown = ("--signature", signature, "--key", keys / "server.pub")
    done = ran(other, *shown)
    assert done.exit_code == 1
    assert "is no signature of the head" in done.output
    # What was signed is the head that was published, and the record does not have it.
    done = ran(other, "--head", head, *shown)
    assert done.exit_code == 1
    assert f"no line has the hash {head}" in done.output


@pytest.mark.parametrize("key", ["rsa.pub", "none.pub", "missing.pub"])
def test_what_is_no_key_of_a_deployment_is_refused_in_a_sentence(key, record, keys, tmp_path):
    (tmp_path / "sig").write_bytes(b"x")
    done = ran(record, "--signature", tmp_path / "sig", "--key", keys / key)
    assert done.exit_code == 2
    assert "ECDSA" in done.output or "cannot be read" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--head", "abc"], "head = 'abc': expected 64 hex digits"),
        (["--signature", "x"], "signature and key: expected both"),
        (["--fail-on-alarm"], "--fail-on-alarm beside --verify"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments, words, record):
    done = ran(record, *arguments)
    assert done.exit_code == 2
    assert words in done.output


def test_options_of_a_record_need_verify(record):
    done = CliRunner().invoke(app, ["audit", str(record), "--head", "abc"])
    assert done.exit_code == 2
    assert "--head: expected beside --verify" in done.output


def test_a_record_of_flowers_own_strategy_is_refused(tmp_path):
    text = "strategy='flower.FedAvg(stages=[AuditRecord()])'"
    words = ["simulate", "digits", "--out", str(tmp_path / "run"), "-c", text]
    done = CliRunner().invoke(app, words)
    assert "flower.FedAvg has no setting 'stages'" in done.output
