"""The features that stand on Flower's inside, with the names that each of them needs.

Flower's public interface is `flwr.app`, `flwr.serverapp` and `flwr.clientapp`. Whatever else this
room takes of Flower is in `FEATURES`: a test finds the names in the code and compares, and another
resolves each in the Flower that is installed. So the day a new Flower comes, the list of what is
gone is the list of what to do, and until then each feature whose names are there stays on. What
Flower has dropped that apps import is in dropped.toml, with its name of today.
"""

import dis
import importlib
import logging
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import flwr

from fedstale.errors import ConfigError

logger = logging.getLogger(__name__)

OLDEST, NEWEST = (1, 34), (1, 42)
"""Oldest and newest release that the tests have run with; a nightly of 1.43 is not 1.43.0."""
REAL_DEVICES = (1, 41)
"""The oldest one whose SuperLink and SuperNodes do what a deployment stands on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Something of fedstale's that stands on names which Flower keeps to itself."""

    name: str
    without: str
    """What is done where a name is gone; ends the sentence "NAME is off: ..."."""
    inside: Mapping[str, str]
    """The names that it takes of each module; their users say what each stands for."""
    since: tuple[int, int] = OLDEST
    """The oldest release with which it works: the names of earlier ones do not suffice."""

    @property
    def names(self) -> list[str]:
        """What it stands on: `module:attribute` or `module:Class.attribute`."""
        return [f"{module}:{name}" for module, all_ in self.inside.items() for name in all_.split()]

    def missing(self) -> list[str]:
        """Return the names that the Flower of this environment does not have."""
        return [name for name in self.names if not resolves(name)]

    def fault(self) -> str:
        """Return the reason that it is off with the installed Flower; "" if it is on.

        Ends the sentence "it is off, since Flower ...".
        """
        if release() < self.since:
            return f"is older than {_text(self.since)}"
        missing = self.missing()
        return f"has no {', no '.join(missing)}" if missing else ""

    def expected(self) -> str:
        """Return with which releases of Flower it was tested."""
        return f"expected flwr {_text(self.since)} to {_text(NEWEST)}, with which it was tested"


