"""Certificates and keys, and who may read them."""

import stat

import pytest

from fedstale.deployment.commands import write_certificates, write_node_key


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return write_certificates(tmp_path_factory.mktemp("tls"), ["localhost", "127.0.0.1"])


def test_secrets_are_readable_by_their_owner_only(tls, tmp_path):
    public = write_node_key(tmp_path / "node")
    for secret in (tls.key, tmp_path / "node"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert b"PRIVATE" not in public.read_bytes() + tls.ca.read_bytes()
