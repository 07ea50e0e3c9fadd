"""An operator's side of a SuperLink: where config.toml of Flower says it is, and its Control."""

import ssl
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_public_key,
)
from flwr.common.serde import run_from_proto
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, RegisterNodeRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.run import Run
from flwr.supercore.utils import get_flwr_home

from fedstale.config import read_toml
from fedstale.deployment.commands import Address
from fedstale.deployment.diagnosis import show_certificate
from fedstale.errors import ConfigError, FedstaleError


def superlinks() -> dict[str, dict[str, Any]]:
    """Return the SuperLinks of Flower's config.toml.

    Raises:
        ConfigError: it cannot be read.
    """
    path = get_flwr_home() / "config.toml"
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


def control_client(at: Address, ca: Path, certificate: Path | None) -> ControlHttpClient:
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
    return ControlHttpClient(
        f"https://{at}",
        verify=context,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
    )


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
        pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        try:
            return int(self._client.RegisterNode(RegisterNodeRequest(public_key=pem)).node_id)
        except httpx.HTTPError as problem:
            raise FedstaleError(
                f"the SuperLink at {self._at} did not register {public_key}: {problem}"
            ) from problem

    def nodes(self) -> dict[int, str]:
        """Return the status of each node: registered, online, offline or unregistered."""
        nodes = self._client.ListNodes(ListNodesRequest()).nodes_info
        return {int(node.node_id): str(node.status) for node in nodes}

    def runs(self) -> dict[int, tuple[str, str]]:
        """Return status and details of each run: running, or finished:completed and the like."""
        statuses = {run_id: run.status for run_id, run in self.details().items()}
        return {
            run_id: (":".join(filter(None, (one.status, one.sub_status))), one.details)
            for run_id, one in statuses.items()
        }

    def details(self) -> dict[int, Run]:
        """Return all that the SuperLink tells of each run."""
        runs = self._client.ListRuns(ListRunsRequest()).run_dict
        return {int(run_id): run_from_proto(proto) for run_id, proto in runs.items()}

    def close(self) -> None:
        """Disconnect."""
        self._client.close()
