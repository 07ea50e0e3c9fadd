"""A running Ray cluster, joined and checked before anything is sent to it.

Ray itself compares its version and Python's where a machine joins a cluster. Results depend on
more: a node that has another fedstale, or other libraries that compute, is refused with a sentence
before the first run. The token of a cluster, if it wants one, is the user's. Ray finds it where it
always looks: with RAY_AUTH_MODE=token, in RAY_AUTH_TOKEN, else in the file that RAY_AUTH_TOKEN_PATH
names, else in ~/.ray/auth_token.
"""

import hashlib
import importlib
import logging
import os
import platform
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fedstale
from fedstale.errors import ConfigError, needs
from fedstale.machine import release

_PLACE = re.compile(r"auto|([\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}")
_COMPUTING = ("flwr", "numpy", "torch")
_QUIET = {
    # Else Ray warns of what a later version will do.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_NOBODY = "no Ray cluster answers there: expected a running one, as ray start --head starts it"
_TOKEN = (
    "what answers there lets in only who has its token, or is no Ray cluster: set "
    "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or the file ~/.ray/auth_token"
)
_LISTENS_S = 10.0
_ANSWER_S = 120.0
"""What a node has to start a process and to import fedstale."""


def check_address(address: str) -> None:
    """Check how an address is spelt, and that Ray is installed; nothing is connected to.

    Raises:
        ConfigError: it is none, or Ray is missing.
    """
    if not isinstance(address, str) or not _PLACE.fullmatch(address):
        raise ConfigError(
            f"address = {address!r}: expected auto, or HOST:PORT of a running Ray cluster as "
            "ray start --head prints it"
        )
    if find_spec("ray") is None:
        raise ConfigError(f"address = {address!r} {needs('ray')}")


@contextmanager
def joined(address: str) -> Iterator[int]:
    """Join a running cluster, check its nodes, and yield how many cores it has now.

    A process that is connected to Ray already stays connected as it is.

    Raises:
        ConfigError: there is no such cluster, this machine is none of its nodes, it wants a token,
            or a node has other versions than this machine.
    """
    check_address(address)
    before = {name: os.environ.get(name) for name in _QUIET}
    os.environ.update(_QUIET)
    import ray  # noqa: PLC0415 - an extra, and seconds to import

    is_ours = not ray.is_initialized()
    try:
        if is_ours:
            _join(ray, address)
        _check_nodes(ray, address)
        found: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        yield int(found.get("CPU", 0))
    finally:
        if is_ours:
            ray.shutdown()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes for the same results."""
    import ray  # noqa: PLC0415 - an extra

    found = {
        "fedstale": f"{fedstale.__version__} ({_source()})",
        "Python": platform.python_version(),
        "Ray": str(ray.__version__),
    }
    for package in _COMPUTING:
        with suppress(PackageNotFoundError):
            found[package] = release(package)
    return found


def require_same(ours: Mapping[str, str], theirs: Mapping[str, str], where: str) -> None:
    """Check that a node has the versions of the machine that asks.

    Raises:
        ConfigError: it has others, or none.
    """
    if not theirs:
        raise ConfigError(
            f"{where} has no fedstale: install version {ours['fedstale']} on every node, into the "
            "Python that Ray runs with"
        )
    for name, own in ours.items():
        if theirs.get(name) != own:
            raise ConfigError(
                f"{where} has {name} {theirs.get(name, 'not installed')}, and this machine {own}: "
                "expected the same on all nodes, because results depend on it"
            )


@cache
def _source() -> str:
    """Return a checksum of fedstale's files: many commits have one version."""
    digest = hashlib.blake2b(digest_size=4)
    root = Path(fedstale.__file__).parent
    found = [
        Path(folder, name)
        # Three of the packages are links in a checkout.
        for folder, _, names in os.walk(root, followlinks=True)
        for name in names
        if name.endswith(".py")
    ]
    for path in sorted(found, key=lambda path: path.relative_to(root).as_posix()):
        data = path.read_bytes()
        name = path.relative_to(root).as_posix()
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def _join(ray: Any, address: str) -> None:
    in_main = threading.current_thread() is threading.main_thread()
    terminated, log = signal.getsignal(signal.SIGTERM), logging.getLogger("ray")
    level = log.level
    _require_answer(address)
    try:
        ray.init(address=address, logging_level=logging.CRITICAL, log_to_driver=False)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as problem:
        raise ConfigError(f"address = {address!r}: {_why(problem)}") from None
    finally:
        log.setLevel(level)
        # Ray takes the place of who asked to hear it.
        if in_main:
            signal.signal(signal.SIGTERM, terminated)


def _require_answer(address: str) -> None:
    """Check that something listens; Ray itself tries for long, and tells the terminal of it."""
    host, _, port = address.rpartition(":")
    if not host:
        # Ray knows where the cluster of this machine is.
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _LISTENS_S).close()
    except OSError:
        raise ConfigError(f"address = {address!r}: {_NOBODY}") from None


def _why(problem: Exception) -> str:
    """Return in a sentence why a cluster cannot be joined."""
    text = " ".join(str(problem).split())
    if "ersion mismatch" in text:
        return text
    # Of a token that is wrong Ray says that it cannot connect.
    if "oken" in text or "Failed to connect" in text:
        return _TOKEN
    if "node" in text and ("IP" in text or "matching" in text or "local" in text):
        return (
            "this machine is no node of the cluster: join it with ray start --address=HOST:PORT "
            "--num-cpus=0, which runs nothing here, or call this on a node"
        )
    return _NOBODY


def _check_nodes(ray: Any, address: str) -> None:
    """Check what every node has that can run something; all are asked at the same time."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    # An inner function travels as it is: a node that has no fedstale can run it.
    def has() -> dict[str, str]:
        try:
            found: dict[str, str] = importlib.import_module(
                "fedstale.cluster.connection"
            ).versions()
        except ImportError:
            return {}
        return found

    task = ray.remote(num_cpus=0, max_retries=0)(has)
    asked = {}
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get("CPU", 0) >= 1:
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            reference = task.options(scheduling_strategy=place).remote()
            asked[reference] = node["NodeID"], node["NodeManagerAddress"]
    ours = versions()
    until = time.monotonic() + _ANSWER_S
    for reference, (node_id, place) in asked.items():
        where = f"address = {address!r}: node {place}"
        try:
            theirs = ray.get(reference, timeout=max(until - time.monotonic(), 0.0))
        except ray.exceptions.RayError as problem:
            if _is_gone(ray, node_id, until):
                continue
            said = str(problem).strip().splitlines()[-1:]
            raise ConfigError(f"{where} could not be asked: {' '.join(said)}") from None
        require_same(ours, theirs, where)


def _is_gone(ray: Any, node_id: str, until: float) -> bool:
    """Test if a node is dead; the cluster may need half a minute to notice."""
    while True:
        if not any(node["Alive"] and node["NodeID"] == node_id for node in ray.nodes()):
            return True
        if time.monotonic() > until:
            return False
        time.sleep(1.0)
