"""An operator's side of a SuperLink: where config.toml of Flower says it is, and its Control."""

import re
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from fedstale.config import read_toml
from fedstale.deployment import commands
from fedstale.deployment.commands import Address
from fedstale.deployment.diagnosis import show_certificate
from fedstale.deployment.processes import ProcessGroup
from fedstale.errors import ConfigError, FedstaleError
from fedstale.flower import command_line

_POLL_S = 2.0
_STARTED = re.compile(r"started run (\d+)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def superlinks() -> dict[str, dict[str, Any]]:
    """Return the SuperLinks of Flower's config.toml.

    Raises:
        ConfigError: it cannot be read.
    """
    path = command_line.flower_home() / "config.toml"
    table = read_toml(path).get("superlink", {}) if path.is_file() else {}
    return {key: value for key, value in table.items() if isinstance(value, dict)}


def superlink(name: str) -> dict[str, Any]:
    """Return a SuperLink of Flower's config.toml.

    Raises:
        ConfigError: the file cannot be read, or has none of this name.
    """
    links = superlinks()
    if name not in links:
        known = f"expected one of {sorted(links)}" if links else "it names none"
        path = command_line.flower_home() / "config.toml"
        raise ConfigError(
            f"superlink = {name!r} is not in {path}: {known}; add a table [superlink.{name}] with "
            "address and root-certificates"
        )
    return links[name]


def operators_side(name: str) -> tuple[Address, Path, Path | None]:
    """Return how an operator reaches a SuperLink of Flower's config.toml.

    Returns:
        Its address, the certificate of its authority, and the operator's own if there is one.

    Raises:
        ConfigError: there is none of this name, or it has no address or no certificates.
    """
    link = superlink(name)
    ca, own = link.get("root-certificates"), link.get("client-certificate")
    if not ca:
        raise ConfigError(
            f"superlink = {name!r}: expected address and root-certificates in config.toml, as "
            "fedstale deploy init writes them"
        )
    at = Address.parse(str(link.get("address")))
    return at, Path(ca).expanduser(), Path(own).expanduser() if own else None


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

        Raises:
            ConfigError: the operator's certificate cannot be used, or others may read it.
        """
        context = ssl.create_default_context(cafile=str(ca))
        if certificate is not None:
            show_certificate(context, certificate)
        self._at, self._client = at, command_line.ControlClient(f"https://{at}", context)

    def register(self, public_key: Path) -> int:
        """Register the owner of a key.

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
        statuses = {run_id: run.status for run_id, run in self._client.runs().items()}
        return {
            run_id: (":".join(filter(None, (one.status, one.sub_status))), one.details)
            for run_id, one in statuses.items()
        }

    def unfinished(self, app: Path, run_config: str) -> int | None:
        """Return the run of an app with the same overrides that has not ended, if there is one.

        Args:
            app: its folder.
            run_config: overrides, as flwr run takes them.
        """
        about = read_toml(app / "pyproject.toml")
        fab_id = f"{about['tool']['flwr']['app']['publisher']}/{about['project']['name']}"
        asked = fab_id, command_line.parsed_config([run_config])
        for run_id, run in self._client.runs().items():
            if (run.fab_id, run.override_config) == asked and run.status.status != "finished":
                return run_id
        return None

    def ended(self, run_id: int, *, limit_s: float = inf) -> tuple[str, str]:
        """Wait until a run has ended; the SuperLink may be away meanwhile.

        Args:
            run_id: of the run.
            limit_s: longest wait in s.

        Returns:
            Its status and details then.

        Raises:
            FedstaleError: the SuperLink knows no such run any more.
        """
        deadline = time.monotonic() + limit_s
        found = "unknown", "the SuperLink does not answer"
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                runs = self.runs()
                if run_id not in runs:
                    raise FedstaleError(
                        f"run {run_id} is not in the database of the SuperLink at {self._at}, "
                        "which was lost or changed: register the nodes again; the same command "
                        "then goes on from the checkpoints"
                    )
                found = runs[run_id]
            if found[0].startswith("finished"):
                break
            time.sleep(_POLL_S)
        return found

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


def run_streamed(
    app: Path,
    link: str,
    run_config: str,
    *,
    environment: Mapping[str, str],
    show: Callable[[str], None],
) -> tuple[int | None, list[str]]:
    """Start a run by `flwr run --stream`, and show its log to the end.

    Args:
        app: folder of the app.
        link: name of the SuperLink in Flower's config.toml.
        run_config: overrides, as flwr run takes them.
        environment: in which flwr finds config.toml.
        show: is told each line of the log.

    Returns:
        The run's id, None if it has not started; and the lines.
    """
    command = commands.found(commands.run(app, link, run_config), environment)
    run_id, lines = None, []
    with (
        ProcessGroup() as processes,
        processes.output_of("flwr run", command, environment=environment) as output,
    ):
        for line in output:
            lines.append(_COLOUR.sub("", line))
            show(lines[-1])
            found = _STARTED.search(lines[-1])
            run_id = int(found[1]) if found and run_id is None else run_id
    return run_id, lines
