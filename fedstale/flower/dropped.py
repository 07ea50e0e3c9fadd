"""What Flower has dropped, and what it is called now: for apps that were written for an older one.

The table was made from the names of 25 releases, 1.4 to 1.41, that 1.42 lacks: modules that apps
were taught to import, and names that left a module which is still there. Where a new name has the
place of an old one, the new one is named, also where the old one is still an alias somewhere.
"""

import ast
import linecache
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import flwr

from fedstale.flower.features import resolves

_RECORDS = {
    "flwr.app": "Array ArrayRecord ConfigRecord MetricRecord RecordDict "
    "ParametersRecord>ArrayRecord ConfigsRecord>ConfigRecord MetricsRecord>MetricRecord "
    "RecordSet>RecordDict",
    "flwr.common": "array_from_numpy",
}
_COMPAT = {
    "flwr.compat.common.recorddict_compat": " ".join(
        f"{ins}_to_recordset>{ins}_to_recorddict recordset_to_{ins}>recorddict_to_{ins} "
        f"{ins}_to_recorddict recorddict_to_{ins}"
        for kind in ("fit", "evaluate", "getparameters", "getproperties")
        for ins in (f"{kind}ins", f"{kind}res")
    )
    + " parametersrecord_to_parameters>arrayrecord_to_parameters arrayrecord_to_parameters"
    + " parameters_to_parametersrecord>parameters_to_arrayrecord parameters_to_arrayrecord"
}
_GRID = {"flwr.serverapp": "Grid Driver>Grid"}
_TTL = {"flwr.app": "DEFAULT_TTL Error Message MessageType Metadata"}
_DOORS = "flwr.app", "flwr.serverapp", "flwr.clientapp", "flwr.client", "flwr.server", "flwr.common"
"""Where a name is looked for that a module had only imported itself."""

MOVED: Mapping[str, Mapping[str, str]] = {
    "flwr.client.app": {"flwr.client": "start_client start_numpy_client"},
    "flwr.client.client": {"flwr.client": "Client"},
    "flwr.client.client_app": {"flwr.clientapp": "ClientApp"},
    "flwr.client.dpfedavg_numpy_client": {
        "flwr.compat.client.dpfedavg_numpy_client": "DPFedAvgNumPyClient"
    },
    "flwr.client.flower": {"flwr.clientapp": "Flower>ClientApp"},
    "flwr.client.middleware": {"flwr.client.mod": "make_ffn"},
    "flwr.client.mod": {"flwr.clientapp.mod": "parameters_size_mod>arrays_size_mod"},
    "flwr.client.mod.comms_mods": {
        "flwr.clientapp.mod": "arrays_size_mod message_size_mod parameters_size_mod>arrays_size_mod"
    },
    "flwr.client.numpy_client": {"flwr.client": "NumPyClient"},
    "flwr.client.typing": {
        "flwr.client": "ClientFn ClientFnExt",
        "flwr.clientapp.typing": "ClientAppCallable Mod",
    },
    "flwr.common": {
        "flwr.app": "ConfigsRecordValues>ConfigRecordValues MetricsRecordValues>MetricRecordValues"
    },
    "flwr.common.configsrecord": {"flwr.app": "ConfigsRecord>ConfigRecord"},
    "flwr.common.constant": {"flwr.app": "MessageType"},
    "flwr.common.context": {"flwr.app": "Context"},
    "flwr.common.date": {"flwr.common": "now"},
    "flwr.common.differential_privacy": {
        "flwr.supercore.differential_privacy": "adaptive_clip_inputs_inplace "
        "add_gaussian_noise_inplace add_gaussian_noise_to_params "
        "add_localdp_gaussian_noise_to_params clip_inputs_inplace "
        "compute_adaptive_clip_model_update compute_adaptive_noise_params "
        "compute_clip_model_update compute_stdv get_norm"
    },
    "flwr.common.dp": {"flwr.compat.common.dp": "add_gaussian_noise clip_by_l2"},
    "flwr.common.message": _TTL,
    "flwr.common.metricsrecord": {"flwr.app": "MetricsRecord>MetricRecord"},
    "flwr.common.object_ref": {"flwr.supercore.object_ref": "load_app validate"},
    "flwr.common.parameter": {
        "flwr.common": "bytes_to_ndarray ndarray_to_bytes ndarrays_to_parameters "
        "parameters_to_ndarrays"
    },
    "flwr.common.parametersrecord": {"flwr.app": "Array ParametersRecord>ArrayRecord"},
    "flwr.common.record": _RECORDS,
    "flwr.common.record.array": {"flwr.app": "Array"},
    "flwr.common.record.arrayrecord": {"flwr.app": "ArrayRecord ParametersRecord>ArrayRecord"},
    "flwr.common.record.configrecord": {"flwr.app": "ConfigRecord ConfigsRecord>ConfigRecord"},
    "flwr.common.record.configsrecord": {"flwr.app": "ConfigsRecord>ConfigRecord"},
    "flwr.common.record.conversion_utils": {"flwr.common": "array_from_numpy"},
    "flwr.common.record.metricrecord": {"flwr.app": "MetricRecord MetricsRecord>MetricRecord"},
    "flwr.common.record.metricsrecord": {"flwr.app": "MetricsRecord>MetricRecord"},
    "flwr.common.record.parametersrecord": {"flwr.app": "Array ParametersRecord>ArrayRecord"},
    "flwr.common.record.recorddict": {"flwr.app": "RecordDict RecordSet>RecordDict"},
    "flwr.common.record.recordset": {"flwr.app": "RecordSet>RecordDict"},
    "flwr.common.recorddict_compat": _COMPAT,
    "flwr.common.recordset": {"flwr.app": "RecordSet>RecordDict"},
    "flwr.common.recordset_compat": _COMPAT,
    "flwr.common.retry_invoker": {
        "flwr.supercore.retry": "RetryInvoker RetryState constant exponential full_jitter"
    },
    "flwr.common.secure_aggregation.crypto.symmetric_encryption": {
        "flwr.supercore.primitives.asymmetric": "bytes_to_private_key bytes_to_public_key "
        "generate_key_pairs private_key_to_bytes public_key_to_bytes sign_message verify_signature"
    },
    "flwr.common.telemetry": {"flwr.common": "EventType event"},
    "flwr.common.typing": {
        "flwr.app": "ConfigRecordValues ConfigScalar ConfigScalarList MetricRecordValues "
        "MetricScalar MetricScalarList UserConfig UserConfigValue "
        "ConfigsRecordValues>ConfigRecordValues ConfigsScalar>ConfigScalar "
        "ConfigsScalarList>ConfigScalarList MetricsRecordValues>MetricRecordValues "
        "MetricsScalar>MetricScalar MetricsScalarList>MetricScalarList"
    },
    "flwr.server.app": {"flwr.server": "start_server ServerConfig"},
    "flwr.server.compat.app_utils": {"flwr.serverapp": "Driver>Grid"},
    "flwr.server.compat.driver_client_proxy": {
        "flwr.server.compat.grid_client_proxy": "DriverClientProxy>GridClientProxy"
    },
    "flwr.server.driver": _GRID,
    "flwr.server.driver.driver": _GRID,
    "flwr.server.grid": _GRID,
    "flwr.server.grid.grid": _GRID,
    "flwr.server.server_app": {"flwr.serverapp": "ServerApp"},
    "flwr.server.serverapp_components": {"flwr.server": "ServerAppComponents"},
    "flwr.server.typing": {
        "flwr.serverapp.typing": "ServerAppCallable",
        "flwr.compat.server.typing": "ServerFn Workflow",
    },
}
"""Of each old module, the modules that hold its names now: "NAME", or "OLD>NEW" where the name is
another one now."""


