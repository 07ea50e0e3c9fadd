"""A deployment on this machine: a SuperLink and SuperNodes, started as one starts them by hand.

All are Flower's own processes, with TLS and registered keys. They live for the length of a
`with` block and leave nothing behind.
"""

import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from fedstale.deployment import commands
from fedstale.deployment.commands import Address
from fedstale.deployment.control import Control, run_streamed
from fedstale.deployment.diagnosis import explain, is_healthy
from fedstale.deployment.doors import Doors, nginx, probe
from fedstale.deployment.processes import ProcessGroup
from fedstale.errors import ConfigError, FedstaleError
from fedstale.files import PRIVATE_FOLDER, make_private
from fedstale.flower import features
from fedstale.runs import has_earlier

LINK = "up"
"""Name of the SuperLink in Flower's config.toml, as in `flwr run APP up`."""

_POLL_S = 0.2
_LONGEST = 100
"""Bytes of a Unix socket's path: macOS takes 103, Linux 107."""
_TRIES = 3
_SETTLE_S = 20.0
_OPERATOR = "operator"
_GIVEN: set[int] = set()
"""Ports that `free_port` has returned in this process."""


class LocalDeployment:
    """A SuperLink with TLS, its state in SQLite, and SuperNodes with registered keys.

    Where nginx is installed it is in front of the SuperLink, as on a server: the SuperLink listens
    at a Unix socket in the deployment's private folder, devices and ServerApps reach their own
    paths alone, and operators need a certificate. Elsewhere the SuperLink listens on loopback,
    where every user of the machine is an operator.

    Entering its context starts everything, and leaving it ends everything.
    """

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int,
        overwrite: bool = False,
        limit_s: float = 120.0,
        say: Callable[[str], None] = lambda line: None,
        has_proxy: bool | None = None,
    ) -> None:
        """Write certificates; start nothing.

        Args:
            folder: a new one for certificates, keys, state and logs; made private.
            nodes: number of SuperNodes, which apps see as num-partitions.
            overwrite: whether an earlier deployment's folder may be replaced.
            limit_s: to wait for the SuperLink, or for nodes, to answer.
            say: is told each step.
            has_proxy: whether nginx is in front of the SuperLink; None: where it is installed.

        Raises:
            ConfigError: the folder holds something else, there is no node, or Flower is too old.
        """
        features.require("gate of a SuperLink")
        if nodes < 1:
            raise ConfigError(f"nodes = {nodes}: expected at least 1")
        if has_earlier(folder, ("superlink.log", "ca.crt"), overwrite=overwrite):
            shutil.rmtree(folder)
        self.folder, self.n_nodes, self.limit_s, self._say = folder.resolve(), nodes, limit_s, say
        self.processes, self._ends = ProcessGroup(), ExitStack()
        make_private(self.folder)
        self.folder.chmod(PRIVATE_FOLDER)
        self.tls = commands.write_certificates(
            self.folder, ["localhost", "127.0.0.1"], operators={_OPERATOR: commands.ROLES}
        )
        self.secret = self.folder / "superexec.secret"
        commands.write_private(self.secret, secrets.token_bytes(32))
        self.database = self.folder / "superlink.db"
        self.node_ids: dict[int, int] = {}
        self._node_commands: dict[str, list[str]] = {}
        self.has_proxy = has_nginx() if has_proxy is None else has_proxy
        self._has_started = False
        self._choose_ports()

    def _choose_ports(self) -> None:
        """Choose ports that are free now, and prepare to connect to them."""
        self.at = Address("127.0.0.1", free_port())
        """Where SuperNodes find the SuperLink."""
        self.doors: Doors | None = None
        """The proxy's, if there is one."""
        operators, certificate = self.at, None
        if self.has_proxy:
            operators, runtime = (Address("127.0.0.1", free_port()) for _ in range(2))
            self.doors = Doors(
                devices=self.at, operators=operators, runtime=runtime, superlink=self._socket()
            )
            certificate = self.folder / f"{_OPERATOR}.pem"
        self.control = Control(operators, self.tls.ca, certificate)
        """The operator's side of the SuperLink."""
        link = commands.connection(LINK, operators, self.tls.ca, certificate)
        commands.write_private(self._home("operator") / "config.toml", link.encode())

    def _socket(self) -> Path:
        """Return where the SuperLink listens: in a folder that nobody else may enter."""
        made = self._private("proxy") / "superlink.sock"
        if len(os.fsencode(made)) < _LONGEST:
            return made
        return Path(self._ends.enter_context(TemporaryDirectory(prefix="fedstale-"))) / made.name

    def __enter__(self) -> Self:
        """Start the SuperLink and the nodes.

        Raises:
            FedstaleError: something does not start, or strangers could reach more than they may.
        """
        with self._ends as started:
            started.enter_context(self.processes)
            started.push(lambda *problem: self.control.close())
            self.start_superlink()
            for number in range(self.n_nodes):
                self.add_node(number)
            self.wait_online()
            self._check_closed()
            self._ends = started.pop_all()
        return self

    def __exit__(self, *problem: object) -> None:
        """End everything."""
        self._ends.close()

    def log(self, name: str) -> Path:
        """Return the log of superlink, superexec, proxy, or of node-0 and so on."""
        return self.folder / f"{name}.log"

    def start_superlink(self) -> None:
        """Start the SuperLink and wait until it answers; again if it had been killed.

        The first time, what belongs to it is started as well: the proxy, and what starts
        ServerApps.

        Raises:
            FedstaleError: it does not start.
        """
        parts = ["superlink", "proxy"] if self.doors else ["superlink"]
        for left in reversed(range(1 if self._has_started else _TRIES)):
            for name in parts[:1] if self._has_started else parts:
                if not self.processes.is_running(name):
                    self.start(name)
            try:
                self._wait(parts, lambda: is_healthy(self.at, self.tls.ca))
                break
            except FedstaleError:
                # Between looking for a free port and using it, another program may take it.
                if not left or "address already in use" not in self._text(parts[-1]).lower():
                    raise
            self.control.close()
            self._choose_ports()
        if not self._has_started:
            self.start("superexec")
        self._has_started = True
        behind = "behind nginx, which is" if self.doors else "with TLS"
        self._say(f"SuperLink {behind} at {self.at}; state in {self.database.name}")

    def start(self, name: str) -> None:
        """Start superlink, proxy, superexec or a node, without waiting; again if it was killed.

        A node that was killed is rejected while the SuperLink takes it for online.
        """
        self._start(name, self._node_commands.get(name) or self._command(name))

    def _command(self, name: str) -> list[str]:
        """Return the command of the SuperLink or of what belongs to it."""
        match name, self.doors:
            case "superexec", doors:
                runtime = doors.runtime if doors else self.at
                return commands.superexec(runtime, self.tls.ca, self.secret)
            case "proxy", Doors() as doors:
                configuration = self.folder / "nginx.conf"
                # Its own user is the one who may enter the socket's folder.
                user = "root" if os.geteuid() == 0 else ""
                commands.write_private(configuration, nginx(doors, user=user).encode())
                return commands.proxy(configuration, self._private("proxy"))
            case _, doors:
                at = doors.superlink if doors else self.at
                return commands.superlink(at, self.tls, self.database, self.secret)

    def _check_closed(self) -> None:
        """Probe the devices' door as a stranger, and say the result.

        Raises:
            FedstaleError: the proxy lets something through.
        """
        if self.doors is None:
            self._say(
                "without nginx every user of this machine can run apps on this "
                "deployment; nobody else can, since it listens on loopback alone"
            )
            return
        found = probe(self.doors.devices, self.tls.ca)
        if faults := [finding.text for finding in found if finding.is_fault]:
            raise FedstaleError(f"strangers are not kept out: {'; '.join(faults)}")
        self._say("a stranger at the devices' door finds Control and Runtime closed")
        self._say("ServerApps run as this user and can read keys, secret and database")

    def add_node(self, number: int, **own: str | int | float) -> None:
        """Register a node with a key, and start it, its config with what is given; do not wait."""
        key = self.folder / f"node-{number}.key"
        self.node_ids[number] = self.control.register(commands.write_node_key(key))
        config = {"partition-id": number, "num-partitions": self.n_nodes, **own}
        self._node_commands[f"node-{number}"] = commands.supernode(
            self.at, self.tls.ca, key, port=free_port(), config=config
        )
        self.start(f"node-{number}")

    def wait_online(self) -> None:
        """Wait until the SuperLink sees every node that was added.

        Raises:
            FedstaleError: one of them ends, or takes too long.
        """
        for number in list(self.node_ids):
            self._wait([f"node-{number}"], partial(self._is_online, number))
        self._say(f"{len(self.node_ids)} SuperNodes online, keys registered")

    def operator_environment(self) -> dict[str, str]:
        """Return the environment in which `flwr run APP up` finds this SuperLink."""
        return commands.environment(self._home("operator"))

    def _is_online(self, number: int) -> bool:
        return self.control.nodes().get(self.node_ids[number]) == "online"

    def _home(self, name: str) -> Path:
        return self._private(f"home-{name}")

    def _private(self, name: str) -> Path:
        made = self.folder / name
        make_private(made)
        return made

    def _start(self, name: str, command: list[str]) -> None:
        # One node trains at a time on each core; more threads would only get in their way.
        threads = max((os.cpu_count() or 1) // self.n_nodes, 1)
        environment = commands.environment(self._home(name), threads=threads)
        found = commands.found(command, environment)
        self.processes.start(name, found, environment=environment, log=self.log(name))

    def _wait(self, names: Sequence[str], is_reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.limit_s
        while not is_reached():
            for name in names:
                if not self.processes.is_running(name):
                    raise FedstaleError(f"{name} ended: {self._reason(name)}")
            if time.monotonic() > deadline:
                raise FedstaleError(
                    f"{names[0]} did not answer within {self.limit_s:g} s: {self._reason(names[0])}"
                )
            time.sleep(_POLL_S)

    def _reason(self, name: str) -> str:
        sentence = explain(self._text(name))
        return f"{sentence} (log: {self.log(name)})" if sentence else f"see {self.log(name)}"

    def _text(self, name: str) -> str:
        return self.log(name).read_text(encoding="utf-8", errors="replace")


def has_nginx() -> bool:
    """Return whether this machine has nginx."""
    try:
        commands.found(["nginx"], os.environ)
    except ConfigError:
        return False
    return True


def run_app(
    deployment: LocalDeployment,
    app: Path,
    *,
    run_config: str = "",
    show: Callable[[str], None] = print,
) -> int:
    """Run an app on a deployment, as `flwr run APP up --stream` does.

    Args:
        deployment: with its nodes online.
        app: its folder.
        run_config: overrides, as flwr run takes them.
        show: is told each line of the log.

    Returns:
        The run's id.

    Raises:
        FedstaleError: the run did not complete; the text says why, if the log does.
    """
    environment = deployment.operator_environment()
    run_id, lines = run_streamed(app, LINK, run_config, environment=environment, show=show)
    if run_id is None:
        raise FedstaleError(f"flwr run started nothing: {_plain(lines)}")
    # The SuperLink knows a little after the last line of the log.
    status, details = deployment.control.ended(run_id, limit_s=_SETTLE_S)
    if status != "finished:completed":
        raise FedstaleError(
            f"the run {status.removeprefix('finished:')}: {details or _plain(lines[-5:])}; logs "
            f"are in {deployment.folder}"
        )
    return run_id


def free_port() -> int:
    """Return a TCP port of this machine that nothing uses now, another one each time."""
    while True:
        # A system may name the same one again, as long as nobody listens there.
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = int(probe.getsockname()[1])
        if port not in _GIVEN:
            _GIVEN.add(port)
            return port


def _plain(lines: list[str]) -> str:
    """Return the text of lines without frames."""
    return " ".join(" ".join(line.strip("│╭╮╰╯─ ") for line in lines).split())
