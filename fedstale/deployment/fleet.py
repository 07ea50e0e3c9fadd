"""A SuperLink and some SuperNodes on this machine, started as one starts them by hand."""

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fedstale.deployment import commands, reach
from fedstale.deployment.certificates import (
    TlsFiles,
    write_certificates,
    write_node_key,
    write_secret,
)
from fedstale.deployment.commands import Address
from fedstale.deployment.control import Control
from fedstale.deployment.diagnosis import explain
from fedstale.deployment.processes import ProcessGroup
from fedstale.errors import ConfigError, FedstaleError

LINK = "up"
"""Name of the SuperLink in Flower's config.toml, as in `flwr run APP up`."""

_POLL_S = 0.2
_TRIES = 3


class Fleet:
    """A SuperLink with TLS, its state in SQLite, and SuperNodes with registered keys."""

    def __init__(
        self,
        folder: Path,
        family: ProcessGroup,
        *,
        n_nodes: int,
        limit_s: float = 120.0,
        executor_apart: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Prepare a fleet.

        Args:
            folder: an empty one, for certificates, keys, state and logs; made private.
            family: what its processes belong to.
            n_nodes: how many there will be, which apps see as num-partitions.
            limit_s: to wait for the SuperLink, or for nodes, to answer.
            executor_apart: whether ServerApps run under a SuperExec of their own, and so outlive
                the SuperLink.
            say: is told each step.
        """
        if n_nodes < 1:
            raise ConfigError(f"nodes = {n_nodes}: expected at least 1")
        self.folder, self.family, self.n_nodes = folder.resolve(), family, n_nodes
        self.limit_s, self._say = limit_s, say
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        self.tls: TlsFiles = write_certificates(self.folder, ["localhost", "127.0.0.1"])
        self._secret: Path | None = None
        if executor_apart:
            self._secret = self.folder / "superexec.secret"
            write_secret(self._secret, secrets.token_hex(32).encode())
        self.node_ids: dict[int, int] = {}
        self._at: Address | None = None
        self._control: Control | None = None

    @property
    def at(self) -> Address:
        """Where the SuperLink is."""
        assert self._at is not None, "the SuperLink has not been started"
        return self._at

    @property
    def control(self) -> Control:
        """The operator's side of the SuperLink."""
        assert self._control is not None, "the SuperLink has not been started"
        return self._control

    def log(self, name: str) -> Path:
        """Return the log of superlink, or of node-0 and so on."""
        return self.folder / f"{name}.log"

    def start_superlink(self) -> None:
        """Start the SuperLink and wait until it answers; again on the same port if it had been.

        Raises:
            FedstaleError: it does not start.
        """
        again = self._at is not None
        for left in reversed(range(1 if again else _TRIES)):
            if not again:
                self._at = Address("127.0.0.1", free_port())
            command = commands.superlink(self.at, self.tls, self._database, secret=self._secret)
            self._start("superlink", command)
            try:
                self._wait("superlink", lambda: reach.is_healthy(self.at, self.tls.ca))
                break
            except FedstaleError:
                # Between looking for a free port and using it, someone else may have taken it.
                if not left or "address already in use" not in self._text("superlink"):
                    raise
        self._control = self._control or Control(self.at, self.tls.ca)
        home = self._home("operator")
        (home / "config.toml").write_text(
            commands.connection(LINK, self.at, self.tls.ca), encoding="utf-8"
        )
        if self._secret is not None and not again:
            self._start("superexec", commands.superexec(self.at, self.tls.ca, self._secret))
        self._say(f"SuperLink at {self.at} with TLS; state in {self._database.name}")

    def add_node(self, number: int) -> None:
        """Make a key for a node, register it and start it, without waiting for it."""
        key = self.folder / f"node-{number}.key"
        self.node_ids[number] = self.control.register(write_node_key(key))
        self.start_node(number)

    def start_node(
        self, number: int, config: Mapping[str, str | int | float] | None = None
    ) -> None:
        """Start a node whose key is registered."""
        config = config or {"partition-id": number, "num-partitions": self.n_nodes}
        key = self.folder / f"node-{number}.key"
        command = commands.supernode(self.at, self.tls.ca, key, port=free_port(), config=config)
        self._start(f"node-{number}", command)

    def wait_online(self) -> None:
        """Wait until the SuperLink sees every node that was added.

        Raises:
            FedstaleError: one of them ends, or takes too long.
        """
        waiting = dict(self.node_ids)
        for number, node_id in waiting.items():
            self._wait(
                f"node-{number}",
                lambda node_id=node_id: self._is_online(node_id),  # type: ignore[misc]
            )
        self._say(f"{len(waiting)} SuperNodes online, keys registered")

    def close(self) -> None:
        """Disconnect from the SuperLink; its family ends the processes."""
        if self._control is not None:
            self._control.close()

    def operator_environment(self) -> dict[str, str]:
        """Return the environment in which `flwr run APP up` finds this SuperLink."""
        return commands.environment(self._home("operator"))

    def _is_online(self, node_id: int) -> bool:
        return self.control.nodes().get(node_id) == "online"

    @property
    def _database(self) -> Path:
        return self.folder / "superlink.db"

    def _home(self, name: str) -> Path:
        home = self.folder / f"home-{name}"
        home.mkdir(exist_ok=True)
        return home

    def _start(self, name: str, command: list[str]) -> None:
        # One node trains at a time on each core; more threads would only get in their way.
        threads = max((os.cpu_count() or 1) // self.n_nodes, 1)
        environment = commands.environment(self._home(name), threads=threads)
        self.family.start(
            name,
            commands.found(command, environment),
            environment=environment,
            log=self.log(name),
        )

    def _wait(self, name: str, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.limit_s
        while not is_there():
            if not self.family.is_running(name):
                raise FedstaleError(f"{name} ended: {self._reason(name)}")
            if time.monotonic() > deadline:
                raise FedstaleError(
                    f"{name} did not answer within {self.limit_s:g} s: {self._reason(name)}"
                )
            time.sleep(_POLL_S)

    def _reason(self, name: str) -> str:
        sentence = explain(self._text(name))
        return f"{sentence} (log: {self.log(name)})" if sentence else f"see {self.log(name)}"

    def _text(self, name: str) -> str:
        return self.log(name).read_text(encoding="utf-8", errors="replace")


def free_port() -> int:
    """Return a TCP port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