def advice(module: str, names: Sequence[str] = ()) -> str:
    """Return in words what the installed Flower lacks of an import, and what it is called now.

    Args:
        module: that is imported, or imported from.
        names: imported from it; none where the module itself is imported.

    Returns:
        Half a sentence; nothing where all is there, or the module is none of Flower's.

    Example:
        >>> advice("flwr.common.record", ["RecordSet"])  # doctest: +ELLIPSIS
        'flwr.common.record is gone in Flower 1...: take RecordDict (once RecordSet) from flwr.app'
    """
    if module.partition(".")[0] != "flwr":
        return ""
    if resolves(module):
        gone = [n for n in names if not (resolves(f"{module}:{n}") or resolves(f"{module}.{n}"))]
        inner = [n for n in gone if f"{module}.{n}" in MOVED]
        if inner:
            return advice(f"{module}.{inner[0]}")
        what = " and ".join(f"{module}.{name}" for name in gone)
    else:
        gone, what = [name for name in names if name != "*"], module
    if not what:
        return ""
    table = MOVED.get(module, {})
    now = {
        old: (door, new or old)
        for door, entries in table.items()
        for old, _, new in (entry.partition(">") for entry in entries.split())
    }
    # Whoever imports a module gets to know where its names went, each once.
    wanted = gone or [name for name, (_, new) in now.items() if name == new or new not in now]
    taken: dict[str, list[str]] = {}
    for name in wanted:
        door, new = now.setdefault(name, (_door_of(name), name))
        if door:
            taken.setdefault(door, []).append(new if new == name else f"{new} (once {name})")
    told = "; ".join(f"take {_and(new)} from {door}" for door, new in taken.items())
    lost = [name for name in gone if not now[name][0]]
    if lost or not told:
        nothing = f"nothing public has the place of {_and(lost) or what}"
        told = f"{told}; {nothing}" if told else nothing
    verb = "are" if len(gone) > 1 and what != module else "is"
    return f"{what} {verb} gone in Flower {flwr.__version__}: {told}"


def _door_of(name: str) -> str:
    """Return the public module that has a name, or nothing."""
    return next((door for door in _DOORS if resolves(f"{door}:{name}")), "")


def advice_on(problem: BaseException) -> str:
    """Return in words which name of an older Flower an app has failed on, and where.

    Args:
        problem: raised while the app was imported.

    Returns:
        Half a sentence, after the file and line; nothing if it failed on something else.
    """
    own = Path(flwr.__file__).parent
    frames = [
        frame
        for frame in traceback.extract_tb(problem.__traceback__)
        if not Path(frame.filename).is_relative_to(own)
    ]
    where = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: " if frames else ""
    if isinstance(problem, AttributeError):
        owner = problem.obj
        if not isinstance(owner, ModuleType):
            return ""
        found = advice(owner.__name__, [problem.name or ""])
    elif isinstance(problem, ImportError) and (problem.name or "").startswith("flwr"):
        found = advice(*(_statement(frames) or (problem.name or "", ())))
    else:
        return ""
    return where + found if found else ""


def _statement(frames: Sequence[traceback.FrameSummary]) -> tuple[str, Sequence[str]] | None:
    """Return the module and the names of the import of Flower that the last frame is at."""
    if not frames or frames[-1].lineno is None:
        return None
    at = frames[-1].lineno
    try:
        tree = ast.parse("".join(linecache.getlines(frames[-1].filename)))
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import) and (
            node.lineno <= at <= (node.end_lineno or at)
        ):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                return node.module or "", names
            return next(((name, ()) for name in names if advice(name)), None)
    return None


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
