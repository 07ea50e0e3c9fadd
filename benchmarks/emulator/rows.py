"""Rows of what was played: what an emulator is told of each target, and what it took."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from emulator.cases import MOST_JOBS, SHARES, Case, fleet, work_of_minute
from fedstale.contrib.emulator.measures import OUTPUTS as PLAYED
from fedstale.contrib.emulator.measures import Sample, Setting

MARGIN = 2.5
"""Times as many jobs as a target should take, were they none too many in a run."""
OUTPUTS = ("hours", "device_hours", "wasted", "stale_50", "stale_90")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows; arrays of one length."""

    x: Any
    """What is told; shape (rows, features)."""
    y: Any
    """What is learnt, by `OUTPUTS`: the truth less the played schedule's, of hours in logarithms,
    of staleness in those of 1 more; shape (rows, outputs)."""
    reached: Any
    """Whether the target was reached; else y holds for the end of the run, which is a bound."""
    fleet: Any
    app: Any
    """Kind of the app."""
    group: Any
    """Of fleet, app, job and target: what differs within is the schedule and the rate."""
    half: Any
    """Whether the schedule is one that is held out: a step of some half of the jobs in flight."""
    case: list[Case]

    names: list[str]
    """Of the measures."""

    def with_rows(self, other: "Table") -> "Table":
        """Return these rows and others."""
        joined = {
            name: np.concatenate([getattr(self, name), getattr(other, name)])
            for name in Table.__slots__
            if name not in ("case", "names")
        }
        return Table(**joined, case=[*self.case, *other.case], names=self.names)

    def take(self, which: Any) -> "Table":
        """Return some rows."""
        which = np.flatnonzero(which) if np.asarray(which).dtype == bool else np.asarray(which)
        return Table(
            x=self.x[which], y=self.y[which], reached=self.reached[which], fleet=self.fleet[which],
            app=self.app[which], group=self.group[which], half=self.half[which],
            case=[self.case[i] for i in which], names=self.names,
        )  # fmt: skip


def setting_of(case: Case, work: float, *, rounds: float, skew: float, rate: float) -> Setting:
    """Return what an emulator is told of a case whose job is so many work units."""
    return Setting(
        work=work,
        message_bytes=case.megabytes * 1e6,
        timeout_s=case.timeout_s,
        concurrency=case.concurrency,
        buffer_size=case.buffer_size,
        keeps=case.keeps,
        balanced=case.balanced,
        rounds=rounds,
        skew=skew,
        rate=rate,
    )


Samples = dict[tuple[Any, ...], tuple[Sample, float]]
"""What becomes of jobs, and their work units, by fleet and job."""


def rows_of(
    played: Iterable[tuple[Case, dict[str, Any]]], recordings: Path, samples: Samples | None = None
) -> Table:
    """Return the rows of runs, but for targets that runs of so few jobs can hardly reach."""
    samples = {} if samples is None else samples
    found: dict[str, list[Any]] = {name: [] for name in Table.__slots__}
    names: list[str] = []
    for case, result in played:
        for app, i in product(range(len(result["apps"])), range(len(SHARES))):
            own = result["apps"][app]
            rounds, took = own["rounds"][i], own["reached"][i]
            if rounds is None or rounds * case.buffer_size > MOST_JOBS / MARGIN:
                continue
            job = case.fleet, case.minutes, case.megabytes, case.patience
            about = {"rounds": rounds, "skew": own["alpha"], "rate": own["rate"]}
            if job not in samples:
                work = case.minutes * work_of_minute(case.fleet, recordings)
                told = setting_of(case, work, **about)
                samples[job] = Sample(fleet(case.fleet, recordings), told), work
            sample, work = samples[job]
            x = sample.measures(setting_of(case, work, **about))
            at = took or result["end"]
            y = [np.log(max(at[name], 1e-4)) for name in OUTPUTS[:2]]
            y += [at["wasted"], *(np.log1p(at[name]) for name in OUTPUTS[3:])]
            kind, number, *rest = case.app.split(":")
            name = kind if rest else f"{kind} {number} {app}"
            names = list(x)
            found["x"].append(list(x.values()))
            found["y"].append(np.array(y) - [x[name] for name in PLAYED])
            found["reached"].append(took is not None)
            found["fleet"].append(case.fleet)
            found["app"].append(kind)
            found["group"].append(" ".join(map(str, (*job, name, own["alpha"], i))))
            found["half"].append(0.3 < case.buffer_size / case.concurrency < 0.7)
            found["case"].append(case)
    arrays = {k: np.array(each) for k, each in found.items() if k not in ("case", "names")}
    return Table(**arrays, case=found["case"], names=names)
