"""A comparison judged: means over seeds, and each variant against the reference, seed by seed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedstale import __version__
from fedstale.compare.measured import Measured, deciding_source, plain_values, target_source
from fedstale.compare.statistics import (
    Estimate,
    Reached,
    SpeedUp,
    difference,
    estimate,
    speed_up,
)
from fedstale.config import Until
from fedstale.reports.curves import BOOKKEEPING

FORMAT = 1
_SHOWN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One variant."""

    variant: str
    runs: tuple[Measured, ...]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Variants of a simulation, and how they compare with one of them."""

    variants: tuple[Judged, ...]
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


def judge(
    runs: Sequence[Measured],
    variants: Sequence[str],
    *,
    reference: str,
    target: str | None = None,
    failures: Sequence[tuple[str, int, str]] = (),
) -> Comparison:
    """Compare variants with one of them.

    Args:
        runs: of all variants.
        variants: their names, in the order of tables.
        reference: the variant that the others are compared with.
        target: a metric and the value that it is to reach, if times are compared.
        failures: runs that failed and are left out: variant, seed and reason.

    Raises:
        ConfigError: no run measured the target's metric.
    """
    names = sorted({str(name) for run in runs for name in run.metrics["name"]} - BOOKKEEPING)
    sources = {name: source for name in names if (source := deciding_source(runs, name))}
    ends = [run.limit_s if np.isfinite(run.limit_s) else run.end_s for run in runs]
    horizon_s = max(ends, default=0.0)
    times: dict[str, dict[int, Reached]] = {variant: {} for variant in variants}
    # Where every run failed, why they did says more than that none measured the target.
    if target is not None and runs:
        until = Until.parse(target)
        source = target_source(runs, until)
        for run in runs:
            times[run.variant][run.seed] = run.reached(until, source, horizon_s)
    values = {variant: _by_name(runs, variant, sources) for variant in variants}
    return Comparison(
        variants=tuple(
            _judged(
                tuple(run for run in runs if run.variant == variant),
                variant,
                values=values[variant],
                reference=None if variant == reference else values[reference],
                times=times[variant],
                reference_times=times[reference],
            )
            for variant in variants
        ),
        reference=reference,
        target=target,
        sources=sources,
        horizon_s=float(horizon_s),
        failures=tuple(failures),
    )


def _by_name(
    runs: Sequence[Measured], variant: str, sources: Mapping[str, str]
) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        if run.variant == variant:
            for name, value in plain_values(run, sources).items():
                found.setdefault(name, {})[run.seed] = value
    return found


def _judged(
    runs: tuple[Measured, ...],
    variant: str,
    *,
    values: Mapping[str, Mapping[int, float]],
    reference: Mapping[str, Mapping[int, float]] | None,
    times: Mapping[int, Reached],
    reference_times: Mapping[int, Reached],
) -> Judged:
    return Judged(
        variant=variant,
        runs=runs,
        values=values,
        means={name: estimate(list(by_seed.values())) for name, by_seed in values.items()},
        differences={
            name: difference(by_seed, reference[name])
            for name, by_seed in values.items()
            if reference is not None and name in reference
        },
        times=times,
        time=estimate([time.at_s for time in times.values()]) if times else None,
        speed_up=None if reference is None else speed_up(times, reference_times),
    )


def as_table(comparison: Comparison, *, root: Path | None = None) -> dict[str, Any]:
    """Return a comparison as plain JSON; what is not a finite number is null.

    Args:
        comparison: what to tell.
        root: folder that the runs' folders are told relative to, where they are inside.
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
                "variant": one.variant,
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


def _row(one: Judged, comparison: Comparison) -> dict[str, Any]:
    row: dict[str, Any] = {
        "variant": one.variant,
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


def _time(one: Judged, seed: int) -> dict[str, Any]:
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
