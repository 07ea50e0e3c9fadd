"""Certificates and keys: an authority, the SuperLink's certificate, and a key for each SuperNode.

For trying and for small deployments. Whoever has an authority already uses its files instead.
"""

import datetime
import os
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedstale.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files of an authority and of a SuperLink whose certificate it has signed."""

    ca: Path
    """Certificate of the authority: what SuperNodes and `flwr run` need."""
    certificate: Path
    """Of the SuperLink."""
    key: Path
    """Of the SuperLink; secret."""


def write_certificates(folder: Path, hosts: list[str], *, days: int = 30) -> TlsFiles:
    """Make an authority and a certificate of a SuperLink.

    Args:
        folder: where to write; secret keys are readable by their owner only. The authority's own
            key is not kept, so no further certificate can be signed in its name.
        hosts: names and addresses under which the SuperLink is reached.
        days: until both end.

    Raises:
        ConfigError: there is no host, or an odd number of days.
    """
    if not hosts:
        raise ConfigError("hosts = []: expected names or addresses of the SuperLink")
    if days < 1:
        raise ConfigError(f"days = {days}: expected at least 1")
    files = TlsFiles(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name = _name("fedstale authority")
    authority = (
        _builder(ca_name, ca_name, ca_key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), False)
        .sign(ca_key, hashes.SHA256())
    )
    certificate = (
        _builder(_name(hosts[0]), ca_name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False
        )
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    files.ca.write_bytes(authority.public_bytes(pem))
    files.certificate.write_bytes(certificate.public_bytes(pem))
    write_secret(
        files.key,
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
    return files


def write_node_key(path: Path) -> Path:
    """Make the key of a SuperNode, as `ssh-keygen -t ecdsa -b 384` does.

    Returns:
        The file with the public half, which is registered with the SuperLink.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(
        path,
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        ),
    )
    public = path.with_name(path.name + ".pub")
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        + b"\n"
    )
    return public


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    # A device's clock may be behind, and would find a certificate of this second not valid yet.
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + days * day)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def write_secret(path: Path, secret: bytes) -> None:
    """Write a file that its owner only can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret)