FEATURES: tuple[Feature, ...] = (
    Feature(
        name="simulation",
        without="nothing can be simulated",
        inside={
            "flwr.app": (
                "Message.__init__ Message._metadata Message._content Message._error "
                "Metadata._message_id Metadata._reply_to_message_id Metadata._src_node_id "
                "Metadata._dst_node_id Metadata._src_task_id Metadata._dst_task_id "
                "Metadata._created_at Metadata._ttl RecordDict._data ArrayRecord._data "
                "MetricRecord._data ConfigRecord._data"
            ),
            "flwr.supercore.run": "Run",
        },
    ),
    Feature(
        name="quick arrays",
        without="arrays are read and written Flower's own way, which takes longer",
        inside={
            "flwr.app": "Array.numpy Array.from_numpy_ndarray Array._is_dirty",
        },
    ),
    Feature(
        name="simulations on disk",
        without="no checkpoints are written, and a run that is lost cannot go on",
        inside={
            "flwr.common.serde": (
                "message_to_proto message_from_proto recorddict_to_proto recorddict_from_proto"
            ),
            "flwr.proto.message_pb2": "Message",
            "flwr.proto.recorddict_pb2": "RecordDict",
        },
    ),
    Feature(
        name="parts of a ServerApp",
        without="whether an app holds anything to run shows only when it runs",
        inside={
            "flwr.serverapp": (
                "ServerApp._main ServerApp._server_fn ServerApp._server ServerApp._config "
                "ServerApp._strategy"
            ),
        },
    ),
    Feature(
        name="older API",
        without="an app needs a function under @app.main() and a strategy of flwr.serverapp",
        inside={
            "flwr.serverapp": "ServerApp._main",
            "flwr.common": "GetParametersIns parameters_to_ndarrays",
            "flwr.clientapp": "ClientApp._call",
            "flwr.server.server": "run_fl fit_clients evaluate_clients",
            "flwr.server.compat.app_utils": "start_update_client_manager_thread",
            "flwr.server.compat": "LegacyContext",
            "flwr.server.compat.grid_client_proxy": "GridClientProxy",
            "flwr.compat.common.recorddict_compat": (
                "fitins_to_recorddict recorddict_to_fitres evaluateins_to_recorddict "
                "recorddict_to_evaluateres parameters_to_arrayrecord"
            ),
        },
    ),
    Feature(
        name="single replies",
        since=REAL_DEVICES,
        without="Flower's grid pulls them, and waits for the slowest upload",
        inside={
            "flwr.superlink.grid": "HttpGrid HttpGrid._runtime_client HttpGrid.node",
            "flwr.proto.runtime_pb2": "PullAppMessagesRequest PullAppMessagesResponse",
            "flwr.proto.message_pb2": "PullObjectRequest PullObjectResponse",
        },
    ),
    Feature(
        name="warm ClientApps",
        since=REAL_DEVICES,
        without="fedstale node is flower-supernode: a new interpreter for each message",
        inside={
            "flwr.supercore.superexec.run_superexec": "run_superexec get_executor",
            "flwr.supercore.superexec.executor": (
                "LaunchResult SubprocessExecutor.launch SubprocessExecutor.reconcile"
            ),
            "flwr.supernode.runtime.run_clientapp": "run_clientapp pull_task_input push_message",
            "flwr.supercore.exit.exit_handler": "registered_exit_handlers",
        },
    ),
    Feature(
        name="long polls of tasks",
        since=REAL_DEVICES,
        without="a node looks for messages and replies every 0.1 to 0.5 s",
        inside={
            "flwr.supernode.main": "create_app",
            "flwr.supernode.start_client_internal": "start_client_internal time _push_messages",
            "flwr.supercore.exit": "add_exit_handler",
        },
    ),
    Feature(
        name="messages of an ended run",
        since=REAL_DEVICES,
        without="a message whose run ends as it comes is worked on, and later replies wait for it",
        inside={
            "flwr.supernode.start_client_internal": "start_client_internal _pull_and_store_message",
            "flwr.supercore.run": "RunNotRunningException",
            "flwr.supernode.nodestate": "NodeState.create_task NodeState.finish_task",
        },
    ),
    Feature(
        name="ServerApps of another user",
        since=REAL_DEVICES,
        without="fedstale deploy superexec runs without --user alone",
        inside={
            "flwr.supercore.cli.flower_superexec": "run_superexec",
        },
    ),
    Feature(
        name="apps",
        without="the pyproject.toml of an app cannot be read as flwr run reads it",
        inside={
            "flwr.common.config": "get_project_config flatten_dict parse_config_args",
            "flwr.supercore.object_ref": "load_app",
        },
    ),
    Feature(
        name="app bundles",
        without="no app can be checked",
        inside={
            "flwr.cli.build": "build_fab_from_disk",
            "flwr.cli.utils": "collect_files",
            "flwr.common.constant": "FAB_INCLUDE_PATTERNS",
        },
    ),
    Feature(
        name="Control",
        since=REAL_DEVICES,
        without="operators use flwr itself to register nodes and to start runs",
        inside={
            "flwr.supercore.control": "ControlHttpClient",
            "flwr.supercore.interceptors": "RuntimeVersionHttpInterceptor",
            "flwr.proto.control_pb2": "ListNodesRequest RegisterNodeRequest ListRunsRequest",
            "flwr.common.serde": "run_from_proto",
        },
    ),
    Feature(
        name="certificates of the flwr command",
        since=REAL_DEVICES,
        without="flwr shows no certificate, and the operators' door turns it away",
        inside={
            "flwr.cli.utils": "ControlHttpClient",
            "flwr.supercore.control": "ControlHttpClient",
        },
    ),
    Feature(
        name="a stranger's key",
        since=REAL_DEVICES,
        without="whether a SuperLink lets in a key that nobody registered is not tried",
        inside={
            "flwr.supernode.fleet_http_client": "FleetHttpClient",
            "flwr.supernode.node_auth_http_interceptor": "NodeAuthHttpInterceptor",
            "flwr.supercore.interceptors": "RuntimeVersionHttpInterceptor",
            "flwr.proto.fleet_pb2": "ActivateNodeRequest",
        },
    ),
    Feature(
        name="gate of a SuperLink",
        since=REAL_DEVICES,
        without="registered devices could give orders to one another, so no SuperLink is started",
        inside={
            "flwr.superlink.cli.flower_superlink": (
                "_parse_superlink_lifespan_config SuperLinkLifespan"
            ),
            "flwr.superlink.main": "create_app",
            "flwr.supercore.http_logging": "get_uvicorn_log_config",
            "flwr.supercore.date": "now",
            "flwr.common.constant": "SYSTEM_TIME_TOLERANCE TIMESTAMP_TOLERANCE",
            "flwr.proto.fleet_pb2": (
                "PushMessagesRequest.NODE_FIELD_NUMBER "
                "PushMessagesRequest.MESSAGES_LIST_FIELD_NUMBER "
                "PushMessagesRequest.MESSAGE_OBJECT_TREES_FIELD_NUMBER"
            ),
            "flwr.proto.message_pb2": (
                "Metadata.REPLY_TO_MESSAGE_ID_FIELD_NUMBER Metadata.SRC_NODE_ID_FIELD_NUMBER "
                "Metadata.DST_NODE_ID_FIELD_NUMBER ObjectTree.CHILDREN_FIELD_NUMBER "
                "PushObjectRequest.NODE_FIELD_NUMBER PushObjectRequest.SESSION_ID_FIELD_NUMBER "
                "PushObjectRequest.OBJECT_CONTENT_FIELD_NUMBER"
            ),
        },
    ),
    Feature(
        name="turns at the database",
        since=REAL_DEVICES,
        without="an upload ends its run where many write to the database at once",
        inside={
            "flwr.supercore.sql_mixin": "SqlMixin.session SqlMixin",
            "flwr.supercore.corestate.sql_corestate": "SqlCoreState.store_object SqlCoreState",
        },
    ),
    Feature(
        name="table of calls",
        since=REAL_DEVICES,
        without="no proxy can be set up, and each call takes some hundred microseconds more",
        inside={
            "flwr.supercore.protobuf.translation": "PROTOBUF_REQUEST_TYPES",
        },
    ),
    Feature(
        name="long polls of nodes",
        since=REAL_DEVICES,
        without="nodes ask every 3 s",
        inside={
            "flwr.proto.fleet_pb2": (
                "PullMessagesRequest.NODE_FIELD_NUMBER "
                "PullMessagesResponse.MESSAGES_LIST_FIELD_NUMBER"
            ),
            "flwr.proto.runtime_pb2": (
                "PushAppMessagesRequest.MESSAGES_LIST_FIELD_NUMBER "
                "PushAppMessagesRequest.MESSAGE_OBJECT_TREES_FIELD_NUMBER "
                "PushAppMessagesResponse.MESSAGE_IDS_FIELD_NUMBER "
                "PushAppMessagesResponse.OBJECTS_TO_PUSH_FIELD_NUMBER "
                "PushAppMessagesResponse.SESSION_ID_FIELD_NUMBER"
            ),
            "flwr.proto.message_pb2": (
                "PushObjectRequest.SESSION_ID_FIELD_NUMBER "
                "PushObjectRequest.OBJECT_ID_FIELD_NUMBER ObjectTree.CHILDREN_FIELD_NUMBER"
            ),
        },
    ),
)


