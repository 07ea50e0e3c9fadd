"""An operator's side of a SuperLink: where config.toml of Flower says it is, and its Control."""

import ssl
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from fedstale.config import read_toml
from fedstale.deployment.commands import Address
from fedstale.deployment.diagnosis import show_certificate
from fedstale.errors import ConfigError, FedstaleError
from fedstale.flower import command_line


def superlinks() -> dict[str, dict[str, Any]]:
    """Return the SuperLinks of Flower's config.toml.

    Raises:
        ConfigError: it cannot be read.
    """
    path = command_line.flower_home() / "config.toml"
    table = read_toml(path).get("superlink", {}) if path.is_file() else {}
    return {key: value for key, value in table.items() if isinstance(value, dict)}


def operators_side(name: str | None) -> tuple[Address, Path, Path | None]:
    """Return how an operator reaches a SuperLink of Flower's config.toml.

    Args:
        name: in the file; None takes the only one.

    Returns:
        Its address, the certificate of its authority, and the operator's own if there is one.

    Raises:
        ConfigError: there is none of this name, or it has no address or no certificates.
    """
    links = superlinks()
    if name is None and len(links) == 1:
        name = next(iter(links))
    if name is None or name not in links:
        raise ConfigError(f"superlink = {name!r}: expected one of {sorted(links)}")
    link = links[name]
    ca, own = link.get("root-certificates"), link.get("client-certificate")
    if not ca:
        raise ConfigError(
            f"superlink = {name!r}: expected address and root-certificates in config.toml, as "
            "fedstale deploy init writes them"
        )
    at = Address.parse(str(link.get("address")))
    return at, Path(ca).expanduser(), Path(own).expanduser() if own else None


def control_client(at: Address, ca: Path, certificate: Path | None) -> command_line.ControlClient:
    """Return what calls Control at an address; the first call connects.

    Args:
        at: where the SuperLink, or the operators' door in front of it, is.
        ca: certificate of the authority that signed the SuperLink's.
        certificate: the operator's, with its key, for the door.

    Raises:
        ConfigError: the operator's certificate cannot be used, or others may read it.
    """
    context = ssl.create_default_context(cafile=str(ca))
    if certificate is not None:
        show_certificate(context, certificate)
    return command_line.ControlClient(f"https://{at}", context)


class Control:
    """What an operator does at a SuperLink: register nodes, list nodes, list runs.

    The same interface as behind `flwr supernode register`, `flwr supernode list` and `flwr list`,
    without a new process of seconds for each call.
    """

    def __init__(self, at: Address, ca: Path, certificate: Path | None = None) -> None:
        """Prepare to connect; the first call does.

        Args:
            at: where the SuperLink, or the operators' door in front of it, is.
            ca: certificate of the authority that signed the SuperLink's.
            certificate: the operator's, with its key, for the door.
        """
        self._at, self._client = at, control_client(at, ca, certificate)

    def register(self, public_key: Path) -> int:
        """Let the owner of a key join.

        Args:
            public_key: file from `write_node_key`, or as `ssh-keygen -t ecdsa -b 384` makes it.

        Returns:
            The node's id, which stays the same for this key.

        Raises:
            FedstaleError: the SuperLink rejects it.
        """
        key = load_ssh_public_key(public_key.read_bytes())
        try:
            return self._client.register_node(command_line.public_pem(key))
        except httpx.HTTPError as problem:
            raise FedstaleError(
                f"the SuperLink at {self._at} did not register {public_key}: {problem}"
            ) from problem

    def nodes(self) -> dict[int, str]:
        """Return the status of each node: registered, online, offline or unregistered."""
        nodes = self._client.list_nodes()
        return {int(node.node_id): str(node.status) for node in nodes}

    def runs(self) -> dict[int, tuple[str, str]]:
        """Return status and details of each run: running, or finished:completed and the like."""
        statuses = {run_id: run.status for run_id, run in self.details().items()}
        return {
            run_id: (":".join(filter(None, (one.status, one.sub_status))), one.details)
            for run_id, one in statuses.items()
        }

    def details(self) -> dict[int, Any]:
        """Return all that the SuperLink tells of each run, as Flower's `Run`."""
        return self._client.runs()

    def close(self) -> None:
        """Disconnect."""
        self._client.close()
