"""Variants of a simulation compared: means over seeds, and differences from a reference by seed."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedstale import __version__
from fedstale.comparison import table
from fedstale.comparison.metrics import deciding_source, measured, reached, target_source
from fedstale.comparison.statistics import (
    Estimate,
    Reached,
    SpeedUp,
    difference,
    estimate,
    speed_up,
)
from fedstale.config import Until
from fedstale.reports.curves import BOOKKEEPING
from fedstale.reports.run import Run

FORMAT = 1
_SHOWN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One variant: its runs, and how they compare with those of the reference."""

    name: str
    runs: tuple[Run, ...]
    values: Mapping[str, Mapping[int, float]]
    """What each run measured at its end, by name and seed."""
    means: Mapping[str, Estimate]
    differences: Mapping[str, Estimate]
    """Paired with the reference's runs; empty for the reference."""
    times: Mapping[int, Reached]
    """When each run reached the target, by seed; empty without a target."""
    time: Estimate | None
    """Mean time to the target in s, in which runs that never reached it count with the time they
    had."""
    speed_up: SpeedUp | None

    @property
    def n_reached(self) -> int:
        """How many runs reached the target."""
        return sum(time.ever for time in self.times.values())


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Comparison:
    """Variants of a simulation, and how they compare with one of them."""

    variants: tuple[Variant, ...]
    reference: str
    target: str | None
    sources: Mapping[str, str]
    """Which source each metric comes from."""
    horizon_s: float
    """Virtual time of the longest run in s."""
    failures: tuple[tuple[str, int, str], ...] = ()
    """Variant, seed and reason of the runs that failed and are left out."""

    @property
    def shown(self) -> list[str]:
        """Metrics that tables show: the target's, or else the first accuracies and losses."""
        if self.target is not None:
            metric = Until.parse(self.target).metric
            return [name for name in self.sources if name == metric]
        ranks = {"acc": 0, "loss": 1}
        found = [
            (min(rank for word, rank in ranks.items() if word in name.lower()), name)
            for name, source in self.sources.items()
            if source != "train" and any(word in name.lower() for word in ranks)
        ]
        return [name for _, name in sorted(found)][:_SHOWN]

    def key(self, metric: str) -> str:
        """Return the name under which the values of a metric are found."""
        return f"{self.sources[metric]} {metric}"

    @property
    def table(self) -> pd.DataFrame:
        """One row for each variant and measure, as in comparison.csv; NaN where there is none."""
        return table.long(self)

    def _repr_html_(self) -> str:
        """Return the table in words and its notes, as notebooks show it."""
        header, rows = table.words(self)
        shown = pd.DataFrame(rows, columns=header).to_html(index=False)
        return f"{shown}<p>{html.escape(' '.join(table.notes(self)))}</p>"


def analyse(
    runs: Mapping[str, Sequence[Run]],
    *,
    reference: str,
    target: str | None = None,
    failures: Sequence[tuple[str, int, str]] = (),
) -> Comparison:
    """Compare variants with one of them.

    Args:
        runs: of each variant, with different seeds, in the order of tables.
        reference: the variant that the others are compared with.
        target: a metric and the value that it is to reach, if times are compared.
        failures: runs that failed and are left out: variant, seed and reason.

    Raises:
        ConfigError: no run measured the target's metric.
    """
    every = [run for some in runs.values() for run in some]
    names = sorted({str(name) for run in every for name in run.metrics["name"]} - BOOKKEEPING)
    sources = {name: source for name in names if (source := deciding_source(every, name))}
    ends = [run.limit_s if np.isfinite(run.limit_s) else run.end_s for run in every]
    horizon_s = float(max(ends, default=0.0))
    times: dict[str, dict[int, Reached]] = {name: {} for name in runs}
    # If every run failed, the reasons explain more than a missing metric.
    if target is not None and every:
        until = Until.parse(target)
        source = target_source(every, until)
        times = {
            name: {run.seed: reached(run, until, source, horizon_s) for run in some}
            for name, some in runs.items()
        }
    values = {name: _by_measure(some, sources) for name, some in runs.items()}
    return Comparison(
        variants=tuple(
            Variant(
                name=name,
                runs=tuple(some),
                values=values[name],
                means={key: estimate(list(found.values())) for key, found in values[name].items()},
                differences={
                    key: difference(found, values[reference][key])
                    for key, found in values[name].items()
                    if name != reference and key in values[reference]
                },
                times=times[name],
                time=estimate([time.at_s for time in times[name].values()])
                if times[name]
                else None,
                speed_up=None if name == reference else speed_up(times[name], times[reference]),
            )
            for name, some in runs.items()
        ),
        reference=reference,
        target=target,
        sources=sources,
        horizon_s=horizon_s,
        failures=tuple(failures),
    )


def _by_measure(runs: Sequence[Run], sources: Mapping[str, str]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        for name, value in measured(run, sources).items():
            found.setdefault(name, {})[run.seed] = value
    return found


def as_json(comparison: Comparison, *, root: Path | None = None) -> dict[str, Any]:
    """Return a comparison as plain JSON; what is not a finite number is null.

    Args:
        comparison: what is written.
        root: the folders of runs inside it are written relative to it.
    """
    found = {
        "format": FORMAT,
        "fedstale": __version__,
        "reference": comparison.reference,
        "target": comparison.target,
        "horizon_s": comparison.horizon_s,
        "sources": dict(comparison.sources),
        "variants": [_row(one, comparison) for one in comparison.variants],
        "failed": [
            {"variant": variant, "seed": seed, "reason": reason}
            for variant, seed, reason in comparison.failures
        ],
        "runs": [
            {
                "variant": one.name,
                "seed": run.seed,
                "status": run.status,
                "folder": _relative(run.folder, root),
                **_time(one, run.seed),
                "values": {
                    name: by_seed[run.seed]
                    for name, by_seed in one.values.items()
                    if run.seed in by_seed
                },
            }
            for one in comparison.variants
            for run in one.runs
        ],
    }
    return _finite(found)


def _row(one: Variant, comparison: Comparison) -> dict[str, Any]:
    row: dict[str, Any] = {
        "variant": one.name,
        "seeds": [run.seed for run in one.runs],
        "means": {name: asdict(found) for name, found in one.means.items()},
        "differences": {name: asdict(found) for name, found in one.differences.items()},
    }
    if comparison.target is not None and one.time is not None:
        n = len(one.times)
        row |= {
            "reached": one.n_reached,
            "reached_share": one.n_reached / n,
            "time_to_target_s": {**asdict(one.time), "at_least": one.n_reached < n},
        }
        if one.speed_up is not None:
            row["speed_up"] = {**asdict(one.speed_up.ratio), "bound": one.speed_up.bound}
    return row


def _time(one: Variant, seed: int) -> dict[str, Any]:
    time = one.times.get(seed)
    return {} if time is None else {"time_to_target_s": time.at_s, "reached": time.ever}


def _relative(folder: Path, root: Path | None) -> str:
    if root is not None and folder.is_relative_to(root):
        return str(folder.relative_to(root))
    return str(folder)


def _finite(value: Any) -> Any:  # noqa: ANN401 - plain JSON
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value
