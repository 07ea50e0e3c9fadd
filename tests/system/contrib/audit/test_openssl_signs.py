"""A head that OpenSSL has signed, as operators sign it, is checked."""

import subprocess

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from made_record import run
from typer.testing import CliRunner

from fedstale.cli.main import app
from fedstale.contrib.audit import verify


def test_a_signature_of_the_head_by_openssl_is_checked(tmp_path):
    record = run(tmp_path / "run", until="3 rounds", traces="ideal:20").folder
    key, signature = ec.generate_private_key(ec.SECP384R1()), tmp_path / "head.sig"
    none, pem = serialization.NoEncryption(), serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, none)
    (tmp_path / "server.key").write_bytes(secret)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    (tmp_path / "server.pub").write_bytes(key.public_key().public_bytes(pem, form))
    head = verify(record).head
    command = ["openssl", "dgst", "-sha256", "-sign", tmp_path / "server.key", "-out", signature]
    subprocess.run(command, input=head.encode(), check=True)
    words = ["audit", "--verify", record, "--signature", signature, "--key"]
    shown = CliRunner().invoke(app, [*map(str, [*words, tmp_path / "server.pub"])])
    assert shown.exit_code == 0, shown.output
