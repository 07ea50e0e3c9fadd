"""What one makes by hand for Flower (docs/deploy.md): certificates, keys, and command lines.

An authority, the SuperLink's certificate and a key for each SuperNode, for trying and for small
deployments: whoever has an authority already uses its files instead. The commands are exactly those
that one types.
"""

import datetime
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedstale.errors import ConfigError
from fedstale.traces.io import replacing

ROLES = ("run", "register")
"""What an operator may be allowed beyond looking: to start and stop runs, and to register nodes."""

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


def write_certificates(
    folder: Path,
    hosts: list[str],
    *,
    operators: Mapping[str, Sequence[str]] | None = None,
    days: int = 30,
    keep_authority: bool = False,
) -> TlsFiles:
    """Make an authority, a SuperLink's certificate and operators' certificates.

    Args:
        folder: where to write; all files are readable by their owner only.
        hosts: names and addresses under which the SuperLink is reached, at least one.
        operators: names, with what each may do beyond looking: run, register, or both. The file
            NAME.pem holds certificate and key.
        days: until the certificates end.
        keep_authority: whether to write the authority's own key, ca.key; otherwise no further
            certificate can be signed in its name.

    Raises:
        ConfigError: an operator has a name or a role that cannot be.
    """
    files = TlsFiles(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    named = {name: _operator(name, roles) for name, roles in (operators or {}).items()}
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca = ca_key.public_key()
    identifier = x509.SubjectKeyIdentifier.from_public_key(ca)
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca)
    authority = _signed([_AUTHORITY], ca_key, ca_key, days, identifier)
    certificate = _signed(
        [hosts[0]],
        key,
        ca_key,
        days,
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.SubjectAlternativeName([_host(host) for host in hosts]),
        signer,
    )
    pem = serialization.Encoding.PEM
    write_private(files.ca, authority.public_bytes(pem))
    write_private(files.certificate, certificate.public_bytes(pem))
    write_private(files.key, _pem(key))
    if keep_authority:
        write_private(folder / "ca.key", _pem(ca_key))
    for name, subject in named.items():
        own = ec.generate_private_key(ec.SECP256R1())
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
        shown = _signed(subject, own, ca_key, days, usage, signer)
        write_private(folder / f"{name}.pem", shown.public_bytes(pem) + _pem(own))
    return files


def _operator(name: str, roles: Sequence[str]) -> list[str]:
    """Return the common name and the units of an operator's certificate."""
    # server.pem is the server's own.
    if name == "server" or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}", name):
        raise ConfigError(
            f"operator = {name!r}: expected letters, digits, dots, hyphens or underscores, and not "
            "server"
        )
    if unknown := set(roles) - set(ROLES):
        raise ConfigError(
            f"operator {name}: role {min(unknown)!r} is unknown, expected {' or '.join(ROLES)}"
        )
    return [name, *roles]


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(pem, form, serialization.NoEncryption())


