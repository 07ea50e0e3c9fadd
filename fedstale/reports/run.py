"""A run that was simulated or deployed: what its folder holds, as tables, figures and a page."""

import html
import json
import logging
import tomllib
from collections.abc import Mapping
from functools import cached_property
from math import inf, nan
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fedstale.app_folder import lacking
from fedstale.errors import ConfigError, ProtocolError, first_line
from fedstale.reports import account, advice, learning, page
from fedstale.reports.account import Advice
from fedstale.reports.devices import PHASES
from fedstale.reports.figure import SOURCES, Array
from fedstale.runs import (
    ADVISED,
    CONFIG,
    COST_COLUMNS,
    DEPLOYED,
    EVENTS,
    IN_FLIGHT,
    METRICS,
    METRICS_SCHEMA,
    MODEL,
    ONLINE,
    ONLINE_SCHEMA,
    SUMMARY,
    lost,
    read_model,
    with_costs,
)
from fedstale.strategies.messages import bytes_of
from fedstale.strategies.server import REPORTED
from fedstale.until import Until

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

logger = logging.getLogger(__name__)

_NEEDED = (CONFIG, EVENTS, METRICS, SUMMARY)
_JOB_COLUMNS = {
    *("job_id", "device_id", "kind", "round", "status", "reason", "staleness", "weight"),
    *("started_at", "downloaded_at", "trained_at", "reported_at", "ended_at"),
    *COST_COLUMNS,
}


