"""What a simulated node finds in its config, and whether the app has data for as many nodes.

An app with a fixed number of partitions fails on every node beyond them. `partitions` lets
partition ids wrap, so that devices share data; a run in which clients fail from some id on says so.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from math import comb
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.compute as pc
from flwr.app import UserConfig, UserConfigValue

from fedstale.config import NODE_VALUES, NodeTables, SimulationConfig, flat, read_toml
from fedstale.errors import ConfigError, nearest
from fedstale.runs import ERROR_COLUMNS, RunFolder
from fedstale.strategies.server import CLIENT_ERROR, REPORTED

if TYPE_CHECKING:
    import pandas as pd

_DEVICE = ("device-id", "device_id")
"""Heads of the column of a CSV file that names the device."""
_COUNTS = ("num-partitions", "num_partitions")
"""Keys by which the run config of an app may say how many partitions there are."""
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
        device_ids: "Sequence[str] | pd.Index",
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


def node_configs(
    config: SimulationConfig, known: "pd.Index", device_ids: "pd.Index"
) -> NodeConfigs:
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
        raise ConfigError(f"{where}: no such file; expected one of TOML, or of CSV")
    own = _read(Path(given)) if isinstance(given, str) else _plain(given or {}, "node_config")
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


def _read(path: Path) -> dict[str, UserConfig]:
    """Return what a file says of devices: TOML with a table for each, or CSV with a row for each.

    Raises:
        ConfigError: it cannot be read as such.
    """
    if path.suffix.lower() != ".csv":
        return _plain(read_toml(path), str(path))
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            rows, heads = list(reader), list(reader.fieldnames or ())
    except (OSError, ValueError, csv.Error) as problem:
        raise ConfigError(f"{path} cannot be read as CSV: {problem}") from None
    head = next((name for name in _DEVICE if name in heads), None)
    if head is None:
        raise ConfigError(f"{path} has the columns {heads}: expected device-id and what nodes have")
    found: dict[str, UserConfig] = {}
    for number, row in enumerate(rows, start=2):
        device_id = row.pop(head)
        if None in row or None in row.values():
            raise ConfigError(
                f"{path}, row {number}: expected {len(heads)} values, as many as heads"
            )
        if device_id in found:
            raise ConfigError(f"{path}, row {number}: device {device_id!r} occurs twice")
        found[device_id] = {key: _value(text) for key, text in row.items() if text != ""}
    return found


def _value(text: str) -> UserConfigValue:
    """Return what a cell means: a number, true or false, or the text itself."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


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


def too_few_partitions(run_config: Mapping[str, object], nodes: NodeConfigs) -> str:
    """Return in a sentence that the run config speaks of fewer partitions than nodes are told."""
    for key in _COUNTS:
        n = run_config.get(key)
        if type(n) is int and 0 < n < nodes.partitions:
            return (
                f"run-config {key} = {n}, but nodes are told of {nodes.partitions} partitions: "
                f"clients from partition-id {n} on may find no data; {_remedy(n)}"
            )
    return ""


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
        f"of {len(good)} below: the app seems to have {n} partitions; {_remedy(last)}"
    )


def _remedy(n: int) -> str:
    return (
        f"use --devices {n}, or let devices share data: --set partitions={n}, or partitions = {n} "
        "in a config.toml or in Python"
    )
