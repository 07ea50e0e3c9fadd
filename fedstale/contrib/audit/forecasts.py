"""Whether devices keep what they state of themselves, from the job log of runs that are over.

Devices report their chance to finish and how long a job will take, and the server selects by it. An
audit scores both for each device and tests them with bets (`e_process`),
so that it may be looked at after any job. It reports, and excludes nobody: what looks like a lie
may be a poor forecaster. Losses and examples are in no column of the log, so nothing is said of
them here.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path

import numpy as np
import pandas as pd

from fedstale.contrib.audit.e_process import ALARM, WAYS, log_e_values
from fedstale.errors import ConfigError, ProtocolError
from fedstale.reports import SHARES, Figure, Run, cell_text, curve, reference
from fedstale.runs import IN_FLIGHT, LATE, UNCLAIMED
from fedstale.strategies.server import CLIENT_ERROR, REJECTED, REPORTED
from fedstale.strategies.types import forecast_bias
from fedstale.traces import outline
from fedstale.traces.forecast.backtest import brier

ROWS = 30
"""Devices that the figure of a report shows at most: `fedstale audit` has all."""

P, DURATION_S = "reported_p_finish", "reported_duration_s"
_NEEDED = (
    *("job_id", "node_id", "device_id", "kind", "status"),
    *("sent_at", "reported_at", "delivered_at", P),
)
_IN_TIME = (REPORTED, REJECTED, UNCLAIMED)
_NO_OUTCOME = (IN_FLIGHT, CLIENT_ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastAudit:
    """Statements of devices, and the outcomes of their jobs."""

    runs: tuple[str, ...]
    """Folders of the runs."""
    devices: pd.DataFrame
    """One row a device, the largest e-value first; `audited` describes the columns."""
    notes: tuple[str, ...]
    """What was left out and how runs were joined, in sentences."""

    __repr__ = outline

    @property
    def alarms(self) -> pd.DataFrame:
        """The rows of devices whose e-value has reached that of an alarm."""
        return self.devices[self.devices["alarm"]]

    @property
    def verdict(self) -> str:
        """How many devices do not keep what they state, in a sentence."""
        n = int((self.devices["tested"] > 0).sum())
        return (
            f"What {len(self.alarms):,} of {n:,} devices state does not hold; of devices whose "
            f"chances hold at most {n / ALARM:.3g} are expected among them."
        )

    def _repr_html_(self) -> str:
        """Return the verdict, the notes and the devices, as notebooks show them."""
        said = "".join(f"<p>{html.escape(text)}</p>" for text in (self.verdict, *self.notes))
        return said + self.devices.to_html(index=False)


def audited(runs: Run | str | Path | Sequence[Run | str | Path]) -> ForecastAudit:
    """Audit what devices reported in some runs of one app.

    A device states its chance with a reply, for its next job. So a job is tested if it is the first
    that was sent after a reply of its device; further ones, after a job that got lost, say, were
    never spoken for. A job whose reply came before its message expired was finished, even if the
    server rejected it. One in which the app failed, or that was in flight at the end, has no score,
    and is taken in the test to have ended as speaks least against the device.

    Of several runs the scores are over all jobs of a device. Its bets are apart in each run, for
    runs of one trace share what happened: `e_value` is their mean, and of n runs one has to reach n
    times the e-value of an alarm.

    Columns of `devices`; NaN where nothing is known:

    - `device_id`, `node_id`.
    - `jobs`: training jobs sent. `tested`: those whose outcome is held against a statement.
      `repeated`: those sent on a statement that was for an earlier job. `unknown`: those without an
      outcome.
    - `stated`, `kept`: means of the chances and of the outcomes of tested jobs.
    - `brier`, `log_score`: mean scores, less is better.
    - `skill_own`: 1 minus the ratio of the Brier score to that of the device's own share so far,
      with one success and one failure added; `skill_fleet`: to that of the fleet's share over all
      tested jobs. Below 0 the device would better not be asked.
    - `crps_s`: mean CRPS of stated durations in s; the log has their medians alone, and the CRPS of
      a single number is its absolute error. `durations`: of how many jobs.
    - `e_over`, `e_under`, `e_short`: e-values against chances that hold and are not too high, not
      too low, and durations that half of the jobs keep. `e_value`: their mean.
    - `alarm`; `direction`: over, under or short, the largest of the three; `jobs_to_alarm`: jobs on
      statements of their own until then.
    - `bias`: what a node's record adds to its stated chance, in the end (`forecast_bias`).
    - `age_s`: median age of a statement when its job was sent, in s.
    - `last_p`, `last_duration_s`: what it stated last of a training job that was sent.
    - `online_s`: for how long it was online; `never_picked`: online, and never sent a job.

    Args:
        runs: at least one that is over, or its folder; of several, devices are joined by node id.

    Raises:
        ConfigError: a run has no forecasts, or runs do not belong together.
        ProtocolError: the log of a run is damaged.
    """
    some = [runs] if isinstance(runs, Run | str | Path) else runs
    all_runs = [run if isinstance(run, Run) else Run(run) for run in some]
    _check_together(all_runs)
    tables = [_statements(run) for run in all_runs]
    _check_numbers(all_runs, tables)
    jobs = pd.concat([table.assign(run=i) for i, table in enumerate(tables)], ignore_index=True)
    devices = _scores(jobs).join(_wealth(jobs, len(all_runs)))
    devices = devices.join(_online(all_runs), how="outer").rename_axis("device_id").reset_index()
    for name in ("jobs", "tested", "repeated", "unknown", "durations"):
        devices[name] = devices[name].fillna(0).astype(np.int64)
    devices["never_picked"] = (devices["jobs"] == 0) & (devices["online_s"] > 0)
    devices["alarm"] = devices["alarm"].eq(True)
    devices["direction"] = devices["direction"].fillna("")
    devices["node_id"] = devices["node_id"].astype("Int64")
    devices = devices.sort_values(
        ["alarm", "e_value", "device_id"], ascending=[False, False, True], ignore_index=True
    )
    return ForecastAudit(
        runs=tuple(str(run.folder) for run in all_runs),
        devices=devices,
        notes=tuple(_notes(all_runs, jobs, devices)),
    )


def figure(run: Run) -> Figure | None:
    """Return the audit of a run as a figure, or None if no device forecast itself."""
    if P not in run.jobs or not np.isfinite(run.jobs[P].to_numpy(np.float64)).any():
        return None
    audit = audited([run])
    devices = audit.devices[audit.devices["tested"] > 0]
    if devices.empty:
        return None
    shown = devices.head(ROWS)
    names = {False: ("devices", "series-0"), True: ("alarm", "wasted")}
    traces = []
    for alarm, (name, look) in names.items():
        some = shown[shown["alarm"] == alarm]
        hover = "%{text}: stated %{x:.0%}, finished %{y:.0%}"
        words = [f"{d}, {n} jobs" for d, n in zip(some["device_id"], some["tested"], strict=True)]
        dots = {"mode": "markers", "marker": {"size": 7}, "hovertemplate": hover, "text": words}
        if len(some):
            traces.append(curve(name, look, some["stated"], some["kept"], **dots))
    traces.append(reference("as stated", [0.0, 1.0], [0.0, 1.0]))
    notes = [audit.verdict, *audit.notes]
    if len(devices) > ROWS:
        notes.append(f"The {ROWS} with the largest e-values are shown; fedstale audit has all.")
    table = shown[[*_SHOWN]]
    return Figure(
        id="forecast-audit",
        title="Do stated chances hold?",
        about=" ".join(notes),
        traces=traces,
        x_title="stated, mean of a device",
        y_title="finished",
        layout=SHARES,
        header=tuple(_SHOWN.values()),
        rows=[[cell_text(value) for value in row] for row in table.itertuples(index=False)],
    )


_SHOWN = {
    **{"device_id": "device", "tested": "jobs", "stated": "stated", "kept": "finished"},
    **{"brier": "Brier", "log_score": "log score", "skill_own": "skill, own share"},
    **{"skill_fleet": "skill, fleet", "crps_s": "CRPS (s)", "e_value": "e-value"},
    **{"direction": "alarm", "last_p": "stated last"},
}
"""Columns of the table of a report, and their heads."""


def _check_together(runs: Sequence[Run]) -> None:
    """Raise if runs cannot be audited, or not together."""
    if not runs:
        raise ConfigError("runs = []: expected at least one run that is over")
    folders = [run.folder.resolve() for run in runs]
    for i, folder in enumerate(folders):
        if folder in folders[:i]:
            raise ConfigError(f"run = {str(runs[i].folder)!r} is given twice: expected each once")
    apps = [str(run.summary["app"]) for run in runs]
    for run, app in zip(runs, apps, strict=True):
        if app != apps[0]:
            raise ConfigError(
                f"run = {str(run.folder)!r} is of the app {app!r}, and {str(runs[0].folder)!r} of "
                f"{apps[0]!r}: expected runs of one app, whose jobs are alike"
            )


def _check_numbers(runs: Sequence[Run], tables: Sequence[pd.DataFrame]) -> None:
    """Raise unless a node id stands for the same device in all runs."""
    device_of: dict[int, str] = {}
    node_of: dict[str, int] = {}
    for run, table in zip(runs, tables, strict=True):
        pairs = table[["node_id", "device_id"]].drop_duplicates()
        for node, device in zip(pairs["node_id"].tolist(), pairs["device_id"], strict=True):
            known = device_of.setdefault(node, device), node_of.setdefault(device, node)
            if known != (device, node):
                raise ConfigError(
                    f"run = {str(run.folder)!r}: node {node} is {device!r} there, and elsewhere "
                    f"node {node} is {known[0]!r} and {device!r} is node {known[1]}: nodes were "
                    "renumbered, so their jobs cannot be joined; audit each run alone"
                )


def _statements(run: Run) -> pd.DataFrame:
    """Return the training jobs of a run with what was stated before them and came of them.

    Columns besides those of the log: `is_fresh` (the first job sent after a reply), `age_s`, `kept`
    (1, 0 or NaN), `took_s` (NaN where the last byte is not known).
    """
    where, jobs = f"run = {str(run.folder)!r}", run.jobs
    if absent := [name for name in _NEEDED if name not in jobs]:
        raise ConfigError(
            f"{where} has no column {', '.join(absent)} in its events.parquet: expected the run of "
            "a release that writes it"
        )
    jobs = jobs[[*_NEEDED, *([DURATION_S] if DURATION_S in jobs else [])]]
    jobs = jobs if DURATION_S in jobs else jobs.assign(**{DURATION_S: np.nan})
    if not np.isfinite(jobs["sent_at"].to_numpy(np.float64)).all():
        raise ProtocolError(
            f"{where}: sent_at of a job is no number; expected the instant of its sending in s"
        )
    limits = {P: (0.0, 1.0, "a chance in [0, 1]"), DURATION_S: (1e-300, 1e300, "seconds > 0")}
    for name, (low, high, accepted) in limits.items():
        values = jobs[name].to_numpy(np.float64)
        wrong = ~np.isnan(values) & ~((values >= low) & (values <= high))
        if wrong.any():
            row = jobs[wrong].iloc[0]
            raise ProtocolError(
                f"{where}: {name} of job {row['job_id']} of {row['device_id']!r} is {row[name]}: "
                f"expected {accepted}, or NaN where nothing was stated"
            )
    jobs = jobs.join(_heard(jobs))
    jobs = jobs[jobs["kind"].str.startswith("train")]
    if not jobs[P].notna().any():
        raise ConfigError(
            f"{where}: no device had stated a chance before a training job; expected a run whose "
            "devices forecast, as with ForecastMod or -c forecasts=true of the built-in apps"
        )
    status = jobs["status"]
    kept = status.isin(_IN_TIME).astype(np.float64).mask(status.isin(_NO_OUTCOME))
    arrived = status.isin((*_IN_TIME, LATE))
    took_s = (jobs["reported_at"] - jobs["sent_at"]).where(arrived)
    took_s = took_s.where(np.isfinite(took_s) & (took_s > 0))
    return jobs.assign(kept=kept, took_s=took_s)


def _heard(jobs: pd.DataFrame) -> pd.DataFrame:
    """Return of each job whether its device had replied since its last training job, and when.

    Columns: `is_fresh`, `age_s`. A reply of any kind carries a statement. What was stated before
    the first training job counts, too: a run that goes on has it from before.
    """
    trains = jobs["kind"].str.startswith("train").to_numpy()
    is_seen = np.isfinite(jobs["delivered_at"].to_numpy(np.float64))
    heard = jobs["status"].isin((REPORTED, REJECTED)).to_numpy() & is_seen
    sends = pd.DataFrame({"row": np.arange(len(jobs)), "at": jobs["sent_at"], "is_reply": False})
    replies = sends.assign(at=jobs["delivered_at"], is_reply=True)[heard]
    # At one instant a reply comes after its own job and before later ones.
    events = pd.concat([sends, replies]).assign(node=lambda e: jobs["node_id"].to_numpy()[e["row"]])
    events = events.sort_values(["node", "at", "row", "is_reply"], kind="stable")
    by_node = events["node"]
    last_at = events["at"].where(events["is_reply"]).groupby(by_node).ffill()
    n_heard = events["is_reply"].groupby(by_node).cumsum()
    is_send = ~events["is_reply"] & trains[events["row"]]
    before = n_heard[is_send].groupby(by_node[is_send]).shift(fill_value=-1)
    rows = events.loc[is_send, "row"].to_numpy()
    is_fresh, age_s = np.zeros(len(jobs), np.bool_), np.full(len(jobs), np.nan)
    is_fresh[rows] = (n_heard[is_send] > before).to_numpy()
    age_s[rows] = (events["at"] - last_at)[is_send].to_numpy()
    return pd.DataFrame({"is_fresh": is_fresh, "age_s": age_s}, index=jobs.index)


def _scores(jobs: pd.DataFrame) -> pd.DataFrame:
    """Return the scores of each device, by its id."""
    is_stated = jobs[P].notna()
    tested = jobs[is_stated & jobs["is_fresh"] & jobs["kept"].notna()]
    p, kept = (tested[name].to_numpy(np.float64) for name in (P, "kept"))
    of_device = tested.groupby("device_id")["kept"]
    n_before = of_device.cumcount()
    own = (of_device.cumsum() - tested["kept"] + 1.0) / (n_before + 2.0)
    scored = pd.DataFrame(
        {
            "device_id": tested["device_id"],
            "stated": p,
            "kept": kept,
            "brier": brier(p, kept),
            "log_score": -np.log(np.clip(1.0 - np.abs(kept - p), 1e-4, 1.0 - 1e-4)),
            "own": brier(own.to_numpy(), kept),
            "fleet": brier(np.full(len(kept), kept.mean() if len(kept) else np.nan), kept),
        }
    )
    means = scored.groupby("device_id").mean()
    by_device = jobs.groupby("device_id", sort=False)
    timed = jobs[jobs[DURATION_S].notna() & jobs["is_fresh"] & jobs["took_s"].notna()]
    # Of a single number the CRPS is the absolute error (Gneiting and Raftery, JASA 2007).
    errors_s = (timed["took_s"] - timed[DURATION_S]).abs().groupby(timed["device_id"])
    count = {
        "jobs": by_device.size(),
        "tested": tested.groupby("device_id").size(),
        "repeated": (is_stated & ~jobs["is_fresh"]).groupby(jobs["device_id"]).sum(),
        "unknown": jobs["kept"].isna().groupby(jobs["device_id"]).sum(),
    }
    devices = pd.DataFrame({"node_id": by_device["node_id"].first(), **count}).join(
        means[["stated", "kept", "brier", "log_score"]]
    )
    devices["skill_own"] = 1.0 - means["brier"] / means["own"]
    devices["skill_fleet"] = 1.0 - means["brier"] / means["fleet"].where(means["fleet"] > 0)
    devices["crps_s"], devices["durations"] = errors_s.mean(), errors_s.size()
    ended = jobs[jobs["status"] != IN_FLIGHT]
    finished = (ended["status"] == REPORTED).astype(np.float64)
    sums = [
        column.groupby(ended["device_id"]).sum()
        for column in (finished, 1.0 - finished, ended[P].fillna(finished))
    ]
    devices["bias"] = pd.Series(forecast_bias(*sums), sums[0].index)
    spoken = jobs[is_stated & jobs["is_fresh"]]
    devices["age_s"] = spoken.groupby("device_id")["age_s"].median()
    last = by_device[[P, DURATION_S]].last()
    devices["last_p"], devices["last_duration_s"] = last[P], last[DURATION_S]
    return devices


def _wealth(jobs: pd.DataFrame, n_runs: int) -> pd.DataFrame:
    """Return the e-values of each device and its alarm, by its id; see `audited`."""
    some = jobs[jobs["is_fresh"] & (jobs[P].notna() | jobs[DURATION_S].notna())]
    owners = ["run", "device_id"]
    some = some.sort_values([*owners, "job_id"], kind="stable").reset_index(drop=True)
    took_s, said_s = some["took_s"], some[DURATION_S]
    in_time = (took_s <= said_s).where(took_s.notna() & said_s.notna())
    p, kept, early = (np.asarray(column, np.float64) for column in (some[P], some["kept"], in_time))
    owner = np.asarray(some.groupby(owners).ngroup(), np.int64)
    each, total = log_e_values(p, kept, early, owner)
    columns = dict(zip(WAYS, each, strict=True))
    some = some[owners].assign(total=total, number=some.groupby(owners).cumcount() + 1, **columns)
    hits = some[some["total"] >= log(ALARM * n_runs)].groupby(owners).first()
    hits["direction"] = hits[[*WAYS]].idxmax(axis=1)
    first = hits.sort_values("number", kind="stable").groupby("device_id").first()
    ends = some.groupby(owners)[[*WAYS, "total"]].last()
    # No float holds e^710, and in a run in which a device was not tested its e-value is 1.
    values = ends.clip(upper=600.0).apply(np.exp).groupby("device_id")
    means = (values.sum() + n_runs - values.count()) / n_runs
    found = {f"e_{name}": means[name] for name in WAYS} | {"e_value": means["total"]}
    alarm = {"direction": first["direction"], "jobs_to_alarm": first["number"]}
    return pd.DataFrame(found).join(pd.DataFrame(alarm).assign(alarm=True))


def _online(runs: Sequence[Run]) -> "pd.Series[float]":
    """Return the known times of devices online, in s, by their ids."""
    windows = [run.online for run in runs if run.online is not None]
    if not windows:
        return pd.Series(dtype=np.float64, name="online_s", index=pd.Index([], dtype=object))
    table = pd.concat(windows)
    lengths = table["end_s"] - table["start_s"]
    return lengths.groupby(table["device_id"]).sum().rename("online_s")


def _notes(runs: Sequence[Run], jobs: pd.DataFrame, devices: pd.DataFrame) -> list[str]:
    """Describe in sentences the runs left out and the way others were joined."""
    notes = []
    if len(runs) > 1:
        notes.append(
            f"Devices are joined by node id, which stands for the same device in all {len(runs)} "
            f"runs; an alarm needs an e-value of {ALARM * len(runs):,.0f} in one of them."
        )
    if repeated := int(devices["repeated"].sum()):
        notes.append(
            f"{repeated:,} jobs were sent on a statement for an earlier job, and are not tested."
        )
    timed = jobs[DURATION_S].notna() & jobs["kept"].eq(1.0)
    if timed.any() and jobs.loc[timed, "took_s"].isna().all():
        notes.append(
            "Stated durations are not tested: the log has the instant of delivery alone, and with "
            "it how long replies waited for the server."
        )
    if devices["online_s"].isna().any():
        notes.append("Of some devices nobody knows when they were online.")
    if never := int(devices["never_picked"].sum()):
        notes.append(f"{never:,} devices were online and never sent a training job.")
    notes.append("Losses and examples are not in the log of jobs, so nothing is said of them.")
    return notes
