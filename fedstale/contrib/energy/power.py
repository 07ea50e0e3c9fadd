"""Joules of jobs: what a device takes while it receives, trains and sends, by the class it is of.

A job's energy is the sum of power times seconds over its phases, and of joules times bytes on the
network. Powers are above what a device takes without the job: a phone is on anyway. What is left
out: making devices, and the server.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedstale.config import read_toml
from fedstale.errors import ConfigError
from fedstale.runs import WAYS

Array = npt.NDArray[np.float64]

PHASES = ("download_s", "compute_s", "upload_s")
CLASSES = Path(__file__).with_name("classes.toml")
JOULES = ("download_j", "training_j", "upload_j", "network_j")
"""Columns of `with_energy`, each from the plug."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Power of one class of devices, above what they take without a job.

    Raises:
        ConfigError: a figure is negative or not finite, or `plug` is below 1.
    """

    training_w: float
    """While it trains, in W."""
    receiving_w: float
    """While it receives a message, in W."""
    sending_w: float
    """While it sends a reply, in W."""
    network_j_per_byte: float
    """Of the network between the device and the server, in J a byte, either way."""
    plug: float
    """Joules from the plug for each in the device, >= 1: losses of charger and battery."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each figure is from, by its name."""

    def __post_init__(self) -> None:
        if not isinstance(self.sources, Mapping):
            raise ConfigError(f"sources = {self.sources!r}: expected a table, a text by figure")
        for name in FIGURES:
            value, least = getattr(self, name), 1.0 if name == "plug" else 0.0
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{name} = {value!r}: expected a number")
            if not (isfinite(value) and value >= least):
                raise ConfigError(f"{name} = {value!r}: expected a finite number >= {least:g}")

    @classmethod
    def read(cls, path: str | Path | None = None) -> dict[str, "Power"]:
        """Return the classes of devices that come with fedstale, and those of a file.

        Args:
            path: TOML, a table of the five figures for each class; it may have `sources`, as
                classes.toml has. A class of a known name takes its place.

        Raises:
            ConfigError: the file cannot be read, or a figure is missing, unknown or wrong.
        """
        found = dict(_shipped())
        return found if path is None else found | _classes(Path(path))


FIGURES = tuple(each.name for each in fields(Power) if each.name != "sources")
"""Names of the figures of a `Power`."""


@cache
def _shipped() -> dict[str, Power]:
    return _classes(CLASSES)


def _classes(path: Path) -> dict[str, Power]:
    found = {}
    for name, table in read_toml(path).items():
        where = f"class {name!r} of {path}"
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: expected a table [{name}] of {', '.join(FIGURES)}")
        if missing := [figure for figure in FIGURES if figure not in table]:
            raise ConfigError(f"{where} has no {', '.join(missing)}")
        if unknown := sorted(set(table) - {*FIGURES, "sources"}):
            raise ConfigError(
                f"{where} has {', '.join(unknown)}: expected {', '.join(FIGURES)}, sources"
            )
        try:
            found[name] = Power(**table)
        except ConfigError as problem:
            raise ConfigError(f"{where}: {problem}") from None
    return found


class Fleet:
    """Which class each device is of, and in which region it is.

    Example:
        >>> Fleet("phone", region="eu").of(["a"])["region"].tolist()
        ['eu']
    """

    def __init__(
        self,
        devices: str | Path,
        power: Mapping[str, Power] | None = None,
        *,
        region: str | None = None,
    ) -> None:
        """Take one class for all devices, or a file.

        Args:
            devices: name of a class, or a CSV with the columns `device_id`, `class` and, if grams
                are asked for, `region`.
            power: classes by name; those that come with fedstale if not given.
            region: of all devices, where the file has none.

        Raises:
            ConfigError: a class is not known, or the file cannot be read.
        """
        self.power = Power.read() if power is None else dict(power)
        self.name, self._region = str(devices), region
        self._table: pd.DataFrame | None = None
        if self.name in self.power:
            self.classes = [self.name]
            return
        path = Path(devices)
        if not path.is_file():
            raise ConfigError(
                f"devices = {self.name!r}: expected a class ({', '.join(self.power)}) or a CSV "
                "with the columns device_id, class and perhaps region"
            )
        try:
            table = pd.read_csv(path, dtype=str, keep_default_na=False)
        except (OSError, ValueError) as problem:
            raise ConfigError(f"devices = {self.name!r} cannot be read: {problem}") from problem
        if missing := [name for name in ("device_id", "class") if name not in table]:
            raise ConfigError(f"devices = {self.name!r} has no column {', '.join(missing)}")
        if twice := table["device_id"][table["device_id"].duplicated()].tolist():
            raise ConfigError(f"devices = {self.name!r} has {twice[0]!r} twice")
        self._table = table.set_index("device_id")
        self.classes = sorted(set(self._table["class"]))
        if unknown := [name for name in self.classes if name not in self.power]:
            raise ConfigError(
                f"devices = {self.name!r} has the class {unknown[0]!r}: expected one of "
                f"{', '.join(self.power)}, or a file of your own in --power"
            )

    def of(self, device_ids: Any) -> pd.DataFrame:
        """Return the figures of `Power` and the `region` of some devices, a row for each.

        Args:
            device_ids: their names; shape (n,).

        Raises:
            ConfigError: the file does not name one of them.
        """
        ids = pd.Index(device_ids)
        if self._table is None:
            rows = pd.DataFrame({"class": self.name}, index=ids)
        else:
            if len(absent := ids.difference(self._table.index)):
                raise ConfigError(
                    f"devices = {self.name!r} has no {absent[0]!r}: expected a row for each of the "
                    f"run's devices; {len(absent):,} are missing"
                )
            rows = self._table.loc[ids]
        figures = {
            name: rows["class"].map({c: getattr(p, name) for c, p in self.power.items()})
            for name in FIGURES
        }
        region = rows.get("region", self._region)
        return pd.DataFrame({**figures, "region": region}, index=ids)

    def with_figure(self, class_name: str, figure: str, value: float) -> "Fleet":
        """Return the same devices, one figure of a class of which is another."""
        other = copy(self)
        other.power = self.power | {
            class_name: replace(self.power[class_name], **{figure: value})  # type: ignore[arg-type]
        }
        return other


def with_energy(jobs: pd.DataFrame, fleet: Fleet) -> pd.DataFrame:
    """Return jobs with what each took from the plug and on the network, in J.

    Args:
        jobs: one row a job, as `Run.jobs`, with the seconds and bytes of all of them.
        fleet: the power of its devices.

    Returns:
        The same with the columns of `JOULES` and `energy_j`, their sum.

    Raises:
        ConfigError: the seconds or bytes of a job are not known, as of a deployment's.
    """
    phases, ways = ([jobs[name].to_numpy(np.float64) for name in some] for some in (PHASES, WAYS))
    if unknown := int((~np.isfinite(np.stack([*phases, *ways]))).any(axis=0).sum()):
        raise ConfigError(
            f"of {unknown:,} of {len(jobs):,} jobs the seconds or bytes are not known, so neither "
            "are their joules: expected a simulation, in which all are"
        )
    of = fleet.of(jobs["device_id"].to_numpy())
    powers = [of[name].to_numpy(np.float64) for name in ("receiving_w", "training_w", "sending_w")]
    plug = of["plug"].to_numpy(np.float64)
    parts = [plug * watts * seconds for watts, seconds in zip(powers, phases, strict=True)]
    parts.append(of["network_j_per_byte"].to_numpy(np.float64) * sum(ways))
    columns = dict(zip(JOULES, parts, strict=True))
    return jobs.assign(**columns, energy_j=sum(parts))