class Run:
    """A run that is over; its tables are read from its folder when they are first asked for.

    Attributes:
        folder: where the run is.
        name: name of the folder; on a page with another run of that name, a longer one.
        summary: the plain figures of the run, as in summary.json.
        config_text: the resolved settings as TOML.
        status: how the run ended: finished, stopped (at its limit), stuck, interrupted or failed.
        reason: why it ended so: `5 rounds of the app`, the limit that was reached, what failed.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read the settings and the summary of a run.

        Args:
            folder: what `fedstale simulate` wrote, or a deployed app with a run folder.

        Raises:
            ConfigError: it is not the folder of a run that is over.
            ProtocolError: a file in it cannot be read; so do the tables when they are read.
        """
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ConfigError(
                f"run = {str(folder)!r} is not a folder: expected what fedstale simulate wrote"
            )
        missing = [name for name in _NEEDED if not (self.folder / name).is_file()]
        if missing:
            why = lost(self.folder)
            again = f"--resume {folder} goes on" if why else "run fedstale simulate again"
            raise ConfigError(
                f"run = {str(folder)!r} has no {', '.join(missing)}: expected the folder of a run "
                f"that came to its end; {again}{why and f'; {why}'}"
            )
        self.name = self.folder.resolve().name
        self.config_text, self.summary = _texts(self.folder)
        self.status, self.reason = str(self.summary["status"]), str(self.summary.get("reason", ""))

    @property
    def seed(self) -> int:
        """What everything random was seeded with."""
        return int(self.summary["seed"])

    @property
    def parts(self) -> Mapping[str, str]:
        """Strategy, selector and traces, by name, as far as they are known."""
        return parts_of(tomllib.loads(self.config_text), self.summary)

    @property
    def end_s(self) -> float:
        """Virtual instant at which the run ended, in s."""
        return float(self.summary["virtual_s"])

    @property
    def time_name(self) -> str:
        """What its instants are: virtual time, or just time on real devices."""
        return "time" if self.summary.get("executor") == DEPLOYED else "virtual time"

    @property
    def until(self) -> Until:
        """What ended the run, if its app did not."""
        return Until.parse(tomllib.loads(self.config_text).get("until"))

    @property
    def limit_s(self) -> float:
        """Virtual time that the run had, in s; inf if its app ended by itself without a limit."""
        # Rounds and metrics cut a run off as well, wherever it stood.
        is_cut = self.status == "stopped" and not np.isfinite(self.until.time_s)
        return self.end_s if is_cut else self.until.time_s

    @cached_property
    def jobs(self) -> pd.DataFrame:
        """One row a job, in the order of sending; docs/formats.md lists the columns.

        Besides these: `busy_s`, seconds that the device is known to have spent; `moved_bytes`, both
        ways; and `outcome`: used, wasted or in-flight.
        """
        return with_costs(self._table(EVENTS, _JOB_COLUMNS))

    @cached_property
    def caused(self) -> pd.DataFrame:
        """The jobs, each with the cause of its loss and the end of the server's wait for it."""
        return account.with_causes(self.jobs)

    @cached_property
    def advice(self) -> list[Advice]:
        """The largest costs of the run, the settings that govern them, and the effect of others.

        What saves most comes first; empty if nothing took a twentieth of the run.
        """
        config = tomllib.loads(self.config_text)
        app = config.get("run_config", {})
        if account.STRATEGY in config:
            app = {**app, account.STRATEGY: config[account.STRATEGY]}
        return advice.advise(
            self.caused,
            end_s=self.end_s,
            run_config=app,
            started=str(self.summary.get("strategy") or ""),
            unknown=float(self.summary.get("unknown_share", 0.0)),
            online=self._mean_online,
            in_int8=self._in_int8,
            lacks=lambda text: lacking(str(config.get("app")), text),
        )

    def _in_int8(self) -> float:
        """Return the bytes of the model in int8 in proportion to those in full; 1 without one."""
        arrays = self.model.values()
        return bytes_of(arrays, "int8") / max(bytes_of(arrays, None), 1) if arrays else 1.0

    def _mean_online(self) -> float:
        """Return how many devices were online on average; NaN where it is not known of all."""
        windows = self.online
        if windows is None or not self.end_s or not windows["is_drawn"].all():
            return nan
        ends = windows["end_s"].clip(upper=self.end_s)
        return float((ends - windows["start_s"]).clip(lower=0.0).sum()) / self.end_s

    @cached_property
    def advised(self) -> Mapping[str, Any]:
        """What the advice that this run has taken promised, and what came of it; maybe nothing.

        By the keys of advised.json; "before" is the folder of the earlier run.
        """
        try:
            noted = json.loads((self.folder / ADVISED).read_text(encoding="utf-8"))
            return {**noted, "before": (self.folder / noted["before"]).resolve()}
        except (OSError, ValueError, LookupError, TypeError):
            return {}

    @cached_property
    def started(self) -> pd.DataFrame:
        """The jobs that a device started, with four instants in s (PHASES) and a state each.

        The state is 0 if the job was used, 1 if it was wasted, 2 if it was in flight at the end.
        The instants of the last two are those of the start and, three times, of the end.
        """
        jobs = self.jobs[np.isfinite(self.jobs["started_at"].to_numpy(np.float64))]
        state = np.select([jobs["status"] == REPORTED, jobs["status"] == IN_FLIGHT], [0, 2], 1)
        instants = jobs[list(PHASES)].to_numpy(np.float64).copy()
        end = np.minimum(jobs["ended_at"].to_numpy(np.float64), self.end_s)
        instants[state != 0, 1:] = end[state != 0, np.newaxis]
        # A job may have been under way when the run ended, and rounding must not turn phases round.
        instants = np.maximum.accumulate(np.clip(instants, 0.0, self.end_s), axis=1)
        counts = {"is_used": state == 0, "is_wasted": state == 1}
        return jobs.assign(state=state, **counts, **dict(zip(PHASES, instants.T, strict=True)))

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """One row a measured value: time_s, version, source, name, value."""
        return self._table(METRICS, set(METRICS_SCHEMA.names))

    @cached_property
    def online(self) -> pd.DataFrame | None:
        """Windows in which devices were online: device_id, start_s, end_s, is_drawn.

        They are those of all devices, or of some of many (is_drawn: evenly from all, besides those
        that had a job). None where nobody knows, as of real devices.
        """
        known = (self.folder / ONLINE).is_file()
        return self._table(ONLINE, set(ONLINE_SCHEMA.names)) if known else None

    @cached_property
    def model(self) -> dict[str, npt.NDArray[Any]]:
        """The last aggregated model by name of array, in the order of the app's record.

        Empty if nothing was aggregated.
        """
        path = self.folder / MODEL
        return read_model(path) if path.is_file() else {}

    @cached_property
    def costs(self) -> Mapping[str, float]:
        """What the run took: rounds, virtual_s, jobs, device_s, device_time_wasted and bytes.

        `device_time_wasted` is the share of device-hours that came to nothing, 0 of none.
        """
        # A comparison holds many runs: it keeps these sums and not the jobs of each.
        jobs = with_costs(self._table(EVENTS, set(COST_COLUMNS), alone=True))
        total, wasted = jobs["busy_s"].sum(), jobs["busy_s"][jobs["outcome"] == "wasted"].sum()
        return {
            "rounds": float(self.summary["rounds"]),
            "virtual_s": self.end_s,
            "jobs": float(len(jobs)),
            "device_s": float(total),
            "device_time_wasted": float(wasted / total) if total else 0.0,
            "bytes": float(jobs["moved_bytes"].sum()),
        }

    def curve(self, metric: str, source: str) -> tuple[Array, Array]:
        """Return instants in s and values of a metric, each of shape (measurements,)."""
        rows = self.metrics[(self.metrics["name"] == metric) & (self.metrics["source"] == source)]
        return rows["time_s"].to_numpy(np.float64), rows["value"].to_numpy(np.float64)

    def time_to(self, target: str | Until, *, source: str | None = None) -> float:
        """Return when the run first reached a target, in s of virtual time; inf if it never did.

        Args:
            target: a metric and its value, such as "accuracy 0.9"; losses and errors reach it from
                above.
            source: of the metric, whether the run has it or not; the first of server, evaluate and
                train that has it if None.

        Raises:
            ConfigError: it names no metric that the run measured.
        """
        until = Until.parse(target) if isinstance(target, str) else target
        metric = str(until.metric)
        source = source or next((s for s in SOURCES if len(self.curve(metric, s)[0])), None)
        if source is None:
            names = learning.measured_names([self])
            raise ConfigError(f"target = {target!r}: expected one of {names} and a value")
        points = zip(*self.curve(metric, source), strict=True)
        return next(
            (float(at_s) for at_s, y in points if until.is_reached(0, {metric: float(y)})), inf
        )

    def device_s_until(self, at_s: float) -> float:
        """Return how many seconds all devices had spent by an instant, in s of virtual time.

        A job that was under way then counts with the time since it started.
        """
        jobs = with_costs(
            self._table(EVENTS, {*COST_COLUMNS, "started_at", "ended_at"}, alone=True)
        )
        busy_s = jobs["busy_s"].to_numpy(np.float64)
        # Of a real device only the end may be known.
        start = jobs["started_at"].fillna(jobs["ended_at"] - busy_s).to_numpy(np.float64)
        return float(np.clip(at_s - start, 0.0, busy_s).sum())

    def last(self, source: str) -> dict[str, float]:
        """Return the last value of every metric from a source: server, evaluate or train."""
        last = learning.last_values(self)
        return {
            str(name): float(value)
            for name, value in last.loc[last["source"] == source, ["name", "value"]].to_numpy()
            if name not in learning.BOOKKEEPING
        }

    def plot(self, metric: str, *, against: learning.Against = "time") -> "Figure":
        """Return a metric as a figure of plotly, a curve for each source that measured it.

        Args:
            metric: its name, as the app reports it.
            against: virtual time, versions of the model, the bytes that all devices have moved, or
                the hours that they have worked.

        Raises:
            ConfigError: the run did not measure the metric, there is no such axis, or plotly is not
                installed.
        """
        names = learning.measured_names([self])
        if metric not in names:
            raise ConfigError(f"metric = {metric!r}: expected one of {names}")
        if against not in learning.AXES:
            raise ConfigError(f"against = {against!r}: expected one of {list(learning.AXES)}")
        return learning.metric(self, metric, [metric], against=against).plotly()

    def report(self, out: Path | None = None) -> Path:
        """Write the page of the run.

        Args:
            out: HTML file to write; report.html in the folder if None.

        Returns:
            The file.

        Raises:
            ConfigError: the file cannot be written.
            ProtocolError: a table of the run cannot be read.
        """
        return page.write_run(self, out or self.folder / page.REPORT)

    def _repr_html_(self) -> str:
        """Return the run as notebooks show it: a sentence, and its figures."""
        cards = pd.DataFrame(page.cards(self)).to_html(header=False, index=False)
        return f"<p>{html.escape(page.lead(self))}</p>{cards}"

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, status={self.status!r})"

    def _table(self, name: str, columns: set[str], *, alone: bool = False) -> pd.DataFrame:
        """Return a table that has some columns, with all that it has or with these alone."""
        path = self.folder / name
        try:
            absent = columns - set(pq.read_schema(path).names)
            wanted = sorted(columns - absent) if alone else None
            frame: pd.DataFrame = pq.read_table(path, columns=wanted).to_pandas()
        except (pa.ArrowException, OSError, UnicodeDecodeError) as problem:
            raise ProtocolError(
                f"{str(path)!r} is not a readable Parquet file ({first_line(problem)}); run "
                "fedstale simulate again"
            ) from None
        if absent:
            raise ProtocolError(
                f"{str(path)!r} has no column {', '.join(sorted(absent))}: expected the columns "
                "that docs/formats.md lists; run fedstale simulate again"
            )
        return frame


