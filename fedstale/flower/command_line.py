"""What Flower's commands do, done in our process: apps, their bundles, Control, a stranger's call.

All names here were read in Flower 1.41 to 1.43. Each is imported where it is used, so that a
command loads no more than it needs, and a name that is gone takes no other command along.
"""

import logging
import os
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, SSHPublicKeyTypes
from flwr.app import UserConfig

from fedstale.errors import ConfigError
from fedstale.flower import features

HEARTBEAT_S = 30
"""Time between two heartbeats of a SuperNode, in s."""
PROTOBUF = "application/protobuf"
"""Media type of what Flower's programs send each other."""


def flower_home() -> Path:
    """Return the folder of Flower's config.toml and apps."""
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")


def program(name: str) -> Callable[[], None]:
    """Load the function of one of Flower's programs, such as flower-supernode.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        found: Callable[[], None] = entry_points(group="console_scripts")[name].load()
    except KeyError:
        raise ConfigError(f"{name}: not installed for {sys.executable}") from None
    return found


def project_config(directory: Path) -> dict[str, Any]:
    """Return the pyproject.toml of an app, checked as `flwr run` does.

    Raises:
        OSError: there is none.
        ValueError: it is none of an app.
    """
    from flwr.common.config import get_project_config

    return get_project_config(directory)


def flat(config: dict[str, Any]) -> UserConfig:
    """Return a table with dotted keys in place of tables in it."""
    from flwr.common.config import flatten_dict

    return flatten_dict(config)


def parsed_config(texts: Sequence[str]) -> UserConfig:
    """Parse `--run-config`: key=value pairs, or the name of a .toml file.

    Raises:
        click.ClickException, ValueError, OSError: it says no such thing.
    """
    from flwr.common.config import parse_config_args

    return parse_config_args(list(texts))


def load_app(reference: str, error: type[Exception], directory: Path) -> Any:
    """Load the object of a reference, module:attribute, in an app's directory.

    Args:
        reference: to it.
        error: raised if the reference is none, or the module has no such attribute.
        directory: of the app, which comes first on the path from then on.
    """
    from flwr.supercore import object_ref

    return object_ref.load_app(reference, error, directory)


def app_files(directory: Path) -> dict[str, Path]:
    """Return the files of an app's directory by their names in it, but for links."""
    from flwr.cli.utils import collect_files

    return collect_files(directory)


def bundle(directory: Path) -> bytes:
    """Return the zip file that `flwr run` sends of an app.

    Raises:
        ValueError, OSError: Flower cannot make one.
    """
    features.require("app bundles")
    from flwr.cli.build import build_fab_from_disk

    return build_fab_from_disk(directory)


def bundled_patterns() -> Sequence[str]:
    """Return which files a bundle holds, as lines of a .gitignore."""
    from flwr.common.constant import FAB_INCLUDE_PATTERNS

    return FAB_INCLUDE_PATTERNS


def public_pem(key: SSHPublicKeyTypes) -> bytes:
    """Return a public key as Flower stores and sends it."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


class ControlClient:
    """Calls a SuperLink's Control as the flwr command does; the first call connects."""

    def __init__(self, url: str, context: ssl.SSLContext) -> None:
        """Prepare to connect.

        Args:
            url: of the SuperLink, or of the operators' door in front of it.
            context: whom to trust, and the certificate that is shown.

        Raises:
            ConfigError: this Flower has no such Control.
        """
        features.require("Control")
        from flwr.supercore.control import ControlHttpClient

        self._client = ControlHttpClient(url, verify=context, interceptors=[_version("flwr CLI")])

    def list_nodes(self) -> Sequence[Any]:
        """Return all nodes that were ever registered: `node_id`, `name`, `public_key`, `status`."""
        from flwr.proto.control_pb2 import ListNodesRequest

        return self._client.ListNodes(ListNodesRequest()).nodes_info

    def register_node(self, public_key: bytes) -> int:
        """Register the owner of a key, in PEM; return the node's id."""
        from flwr.proto.control_pb2 import RegisterNodeRequest

        request = RegisterNodeRequest(public_key=public_key)
        return int(self._client.RegisterNode(request).node_id)

    def runs(self) -> dict[int, Any]:
        """Return Flower's `Run` of each run: `fab_id`, `override_config`, `status` and more."""
        from flwr.common.serde import run_from_proto
        from flwr.proto.control_pb2 import ListRunsRequest

        runs = self._client.ListRuns(ListRunsRequest()).run_dict
        return {int(run_id): run_from_proto(run) for run_id, run in runs.items()}

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


def activate(address: str, ca: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Ask a SuperLink to be a node of it, as a SuperNode with a key does.

    Raises:
        httpx.HTTPStatusError: it refuses.
    """
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    public = key.public_key()
    with FleetHttpClient.from_server_address(
        address,
        insecure=False,
        root_certificates=ca.read_bytes(),
        interceptors=[_version("SuperNode"), NodeAuthHttpInterceptor(key, public)],
    ) as client:
        client.ActivateNode(
            ActivateNodeRequest(public_key=public_pem(public), heartbeat_interval=HEARTBEAT_S)
        )


def verify_with(context: Callable[[str, Any], Any]) -> None:
    """Set by a function the certificates that the flwr command, in this process, shows and trusts.

    Args:
        context: returns what httpx is to verify with, for the address of a SuperLink and what
            Flower would verify with.
    """
    import flwr.cli.utils
    from flwr.supercore.control import ControlHttpClient

    class Operator(ControlHttpClient):
        """What flwr calls a SuperLink with."""

        def __init__(self, base_url: str, *, verify: Any = True, **named: Any) -> None:
            address = base_url.partition("://")[2]
            super().__init__(base_url, verify=context(address, verify), **named)

    vars(flwr.cli.utils)["ControlHttpClient"] = Operator


def console() -> Any:
    """Return the handler that shows Flower's log; it writes to `stream`, `colored` or not."""
    import flwr  # noqa: F401 - makes it

    streams = (
        h for h in logging.getLogger("flwr").handlers if isinstance(h, logging.StreamHandler)
    )
    return next(streams, logging.StreamHandler())


@contextmanager
def quiet_console() -> Iterator[None]:
    """Show no more than warnings of Flower's log; if the user has set a level, as that says."""
    flower, shows = logging.getLogger("flwr"), console()
    before = shows.level
    if (flower.level, before) == (logging.DEBUG, logging.INFO):  # as Flower sets them
        shows.setLevel(logging.WARNING)
    try:
        yield
    finally:
        shows.setLevel(before)


def _version(component: str) -> Any:
    """Return an interceptor that states the component and its version of Flower to a SuperLink."""
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    return RuntimeVersionHttpInterceptor(component_name=component)
