"""The features that stand on Flower's inside, with the names that each of them needs.

Flower's public interface is `flwr.app`, `flwr.serverapp` and `flwr.clientapp`. Whatever else this
room takes of Flower is in `FEATURES`: a test finds the names in the code and compares, and another
resolves each in the Flower that is installed. So the day a new Flower comes, the list of what is
gone is the list of what to do, and until then each feature whose names are there stays on.
"""

import dis
import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

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
    names: Mapping[str, str]
    """What each name stands for, by where it is: `module:attribute` or `module:Class.attribute`."""
    since: tuple[int, int] = OLDEST
    """The oldest release with which it works: the names of earlier ones do not suffice."""

    def missing(self) -> list[str]:
        """Return the names that the Flower of this environment does not have."""
        return [name for name in self.names if not resolves(name)]

    def fault(self) -> str:
        """Return why it is off with the Flower of this environment; "" where it is on.

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
        names={
            "flwr.app:Message.__init__": "where it asks who makes messages in this process",
            "flwr.supercore.run:Run": "what a grid says of its run",
            "flwr.app:Message._metadata": "the metadata of a message, in its __dict__",
            "flwr.app:Message._content": "its records, in its __dict__",
            "flwr.app:Message._error": "its error, in its __dict__",
            "flwr.app:Metadata._message_id": "in the __dict__ of metadata, like the next ones",
            "flwr.app:Metadata._reply_to_message_id": "id of the message that a reply answers",
            "flwr.app:Metadata._src_node_id": "sender",
            "flwr.app:Metadata._dst_node_id": "receiver",
            "flwr.app:Metadata._src_task_id": "task of the sender",
            "flwr.app:Metadata._dst_task_id": "task of the receiver",
            "flwr.app:Metadata._created_at": "Unix time",
            "flwr.app:Metadata._ttl": "duration in s",
            "flwr.app:RecordDict._data": "what it holds, in its __dict__",
            "flwr.app:ArrayRecord._data": "the same",
            "flwr.app:MetricRecord._data": "the same",
            "flwr.app:ConfigRecord._data": "the same",
        },
    ),
    Feature(
        name="quick arrays",
        without="arrays are read and written Flower's own way, which takes longer",
        names={
            "flwr.app:Array.numpy": "reads an array; replaced in a run",
            "flwr.app:Array.from_numpy_ndarray": "makes one; replaced in a run",
            "flwr.app:Array._is_dirty": "whether the id of its bytes is out of date",
        },
    ),
    Feature(
        name="simulations on disk",
        without="no checkpoints are written, and a run that is lost cannot go on",
        names={
            "flwr.common.serde:message_to_proto": "a message on the wire",
            "flwr.common.serde:message_from_proto": "back again",
            "flwr.common.serde:recorddict_to_proto": "records on the wire",
            "flwr.common.serde:recorddict_from_proto": "back again",
            "flwr.proto.message_pb2:Message": "a message as protobuf",
            "flwr.proto.recorddict_pb2:RecordDict": "records as protobuf",
        },
    ),
    Feature(
        name="parts of a ServerApp",
        without="whether an app holds anything to run shows only when it runs",
        names={
            "flwr.serverapp:ServerApp._main": "the function under @app.main(), or None",
            "flwr.serverapp:ServerApp._server_fn": "the function of the older API, or None",
            "flwr.serverapp:ServerApp._server": "a Server of the older API, or None",
            "flwr.serverapp:ServerApp._config": "its config, or None",
            "flwr.serverapp:ServerApp._strategy": "its strategy, or None",
        },
    ),
    Feature(
        name="older API",
        without="an app needs a function under @app.main() and a strategy of flwr.serverapp",
        names={
            "flwr.serverapp:ServerApp._main": "None if an app is of the older API",
            "flwr.common:GetParametersIns": "asks a client for the model that it begins with",
            "flwr.common:parameters_to_ndarrays": "the arrays of the answer",
            "flwr.clientapp:ClientApp._call": "what client_fn has become; None in the other API",
            "flwr.server.server:run_fl": "lets a server run its rounds; replaced in a run",
            "flwr.server.server:fit_clients": "asks clients from threads; replaced in a run",
            "flwr.server.server:evaluate_clients": "asks clients from threads; replaced in a run",
            "flwr.server.compat.app_utils:start_update_client_manager_thread": (
                "keeps the list of clients up to date; replaced in a run"
            ),
            "flwr.server.compat:LegacyContext": "what a workflow works on; __init__ is patched",
            "flwr.server.compat.grid_client_proxy:GridClientProxy": "a client that is a node",
            "flwr.compat.common.recorddict_compat:fitins_to_recorddict": "a request in records",
            "flwr.compat.common.recorddict_compat:recorddict_to_fitres": "the answer of records",
            "flwr.compat.common.recorddict_compat:evaluateins_to_recorddict": "a request",
            "flwr.compat.common.recorddict_compat:recorddict_to_evaluateres": "the answer",
            "flwr.compat.common.recorddict_compat:parameters_to_arrayrecord": "a model in arrays",
        },
    ),
    Feature(
        name="single replies",
        since=REAL_DEVICES,
        without="Flower's grid pulls them, and waits for the slowest upload",
        names={
            "flwr.superlink.grid:HttpGrid": "what a ServerApp sends and pulls with",
            "flwr.superlink.grid:HttpGrid._runtime_client": "what it asks a SuperLink by",
            "flwr.superlink.grid:HttpGrid.node": "the node that asks",
            "flwr.proto.runtime_pb2:PullAppMessagesRequest": "which replies exist",
            "flwr.proto.runtime_pb2:PullAppMessagesResponse": "those, without their records",
            "flwr.proto.message_pb2:PullObjectRequest": "a part of a reply, by its hash",
            "flwr.proto.message_pb2:PullObjectResponse": "that part, or that it is not there",
        },
    ),
    Feature(
        name="warm ClientApps",
        since=REAL_DEVICES,
        without="fedstale node is flower-supernode: a new interpreter for each message",
        names={
            "flwr.supercore.superexec.run_superexec:run_superexec": "what flower-superexec runs",
            "flwr.supercore.superexec.run_superexec:get_executor": (
                "what it starts ClientApps with; replaced in a SuperExec"
            ),
            "flwr.supercore.superexec.executor:LaunchResult": "whether one started",
            "flwr.supercore.superexec.executor:SubprocessExecutor.launch": "starts one; overridden",
            "flwr.supercore.superexec.executor:SubprocessExecutor.reconcile": (
                "called before each question for a task; overridden"
            ),
            "flwr.supernode.runtime.run_clientapp:run_clientapp": "what flwr-clientapp runs",
            "flwr.supernode.runtime.run_clientapp:pull_task_input": (
                "its step that gets the message; replaced in a ClientApp's process"
            ),
            "flwr.supernode.runtime.run_clientapp:push_message": (
                "its step that hands over the reply; replaced in a ClientApp's process"
            ),
            "flwr.supercore.exit.exit_handler:registered_exit_handlers": (
                "what a process does at its end; emptied in a fork"
            ),
        },
    ),
    Feature(
        name="long polls of tasks",
        since=REAL_DEVICES,
        without="a node looks for messages and replies every 0.1 to 0.5 s",
        names={
            "flwr.supernode.main:create_app": "a SuperNode's Runtime API; replaced in a SuperNode",
            "flwr.supernode.start_client_internal:start_client_internal": "a SuperNode's loop",
            "flwr.supernode.start_client_internal:time": "its pauses; replaced in a SuperNode",
            "flwr.supernode.start_client_internal:_push_messages": (
                "its half that waits for a reply; replaced in a SuperNode"
            ),
            "flwr.supercore.exit:add_exit_handler": "what a process does at its end",
        },
    ),
    Feature(
        name="messages of an ended run",
        since=REAL_DEVICES,
        without="a message whose run ends as it comes is worked on, and later replies wait for it",
        names={
            "flwr.supernode.start_client_internal:start_client_internal": "a SuperNode's loop",
            "flwr.supernode.start_client_internal:_pull_and_store_message": (
                "its half that gets a message; replaced in a SuperNode"
            ),
            "flwr.supercore.run:RunNotRunningException": "how a SuperLink's refusal comes",
            "flwr.supernode.nodestate:NodeState.create_task": "a message becomes a task",
            "flwr.supernode.nodestate:NodeState.finish_task": "which ends without being done",
        },
    ),
    Feature(
        name="ServerApps of another user",
        since=REAL_DEVICES,
        without="fedstale deploy superexec runs without --user alone",
        names={
            "flwr.supercore.cli.flower_superexec:run_superexec": (
                "called when the options and the secret are read; replaced in a SuperExec"
            ),
        },
    ),
    Feature(
        name="apps",
        without="the pyproject.toml of an app cannot be read as flwr run reads it",
        names={
            "flwr.common.config:get_project_config": "reads and checks pyproject.toml",
            "flwr.common.config:flatten_dict": "tables in it become dotted keys",
            "flwr.common.config:parse_config_args": "reads --run-config",
            "flwr.supercore.object_ref:load_app": "imports module:attribute from a directory",
        },
    ),
    Feature(
        name="app bundles",
        without="no app can be checked",
        names={
            "flwr.cli.build:build_fab_from_disk": "makes what flwr run sends",
            "flwr.cli.utils:collect_files": "the files of an app",
            "flwr.common.constant:FAB_INCLUDE_PATTERNS": "those that a bundle may hold",
        },
    ),
    Feature(
        name="Control",
        since=REAL_DEVICES,
        without="operators use flwr itself to register nodes and to start runs",
        names={
            "flwr.supercore.control:ControlHttpClient": "what flwr calls a SuperLink with",
            "flwr.supercore.interceptors:RuntimeVersionHttpInterceptor": "says Flower's version",
            "flwr.proto.control_pb2:ListNodesRequest": "what it asks",
            "flwr.proto.control_pb2:RegisterNodeRequest": "the same",
            "flwr.proto.control_pb2:ListRunsRequest": "the same",
            "flwr.common.serde:run_from_proto": "reads the answer to the last",
        },
    ),
    Feature(
        name="certificates of the flwr command",
        since=REAL_DEVICES,
        without="flwr shows no certificate, and the operators' door turns it away",
        names={
            "flwr.cli.utils:ControlHttpClient": "what flwr calls a SuperLink with; replaced there",
            "flwr.supercore.control:ControlHttpClient": "the same, which is extended",
        },
    ),
    Feature(
        name="a stranger's key",
        since=REAL_DEVICES,
        without="whether a SuperLink lets in a key that nobody registered is not tried",
        names={
            "flwr.supernode.fleet_http_client:FleetHttpClient": "what a SuperNode calls with",
            "flwr.supernode.node_auth_http_interceptor:NodeAuthHttpInterceptor": "signs its calls",
            "flwr.supercore.interceptors:RuntimeVersionHttpInterceptor": "says Flower's version",
            "flwr.proto.fleet_pb2:ActivateNodeRequest": "its first call",
        },
    ),
    Feature(
        name="gate of a SuperLink",
        since=REAL_DEVICES,
        without="registered devices could give orders to one another, so no SuperLink is started",
        names={
            "flwr.superlink.cli.flower_superlink:_parse_superlink_lifespan_config": (
                "reads the options of flower-superlink"
            ),
            "flwr.superlink.cli.flower_superlink:SuperLinkLifespan": "what begins with its app",
            "flwr.superlink.main:create_app": "makes its app",
            "flwr.supercore.http_logging:get_uvicorn_log_config": "requests that no log has",
            "flwr.supercore.date:now": "the time that a signature is held against",
            "flwr.common.constant:SYSTEM_TIME_TOLERANCE": "how early a signature may be, in s",
            "flwr.common.constant:TIMESTAMP_TOLERANCE": "how late, less the former",
            "flwr.proto.fleet_pb2:PushMessagesRequest.NODE_FIELD_NUMBER": "who has signed a push",
            "flwr.proto.fleet_pb2:PushMessagesRequest.MESSAGES_LIST_FIELD_NUMBER": "its message",
            "flwr.proto.fleet_pb2:PushMessagesRequest.MESSAGE_OBJECT_TREES_FIELD_NUMBER": (
                "of which objects that consists"
            ),
            "flwr.proto.message_pb2:Metadata.REPLY_TO_MESSAGE_ID_FIELD_NUMBER": "what it answers",
            "flwr.proto.message_pb2:Metadata.SRC_NODE_ID_FIELD_NUMBER": "its sender",
            "flwr.proto.message_pb2:Metadata.DST_NODE_ID_FIELD_NUMBER": "its receiver",
            "flwr.proto.message_pb2:ObjectTree.CHILDREN_FIELD_NUMBER": "parts of an object",
            "flwr.proto.message_pb2:PushObjectRequest.NODE_FIELD_NUMBER": "who sends an object",
            "flwr.proto.message_pb2:PushObjectRequest.SESSION_ID_FIELD_NUMBER": "of which reply",
            "flwr.proto.message_pb2:PushObjectRequest.OBJECT_CONTENT_FIELD_NUMBER": "its bytes",
        },
    ),
    Feature(
        name="turns at the database",
        since=REAL_DEVICES,
        without="an upload ends its run where many write to the database at once",
        names={
            "flwr.supercore.sql_mixin:SqlMixin.session": (
                "a transaction; replaced in a SuperLink by one that waits for its turn"
            ),
            "flwr.supercore.corestate.sql_corestate:SqlCoreState.store_object": (
                "stores an object, or says False; replaced in a SuperLink by one that says why"
            ),
            "flwr.supercore.sql_mixin:SqlMixin": "owner of the former",
            "flwr.supercore.corestate.sql_corestate:SqlCoreState": "owner of the latter",
        },
    ),
    Feature(
        name="table of calls",
        since=REAL_DEVICES,
        without="no proxy can be set up, and each call takes some hundred microseconds more",
        names={
            "flwr.supercore.protobuf.translation:PROTOBUF_REQUEST_TYPES": (
                "method and path of each call of nodes, operators and ServerApps"
            ),
        },
    ),
    Feature(
        name="long polls of nodes",
        since=REAL_DEVICES,
        without="nodes ask every 3 s",
        names={
            "flwr.proto.fleet_pb2:PullMessagesRequest.NODE_FIELD_NUMBER": "who asks for work",
            "flwr.proto.fleet_pb2:PullMessagesResponse.MESSAGES_LIST_FIELD_NUMBER": "what there is",
            "flwr.proto.runtime_pb2:PushAppMessagesRequest.MESSAGES_LIST_FIELD_NUMBER": (
                "what a ServerApp sends"
            ),
            "flwr.proto.runtime_pb2:PushAppMessagesRequest.MESSAGE_OBJECT_TREES_FIELD_NUMBER": (
                "of which objects that consists"
            ),
            "flwr.proto.runtime_pb2:PushAppMessagesResponse.MESSAGE_IDS_FIELD_NUMBER": (
                "the ids; empty where a message is none"
            ),
            "flwr.proto.runtime_pb2:PushAppMessagesResponse.OBJECTS_TO_PUSH_FIELD_NUMBER": (
                "objects that are missing"
            ),
            "flwr.proto.runtime_pb2:PushAppMessagesResponse.SESSION_ID_FIELD_NUMBER": "upload",
            "flwr.proto.message_pb2:PushObjectRequest.SESSION_ID_FIELD_NUMBER": "of an object",
            "flwr.proto.message_pb2:PushObjectRequest.OBJECT_ID_FIELD_NUMBER": "which it is",
            "flwr.proto.message_pb2:ObjectTree.CHILDREN_FIELD_NUMBER": "parts of an object",
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
    """Return whether a feature is on; the log says once why one is off.

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
