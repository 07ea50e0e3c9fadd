"""The command lines of Flower's processes, exactly as one types them by hand (docs/deploy.md)."""

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedstale.deployment.certificates import TlsFiles
from fedstale.errors import ConfigError


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


def superlink(
    at: Address, tls: TlsFiles, database: Path, *, secret: Path | None = None
) -> list[str]:
    """Return the command of a SuperLink with TLS and registered nodes only.

    Args:
        at: where it listens.
        tls: its certificate and key.
        database: SQLite file of its state.
        secret: that it shares with a SuperExec; if given, ServerApps run under that one, and so
            outlive the SuperLink.
    """
    apart = ["--isolation", "process", "--superexec-auth-secret-file", str(secret)]
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
        *(apart if secret is not None else ()),
    ]


def superexec(link: Address, ca: Path, secret: Path) -> list[str]:
    """Return the command of what starts ServerApps, apart from the SuperLink."""
    return [
        "flower-superexec",
        *("--root-certificates", str(ca)),
        *("--runtime-api-address", str(link)),
        *("--superexec-auth-secret-file", str(secret)),
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
