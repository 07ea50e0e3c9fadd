"""Certificates and keys, as OpenSSL and OpenSSH read them."""

import shutil
import subprocess

import pytest
from flwr.cli.supernode.register import try_load_public_key

from fedstale.deployment.commands import write_certificates, write_node_key


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return write_certificates(tmp_path_factory.mktemp("tls"), ["localhost", "127.0.0.1"])


def test_flower_and_ssh_keygen_read_a_nodes_key(tmp_path):
    public = write_node_key(tmp_path / "node")
    assert try_load_public_key(public)
    if shutil.which("ssh-keygen"):
        command = ["ssh-keygen", "-y", "-f", str(tmp_path / "node")]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        assert run.stdout.split()[:2] == public.read_text().split()[:2]


def test_openssl_verifies_the_chain(tls):
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    command = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver"]
    command += ["-CAfile", str(tls.ca), str(tls.certificate)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
