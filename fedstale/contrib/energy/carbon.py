"""Grams of CO2 equivalents of jobs: their joules times the intensity of the power at that time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fedstale.contrib.energy.power import Array, Fleet
from fedstale.errors import ConfigError, TraceError
from fedstale.runs import WAYS
from fedstale.traces import Series

J_PER_KWH = 3.6e6
GRAMS = ("download_g", "training_g", "upload_g")
"""Columns of `with_carbon`; what the network took is in the phase that moved the bytes."""
SYNTHETIC = "synthetic"
_BEGINS = ("started_at", "downloaded_at", "trained_at")
_ENDS = ("downloaded_at", "trained_at", "reported_at")


class Intensity:
    """Carbon intensity of electricity in some regions, in g/kWh, constant between its instants.

    Attributes:
        regions: their names.
        until_s: end of what is known, in s of the run; inf where days repeat.
    """

    def __init__(
        self, regions: Sequence[str], series: Series, until_s: float, name: str = "intensity"
    ) -> None:
        """Take a row of a series for each region."""
        self.regions, self._series = tuple(regions), series
        self.until_s, self._name = until_s, name

    @classmethod
    def synthetic(cls) -> "Intensity":
        """Return a day for demos, which repeats; in shape like those of sunny grids, not measured.

        480 g/kWh by night, about the mean of the world in 2023 (Ember), and 202 about noon.
        """
        hours = np.arange(24) + 0.5
        sun = np.maximum(np.sin((hours - 6.0) / 12.0 * np.pi), 0.0)
        series = Series.regular([480.0 - 280.0 * sun], step_s=3600.0)
        return cls([""], series, np.inf, SYNTHETIC)

    @classmethod
    def read(cls, path: str | Path, *, epoch: str | None = None) -> "Intensity":
        """Read a CSV, or `synthetic`.

        Args:
            path: columns `time`, `g_per_kwh` and, where there are several, `region`. A time is in s
                of the run, or a date, and its value holds until the next one of the region; the
                last one as long as that before it.
            epoch: date of the run's instant 0, needed where times are dates. Dates with an offset
                are compared in UTC, those without are taken as they are.

        Raises:
            ConfigError: the file cannot be read, or is not as described.
        """
        if str(path) == SYNTHETIC:
            return cls.synthetic()
        where = f"intensity = {str(path)!r}"
        if not Path(path).is_file():
            raise ConfigError(f"{where}: expected a CSV, or {SYNTHETIC!r}")
        try:
            table = pd.read_csv(path, dtype={"region": str})
        except (OSError, ValueError) as problem:
            raise ConfigError(f"{where} cannot be read: {problem}") from problem
        if missing := [name for name in ("time", "g_per_kwh") if name not in table]:
            raise ConfigError(f"{where} has no column {', '.join(missing)}")
        if not pd.api.types.is_numeric_dtype(table["g_per_kwh"]):
            raise ConfigError(f"{where}: g_per_kwh is no column of numbers")
        table = table.assign(time=_seconds(table["time"], epoch, where))
        regions = table["region"].fillna("") if "region" in table else pd.Series("", table.index)
        rows, lengths, names = [], [], []
        for name, of in table.groupby(regions, sort=True):
            t, g = of["time"].to_numpy(np.float64), of["g_per_kwh"].to_numpy(np.float64)
            named = f"{where}, region {name!r}" if name else where
            if len(t) < 2 or not (np.diff(t) > 0).all():
                raise ConfigError(f"{named}: expected two times or more, each after the last")
            end, first = t[-1] + (t[-1] - t[-2]), int(np.searchsorted(t, 0.0, side="right")) - 1
            if first < 0 or end <= 0:
                raise ConfigError(
                    f"{named} is of {t[0]:,.0f} to {end:,.0f} s of the run: expected instant 0 in "
                    "it; for dates, --epoch says when that was"
                )
            rows.append((np.maximum(t[first:], 0.0), g[first:]))
            lengths.append(end)
            names.append(str(name))
        try:
            series = Series.irregular(rows, lengths, repeat=False)
        except TraceError as problem:
            raise ConfigError(f"{where}: {problem}") from None
        return cls(names, series, min(lengths), str(path))

    def at(self, instants: Array) -> Array:
        """Return the intensity of each region, NaN where it is not known.

        Args:
            instants: in s of the run, >= 0; shape (n,).

        Returns:
            g/kWh, of shape (regions, n).
        """
        rows = [
            self._series.value_at(np.full(len(instants), i), instants)
            for i in range(len(self.regions))
        ]
        return np.where(instants < self.until_s, np.array(rows), np.nan)

    def grams(self, regions: "pd.Series[str]", begins: Array, ends: Array, joules: Array) -> Array:
        """Return the grams of joules that are spread evenly over a time; all of shape (n,).

        Args:
            regions: of each; they do not matter where the intensities are of no region.
            begins: instants in s.
            ends: instants in s, >= begins.
            joules: where they are 0, the instants do not matter.

        Raises:
            ConfigError: a region is not known, or a time is beyond what is.
        """
        spent = np.flatnonzero(joules > 0)
        a, b = begins[spent], ends[spent]
        if spent.size and b.max() > self.until_s:
            raise ConfigError(
                f"intensity = {self._name!r} ends at {self.until_s:,.0f} s of the run, and a job "
                f"at {b.max():,.0f} s: expected it to be known for the whole run"
            )
        where = np.zeros(spent.size, np.int64)
        if self.regions != ("",):
            where = pd.Index(self.regions).get_indexer(pd.Index(regions.iloc[spent]))
            if (where < 0).any():
                raise ConfigError(
                    f"region = {regions.iloc[spent[where < 0][0]]!r}: expected one of "
                    f"{', '.join(self.regions)}, in the file of devices or by --region"
                )
        long = b > a
        mean = self._series.value_at(where, a)
        mean[long] = self._series.integral(where[long], a[long], b[long]) / (b - a)[long]
        grams = np.zeros(len(joules))
        grams[spent] = joules[spent] / J_PER_KWH * mean
        return grams


def with_carbon(
    jobs: pd.DataFrame, fleet: Fleet, intensity: Intensity, *, end_s: float
) -> pd.DataFrame:
    """Return jobs with the grams of CO2 equivalents of each.

    The joules of a phase are spread evenly over it, from its begin to its end, also where the
    device was away in between.

    Args:
        jobs: with the columns of `with_energy`.
        fleet: the regions of its devices; the network is where the device is.
        intensity: of their electricity.
        end_s: instant in s at which the run ended, and what was in flight with it.

    Returns:
        The same with the columns of `GRAMS` and `carbon_g`, their sum.

    Raises:
        ConfigError: the intensity of a job is not known.
    """
    of = fleet.of(jobs["device_id"].to_numpy())
    per_byte, ended = of["network_j_per_byte"].to_numpy(np.float64), jobs["ended_at"].to_numpy()
    down, up = (per_byte * jobs[name].to_numpy(np.float64) for name in WAYS)
    joules = (jobs["download_j"] + down, jobs["training_j"], jobs["upload_j"] + up)
    columns = {}
    for name, begin, end, spent in zip(GRAMS, _BEGINS, _ENDS, joules, strict=True):
        begins, ends = (jobs[each].to_numpy(np.float64) for each in (begin, end))
        # A phase that was cut ended with the job, and one that was not with the run.
        ends = np.minimum(np.where(np.isfinite(ends), ends, ended), end_s)
        columns[name] = intensity.grams(of["region"], begins, ends, spent.to_numpy(np.float64))
    return jobs.assign(**columns, carbon_g=sum(columns.values()))


def _seconds(times: "pd.Series[float]", epoch: str | None, where: str) -> "pd.Series[float]":
    """Return times in s of the run.

    Raises:
        ConfigError: they are neither numbers nor dates, or dates without an epoch.
    """
    if pd.api.types.is_numeric_dtype(times):
        return times.astype(np.float64)
    try:
        dates = pd.to_datetime(times, utc=True, format="ISO8601")
        zero = None if epoch is None else pd.to_datetime(epoch, utc=True, format="ISO8601")
    except ValueError as problem:
        raise ConfigError(f"{where}: times are neither s nor dates: {problem}") from problem
    if zero is None:
        raise ConfigError(f"{where} has dates: expected --epoch, the date of the run's instant 0")
    return (dates - zero).dt.total_seconds()
