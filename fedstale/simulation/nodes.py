"""Nodes of a run: their node configs, and missing partitions.

An app with a fixed number of partitions fails on every node beyond them. `partitions` lets
partition ids wrap, so that devices share data; a run in which clients fail from some id on says so.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import comb
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from flwr.app import UserConfig

from fedstale.config import NODE_VALUES, Costs, NodeTables, SimulationConfig, flat, read_toml
from fedstale.errors import ConfigError, TraceError, nearest
from fedstale.reports import thinned
from fedstale.runs import ERROR_COLUMNS, ONLINE_SCHEMA, RunFolder
from fedstale.strategies.server import CLIENT_ERROR, REPORTED
from fedstale.traces import Availability, TraceSet
from fedstale.until import Until

if TYPE_CHECKING:
    from fedstale.simulation.flower_app import FlowerApp

_DEVICES_SEED = 3
_ONLINE, _WINDOWS = 2_000, 200_000
"""Devices, and windows of them, of which a run tells at most when they were online."""
_PROBED = 50
_FEW_CHANGE = 0.01
"""Share of devices that come or go, below which a run shows nothing of them."""
_NAMED = 3
"""Devices that a sentence names at most."""
_OF_DATA = ("AssertionError", "FileNotFoundError", "IndexError", "KeyError", "ValueError")
"""Errors with which clients fail that ask for a partition which is not there."""
_FEW = 20
"""Devices that a sentence names at most."""
_ODDS = 20
"""A split of ids that is likelier than one in so many by chance is no evidence."""


class NodeConfigs:
    """The node config of each device of a run.

    Example:
        >>> nodes = NodeConfigs(["a", "b", "c"], partitions=2, own={"c": {"ram": 4}})
        >>> nodes.of(2)
        {'partition-id': 0, 'num-partitions': 2, 'device-id': 'c', 'ram': 4}
    """

    def __init__(
        self,
        device_ids: Sequence[str] | pd.Index,
        *,
        partitions: int | None = None,
        own: Mapping[str, UserConfig] | None = None,
    ) -> None:
        """Make configs.

        Args:
            device_ids: name of each device, in the order of nodes.
            partitions: partition ids count up to this and begin again; None gives each device one.
            own: what devices have besides, by device id; it may name a partition-id too.
        """
        self._ids, self._own = device_ids, own or {}
        self.partitions = partitions or len(device_ids)
        """Number of partitions, as nodes are told."""

    def of(self, index: int) -> UserConfig:
        """Return the node config of a device, by its position."""
        device_id = str(self._ids[index])
        return {
            "partition-id": index % self.partitions,
            "num-partitions": self.partitions,
            "device-id": device_id,
            **self._own.get(device_id, {}),
        }

    def partition_ids(self, device_ids: Iterable[str]) -> set[int]:
        """Return the partition ids of some devices by their names."""
        at = {str(name): i for i, name in enumerate(self._ids)}
        return {int(self.of(at[name])["partition-id"]) for name in device_ids}


def node_configs(config: SimulationConfig, known: pd.Index, device_ids: pd.Index) -> NodeConfigs:
    """Return the node configs of a run.

    Args:
        config: the settings.
        known: device ids of the traces.
        device_ids: of those that take part.

    Raises:
        ConfigError: the file cannot be read, or names a device that the traces do not have.
    """
    given = config.node_config
    where = f"node_config = {given!r}" if isinstance(given, str) else "node_config"
    if isinstance(given, str) and not Path(given).is_file():
        raise ConfigError(f"{where}: no such file; expected one of TOML")
    tables = read_toml(Path(given)) if isinstance(given, str) else given or {}
    own = _plain(tables, where)
    ids = set(map(str, known)) if own else set()
    for device_id in own:
        if device_id not in ids:
            raise ConfigError(
                f"{where} has device {device_id!r}, which the traces have not: expected "
                + (
                    nearest(device_id, sorted(ids))
                    if len(ids) <= _FEW
                    else f"one like {min(ids)!r}"
                )
            )
    return NodeConfigs(device_ids, partitions=config.partitions, own=own)


def _plain(tables: NodeTables, where: str) -> dict[str, UserConfig]:
    """Return tables by device with their inner tables under dotted keys, as Flower's configs are.

    Raises:
        ConfigError: a device has no table, or one with something that a config cannot hold.
    """
    found: dict[str, UserConfig] = {}
    for device_id, table in tables.items():
        values = dict(flat(table)) if isinstance(table, Mapping) else None
        if values is None or not all(
            isinstance(v, bool | int | float | str) for v in values.values()
        ):
            raise ConfigError(f"{where} has {device_id} = {table!r}: expected {NODE_VALUES}")
        found[device_id] = values
    return found


def missing_partitions(folder: RunFolder, nodes: NodeConfigs) -> str:
    """Return in a sentence from which partition id on clients fail, if it is one id that decides.

    Args:
        folder: of a run whose events are written.
        nodes: of the run.
    """
    jobs = folder.read_events(ERROR_COLUMNS, status=CLIENT_ERROR).to_pandas()
    kinds = jobs["reason"].astype(str).str.split(":").str[0]
    failed = jobs[kinds.isin(_OF_DATA)]
    if failed.empty:
        return ""
    reported = pc.unique(folder.read_events(["device_id"], status=REPORTED)["device_id"])
    good = nodes.partition_ids(reported.to_pylist())
    bad = nodes.partition_ids(failed["device_id"].unique())
    if not good or max(good) >= min(bad):
        return ""
    if comb(len(bad) + len(good), len(bad)) < _ODDS:
        return ""
    last, first = max(good) + 1, min(bad)
    n = f"{last}" if last == first else f"between {last} and {first}"
    kind = kinds[failed.index].mode()[0]
    return (
        f"clients fail with {kind} on all of {len(bad)} partition ids from {first} on, and on none "
        f"of {len(good)} below: the app seems to have {n} partitions; use --devices {last}, or let "
        f"devices share data: --set partitions={last}, or partitions = {last} in a config.toml or "
        "in Python"
    )


def enrolled(traces: TraceSet, config: SimulationConfig) -> TraceSet:
    """Draw the devices that take part, with the asked behaviour at the end of their records."""
    if config.devices is not None and config.devices != traces.n_devices:
        if config.devices > traces.n_devices:
            raise ConfigError(
                f"devices = {config.devices}: expected at most {traces.n_devices}, "
                "as many as the traces have"
            )
        rng = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(_DEVICES_SEED,)))
        traces = traces.take(np.sort(rng.permutation(traces.n_devices)[: config.devices]))
    return traces.repeating(repeat=config.after_end == "repeat")


def online(traces: TraceSet, folder: RunFolder, end_s: float) -> pa.Table:
    """Return when devices were online: of all, or of some of many.

    Args:
        traces: of the devices that took part.
        folder: of the run, with its events.
        end_s: when the run ended.

    Returns:
        One row a window, an empty one of a device that never was: `device_id`, `start_s`, `end_s`,
        and `is_drawn`: whether the device was drawn evenly from all. Of many devices, as many
        others that had a job are told of.
    """
    n = traces.n_devices
    availability = traces.availability or Availability.always(n)
    some = thinned(n, _PROBED)
    each = max(len(availability.windows_before(some, end_s)[0]) / len(some), 1.0)
    limit = int(np.clip(_WINDOWS / each, 1, _ONLINE))
    drawn = thinned(n, limit)
    names = pc.unique(folder.read_events(["device_id"])["device_id"]).to_pandas()
    worked = np.setdiff1d(traces.device_ids.get_indexer(pd.Index(names)), drawn)
    devices = np.union1d(drawn, worked[thinned(len(worked), limit)])
    owner, start, end = availability.windows_before(devices, end_s)
    never = np.setdiff1d(np.arange(devices.size), owner)
    owner = np.append(owner, never)
    start, end = (np.append(instants, np.zeros(never.size)) for instants in (start, end))
    ids = traces.device_ids[devices[owner]].astype(str).to_numpy(dtype=object)
    columns = (ids, start, end, np.isin(devices, drawn)[owner])
    return pa.table(dict(zip(ONLINE_SCHEMA.names, columns, strict=True)), schema=ONLINE_SCHEMA)


def unknown_share(availability: Availability, end_s: float) -> float:
    """Estimate the share of the time before an instant for which devices are unknown.

    Args:
        availability: of the devices.
        end_s: the instant in s; counted at 200 instants before it, for at most 2,000 devices.

    Example:
        >>> logged = Availability.of([[(10.0, 20.0)]], 100.0, logs=(0.0, 40.0))
        >>> unknown_share(logged, 100.0)
        0.6
    """
    if not np.isfinite(availability.logs_s[availability.rows]).any() or end_s <= 0:
        return 0.0
    devices = np.unique(np.linspace(0, availability.n_devices - 1, 2000).astype(np.int64))
    instants = (np.arange(200) + 0.5) / 200 * end_s
    return float(np.mean([np.equal(*availability.log_at(devices, t)).mean() for t in instants]))


def require_end(until: Until, traces: TraceSet, costs: Costs) -> None:
    """Reject a virtual time that a run would never reach."""
    overhead_s = (costs.download_overhead_s or 0.0) + (costs.upload_overhead_s or 0.0)
    if until.time_s < np.inf and traces.is_ideal and not overhead_s:
        raise ConfigError(
            f"until = {until.time_s:g} s: no time passes on devices that are infinitely fast; "
            "expected '100 rounds' or a metric such as 'accuracy 0.9'"
        )


def without_rate(traces: TraceSet, app: "FlowerApp", costs: Costs) -> str:
    """Return in a sentence which devices can end no job, if there are any.

    Raises:
        TraceError: none can.
    """
    parts, n = [], traces.n_devices
    # A message that trains nothing needs no processor.
    stated = [units for kind, units in costs.work.items() if kind.startswith("train")]
    is_work = app.work is None and all(stated or [costs.work_per_example])
    for name in ("compute", "downlink", "uplink") if is_work else ("downlink", "uplink"):
        if name in traces.known:
            ids = traces.device_ids[getattr(traces, name).fastest() == 0.0]
            some = ", ".join(map(repr, ids[:_NAMED])) + (", ..." if len(ids) > _NAMED else "")
            if len(ids) == n:
                raise TraceError(
                    f"{name} is 0 throughout for all devices ({some}), so that no job would end: "
                    f"expected traces with some {name}"
                )
            if len(ids):
                parts.append(f"{name} is 0 throughout for {len(ids):,} of {n:,} ({some})")
    return f"devices that can end no job: {'; '.join(parts)}" if parts else ""


def too_short(traces: TraceSet, end_s: float, costs: Costs) -> str:
    """Return in a sentence that devices have hardly changed while a run lasted, if they ever do."""
    n, availability = traces.n_devices, traces.availability
    if availability is None or not end_s:
        return ""
    begins, ends = availability.window_at_or_after(np.arange(n), 0.0)
    changed = int(np.count_nonzero(((begins > 0.0) & (begins < end_s)) | (ends < end_s)))
    if changed >= max(_FEW_CHANGE * n, 1) or not np.isfinite(ends).any():
        return ""
    most, some = ("nearly ", f"{changed:,}") if changed else ("", "none")
    model = "" if costs.model_bytes is not None else "costs.model-bytes=14_000_000 "
    key = f"work.{next(iter(costs.work))}" if costs.work else "work-per-example"
    return (
        f"the run is shorter than {most}any change of its devices: {some} of {n:,} came or went in "
        f"{end_s:,.3g} s of virtual time; to stand for a real job, state its "
        f"{'size and ' if model else ''}work (--set '{model}costs.{key}=1.0', or in "
        "[tool.fedstale]), or let it run for longer"
    )