def resolves(name: str) -> bool:
    """Return whether a name is there; the last one may be of a class, or of its objects alone.

    Example:
        >>> resolves("flwr.app:Message.metadata"), resolves("flwr.app:Nothing"), resolves("flwr.no")
        (True, False, False)
    """
    module, _, path = name.partition(":")
    try:
        found: object = importlib.import_module(module)
        for part in filter(None, path.split(".")):
            if isinstance(found, type) and part in _own_names(found):
                return True
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return True


@cache
def _own_names(kind: type) -> set[object]:
    """Collect the names that methods of a class store, or look up by a text."""
    methods = (value for base in kind.__mro__ for value in vars(base).values())
    codes = (getattr(getattr(each, "fget", each), "__code__", None) for each in methods)
    return {
        step.argval
        for code in filter(None, codes)
        for step in dis.get_instructions(code)
        if step.opname in ("STORE_ATTR", "LOAD_CONST")
    }


def release() -> tuple[int, ...]:
    """Return major and minor number of the Flower of this environment."""
    return tuple(int(part) for part in flwr.__version__.split(".")[:2] if part.isdecimal())


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _feature(name: str) -> Feature:
    (found,) = (each for each in FEATURES if each.name == name)
    return found


@cache
def has(name: str) -> bool:
    """Test if a feature is on; the log says once the reason if it is off.

    Args:
        name: of one of `FEATURES`.
    """
    feature = _feature(name)
    fault = feature.fault()
    if fault:
        logger.warning(
            "%s: off with Flower %s, which %s: %s",
            *(name, flwr.__version__, fault, feature.without),
        )
    return not fault