def parts_of(config: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, str]:
    """Name strategy, selector and traces, without options of parts and folders of files."""
    named = {name: summary.get(name) for name in ("strategy", "selector")}
    found = {name: str(part).partition("(")[0] for name, part in named.items() if part}
    if own := summary.get("in_place_of"):
        found["strategy"] += f" in the place of {own}"
    traces = config.get("traces")
    return {**found, "traces": PurePath(str(traces)).name} if traces else found


def report_at_end(folder: Path) -> Run:
    """Return a run that has just ended, once its page is written.

    Raises:
        ConfigError: the folder is not that of a run, or the page cannot be written.
        ProtocolError: a file of the run cannot be read.
    """
    run = Run(folder)
    try:
        run.report()
    except ConfigError as problem:
        raise ConfigError(
            f"{problem}; the run is over, and all else is in {folder}: make room there, and "
            f"fedstale report {folder} writes its page"
        ) from None
    return run


def _texts(folder: Path) -> tuple[str, Mapping[str, Any]]:
    try:
        config_text = (folder / CONFIG).read_text(encoding="utf-8")
        tomllib.loads(config_text)
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        absent = {"status", "app", "devices", "seed", "virtual_s", "rounds"} - set(summary)
    except (ValueError, TypeError, OSError, RecursionError) as problem:
        raise ProtocolError(
            f"run = {str(folder)!r}: {CONFIG} or {SUMMARY} cannot be read ({problem}); "
            "run fedstale simulate again"
        ) from None
    if absent:
        raise ProtocolError(
            f"run = {str(folder)!r}: {SUMMARY} has no {', '.join(sorted(absent))}; "
            "run fedstale simulate again"
        )
    return config_text, summary