def write_node_key(path: Path) -> Path:
    """Make the key of a SuperNode, as `ssh-keygen -t ecdsa -b 384` does.

    Returns:
        The file with the public half, which is registered with the SuperLink.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(
        path,
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        ),
    )
    public = path.with_name(path.name + ".pub")
    write_private(
        public,
        key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        + b"\n",
    )
    return public


def _signed(
    names: Sequence[str],
    key: ec.EllipticCurvePrivateKey,
    ca_key: ec.EllipticCurvePrivateKey,
    days: int,
    *extensions: x509.ExtensionType,
) -> x509.Certificate:
    """Return a certificate for a key; for the authority's own key, the authority's.

    Args:
        names: common name of the owner, and organisational units.
        key: of the owner.
        ca_key: of the authority.
        days: until it ends.
        extensions: further ones.
    """
    is_ca = key is ca_key
    # A device's clock may be behind, and would find a certificate of this second not valid yet.
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    kinds = NameOID.COMMON_NAME, NameOID.ORGANIZATIONAL_UNIT_NAME
    subject, issuer = (
        x509.Name([x509.NameAttribute(kinds[i > 0], name) for i, name in enumerate(owner)])
        for owner in (names, [_AUTHORITY])
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
        .not_valid_after(now + days * day)
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


def write_private(path: Path, content: bytes) -> None:
    """Write a file that its owner only can read, whole or not at all."""
    with replacing(path, private=True) as file:
        file.write(content)


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


def superlink(at: Address | Path, tls: TlsFiles, database: Path, secret: Path) -> list[str]:
    """Return the command of a SuperLink with TLS and registered nodes only, behind the gate.

    Args:
        at: port where it listens, or its Unix socket behind a proxy.
        tls: its certificate and key.
        database: SQLite file of its state.
        secret: file that a SuperExec must know, too.
    """
    where = ["--host", at.host, "--port", str(at.port)] if isinstance(at, Address) else []
    return [
        *("fedstale", "deploy", "superlink"),
        *(["--socket", str(at)] if isinstance(at, Path) else []),
        *("--ssl-ca-certfile", str(tls.ca)),
        *("--ssl-certfile", str(tls.certificate)),
        *("--ssl-keyfile", str(tls.key)),
        "--enable-supernode-auth",
        *("--database", str(database)),
        *where,
        # Else the SuperLink would install what the app declares, from the network.
        "--disable-runtime-dependency-installation",
        *("--isolation", "process"),
        *("--superexec-auth-secret-file", str(secret)),
    ]


def superexec(runtime: Address, ca: Path, secret: Path) -> list[str]:
    """Return the command of what starts ServerApps, apart from the SuperLink.

    Args:
        runtime: where the SuperLink's Runtime API is.
        ca: certificate of the authority.
        secret: the SuperLink's file for it.
    """
    return [
        *("fedstale", "deploy", "superexec"),
        *("--root-certificates", str(ca)),
        *("--runtime-api-address", str(runtime)),
        *("--superexec-auth-secret-file", str(secret)),
    ]


def proxy(configuration: Path, state: Path) -> list[str]:
    """Return the command of nginx, which stays in the foreground.

    Args:
        configuration: its file, beside the certificates.
        state: folder for its logs and buffers.
    """
    return ["nginx", "-p", str(state), "-c", str(configuration), "-e", "stderr"]


def supernode(
    link: Address, ca: Path, key: Path, *, port: int, config: Mapping[str, str | int | float]
) -> list[str]:
    """Return the command of a SuperNode whose ClientApps start in forks.

    Args:
        link: where the SuperLink is.
        ca: certificate of the authority.
        key: the node's own, in OpenSSH's format.
        port: for the node's own ClientApps on this machine; another one for each node on it.
        config: what the ClientApp finds in `context.node_config`.
    """
    return [
        *("fedstale", "node"),
        *("--root-certificates", str(ca)),
        *("--superlink", str(link)),
        *("--port", str(port)),
        *("--auth-supernode-private-key", str(key)),
        *("--node-config", node_config(config)),
    ]


def run(app: Path, link_name: str, run_config: str = "") -> list[str]:
    """Return the command that runs an app and shows its log, as an operator."""
    command = ["fedstale", "flwr", "run", str(app), link_name, "--stream"]
    return [*command, "--run-config", run_config] if run_config else command


def connection(name: str, at: Address, ca: Path, certificate: Path | None = None) -> str:
    """Return the tables of Flower's config.toml about a SuperLink.

    Args:
        name: of the SuperLink.
        at: where its Control API is.
        ca: certificate of its authority.
        certificate: the operator's, if it must be shown.
    """
    shown = f"client-certificate = '{certificate}'\n" if certificate else ""
    return (
        f'[superlink]\ndefault = "{name}"\n\n[superlink.{name}]\naddress = "{at}"\n'
        f"root-certificates = '{ca}'\n{shown}"
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
    # nginx is where only root's path leads.
    path = f"{environment['PATH']}{os.pathsep}/usr/sbin{os.pathsep}/usr/local/sbin"
    program = shutil.which(command[0], path=path)
    if program is None:
        raise ConfigError(
            f"{command[0]} is not installed: "
            + (
                "apt-get install nginx, or brew install nginx"
                if command[0] == "nginx"
                else f"expected Flower's programs beside {sys.executable}; pip install flwr in "
                "this environment"
            )
        )
    return [program, *command[1:]]
