"""What one makes by hand for Flower (docs/deploy.md): certificates, keys, and command lines.

An authority, the SuperLink's certificate and a key for each SuperNode, for trying and for small
deployments: whoever has an authority already uses its files instead. The commands are exactly those
that one types.
"""

import datetime
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedstale.errors import ConfigError

_AUTHORITY = "fedstale authority"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files of an authority and of a SuperLink whose certificate it has signed."""

    ca: Path
    """Certificate of the authority: what SuperNodes and `flwr run` need."""
    certificate: Path
    """Of the SuperLink."""
    key: Path
    """Of the SuperLink; secret."""


def write_certificates(folder: Path, hosts: list[str]) -> TlsFiles:
    """Make an authority and a certificate of a SuperLink, which end in 30 days.

    Args:
        folder: where to write; secret keys are readable by their owner only. The authority's own
            key is not kept, so no further certificate can be signed in its name.
        hosts: names and addresses under which the SuperLink is reached, at least one.
    """
    files = TlsFiles(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca = ca_key.public_key()
    authority = _signed(_AUTHORITY, ca_key, ca_key, x509.SubjectKeyIdentifier.from_public_key(ca))
    certificate = _signed(
        hosts[0],
        key,
        ca_key,
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.SubjectAlternativeName([_host(host) for host in hosts]),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(ca),
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


def _signed(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    ca_key: ec.EllipticCurvePrivateKey,
    *extensions: x509.ExtensionType,
) -> x509.Certificate:
    """Return a certificate for a name and its key; for the authority's own key, the authority's."""
    is_ca = key is ca_key
    # A device's clock may be behind, and would find a certificate of this second not valid yet.
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    subject, issuer = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
        for common in (name, _AUTHORITY)
    )
    usage = x509.KeyUsage(
        digital_signature=not is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + 30 * day)
        .add_extension(
            x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True
        )
        .add_extension(usage, critical=True)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(ca_key, hashes.SHA256())


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


@dataclass(frozen=True, slots=True)
class Address:
    """Where a SuperLink is."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return host:port, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read host:port.

        Raises:
            ConfigError: it is no such thing.

        Example:
            >>> Address.parse("[::1]:8000").host
            '::1'
        """
        host, separator, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not (separator and host and port.isdecimal() and 0 < int(port) < 65536) or "/" in text:
            raise ConfigError(f"address = {text!r}: expected HOST:PORT, such as 10.0.0.5:8000")
        return cls(host, int(port))


def superlink(at: Address, tls: TlsFiles, database: Path) -> list[str]:
    """Return the command of a SuperLink with TLS and registered nodes only.

    Args:
        at: where it listens.
        tls: its certificate and key.
        database: SQLite file of its state.
    """
    return [
        "flower-superlink",
        *("--ssl-ca-certfile", str(tls.ca)),
        *("--ssl-certfile", str(tls.certificate)),
        *("--ssl-keyfile", str(tls.key)),
        "--enable-supernode-auth",
        *("--database", str(database)),
        *("--host", at.host),
        *("--port", str(at.port)),
        # Else the SuperLink would install what the app declares, from the network.
        "--disable-runtime-dependency-installation",
    ]


def supernode(
    link: Address, ca: Path, key: Path, *, port: int, config: Mapping[str, str | int | float]
) -> list[str]:
    """Return the command of a SuperNode.

    Args:
        link: where the SuperLink is.
        ca: certificate of the authority.
        key: the node's own, in OpenSSH's format.
        port: for the node's own ClientApps on this machine; another one for each node on it.
        config: what the ClientApp finds in `context.node_config`.
    """
    return [
        "flower-supernode",
        *("--root-certificates", str(ca)),
        *("--superlink", str(link)),
        *("--port", str(port)),
        *("--auth-supernode-private-key", str(key)),
        *("--node-config", node_config(config)),
    ]


def run(app: Path, link_name: str, run_config: str = "") -> list[str]:
    """Return the command that runs an app and shows its log."""
    command = ["flwr", "run", str(app), link_name, "--stream"]
    return [*command, "--run-config", run_config] if run_config else command


def connection(name: str, at: Address, ca: Path) -> str:
    """Return what Flower's config.toml holds about a SuperLink, as TOML."""
    return (
        f'[superlink]\ndefault = "{name}"\n\n[superlink.{name}]\naddress = "{at}"\n'
        f"root-certificates = '{ca}'\n"
    )


def node_config(config: Mapping[str, str | int | float]) -> str:
    """Return a node config as `--node-config` takes it.

    Example:
        >>> node_config({"partition-id": 0, "room": "kitchen"})
        'partition-id=0 room="kitchen"'
    """
    return " ".join(
        f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}"
        for key, value in config.items()
    )


def environment(home: Path, *, threads: int | None = None) -> dict[str, str]:
    """Return the environment of a Flower process.

    Args:
        home: its FLWR_HOME, where it unpacks apps and looks for config.toml.
        threads: for numerical libraries, unless the user has set OMP_NUM_THREADS.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    own = {
        **os.environ,
        "PATH": path,
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
    }
    # Ten polls a second take 12 % of a core from a SuperLink at rest, two take 3 %.
    own.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.5")
    if threads is not None:
        own.setdefault("OMP_NUM_THREADS", str(threads))
    return own


def found(command: list[str], environment: Mapping[str, str]) -> list[str]:
    """Return a command with the path of its program.

    Raises:
        ConfigError: Flower is not installed here.
    """
    program = shutil.which(command[0], path=environment["PATH"])
    if program is None:
        raise ConfigError(
            f"{command[0]} is not installed: expected Flower's programs beside {sys.executable}; "
            "pip install fedstale in this environment"
        )
    return [program, *command[1:]]