@cache
def _warn_if_newer() -> None:
    """Say once, in the log, that this Flower is newer than any that the tests have run with."""
    if release() > NEWEST:
        logger.warning(
            "Flower %s is newer than %s, the newest that this fedstale was tested with: "
            "fedstale doctor lists what is on and off with it",
            *(flwr.__version__, _text(NEWEST)),
        )


def require(name: str) -> None:
    """Raise if a feature is off; the log says once where Flower is newer than tests.

    Args:
        name: of one of `FEATURES`.

    Raises:
        ConfigError: a name that it stands on is gone.
    """
    _warn_if_newer()
    feature = _feature(name)
    if fault := feature.fault():
        raise ConfigError(
            f"{name}: Flower {flwr.__version__} {fault}: {feature.without}; {feature.expected()}"
        )


_DOORS = "flwr.app", "flwr.serverapp", "flwr.clientapp", "flwr.client", "flwr.server", "flwr.common"
"""Where a name is looked for that a module had only imported itself."""


@cache
def moved() -> Mapping[str, Mapping[str, str]]:
    """Read, of each old module, the modules that hold its names now: "NAME" or "OLD>NEW"."""
    return tomllib.loads(Path(__file__).with_name("dropped.toml").read_text(encoding="utf-8"))


def missing_in(module: str, names: Sequence[str]) -> str:
    """List what an import asks of Flower that the installed one has not, with the names of today.

    Example:
        >>> missing_in("flwr.server.driver", ["Driver"])
        'flwr.server.driver.Driver (now Grid of flwr.serverapp)'
    """
    if module.partition(".")[0] != "flwr":
        return ""
    lost = [name for name in names if name != "*"]
    if resolves(module):
        lost = [n for n in lost if not any(resolves(f"{module}{c}{n}") for c in ":.")]
    elif not lost:
        return _with_its_place(module)
    return ", ".join(_with_its_place(f"{module}.{name}") for name in lost)


def _with_its_place(lost: str) -> str:
    """Return a name that Flower has dropped, and where its like is now, if anywhere."""
    module, _, name = lost.rpartition(".")
    if lost in moved():
        return f"{lost} (see {' and '.join(moved()[lost])})"
    for place, entries in moved().get(module, {}).items():
        for old, _, new in (entry.partition(">") for entry in entries.split()):
            if old == name:
                return f"{lost} (now {new or old} of {place})"
    place = next((door for door in _DOORS if resolves(f"{door}:{name}")), "")
    return f"{lost} (now of {place})" if place else lost
