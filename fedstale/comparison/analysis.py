"""Variants of a simulation compared: means over seeds, and differences from a reference by seed.

A metric counts as `--until` counts it: from a central evaluation if there is one, else from the
clients. A run that never reached the target counts with the time that it had: with its limit where
it had one; a run whose app ended by itself keeps its model, so it counts to the end of the longest.
"""

import hashlib
import html
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from fedstale.comparison.statistics import (
    ANY,
    LEAST,
    NOTHING,
    Estimate,
    Reached,
    SpeedUp,
    difference,
    estimate,
    speed_up,
)
from fedstale.comparison.verdict import verdict
from fedstale.config import SimulationConfig
from fedstale.errors import ConfigError, nearest, printable
from fedstale.reports import SOURCES, Run, by_kind, measured_names, time_unit, without_folders
from fedstale.runs import EVENTS, MODEL
from fedstale.traces import outline
from fedstale.until import Until, is_lower_better

_DECIDING = ("server", "evaluate")
_SHOWN, _WIDEST, _LINE = 2, 80, 240
_POSITIVE = (0.0, np.inf)
_COLUMNS = (
    *("variant", "measure", "n", "mean", "low", "high"),
    *("difference", "difference_low", "difference_high", "pairs", "note"),
)


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
    time: Estimate
    """Mean time to the target in s, in which runs that never reached it count with the time they
    had; of no values without a target."""
    speed_up: SpeedUp | None
    device_speed_up: SpeedUp | None
    """The same of the time that all devices had spent by then."""

    __repr__ = outline

    @property
    def n_reached(self) -> int:
        """How many runs reached the target."""
        return sum(time.ever for time in self.times.values())

    @property
    def device_hours(self) -> Mapping[int, float]:
        """What all devices spent, by seed; until the target where there is one."""
        until = {seed: time.device_s for seed, time in self.times.items()}
        return {n: s / 3600.0 for n, s in (until or self.values.get("device_s", {})).items()}

    @property
    def is_bound(self) -> bool:
        """Whether a run never reached the target, so that the mean time is a lower bound."""
        return self.n_reached < len(self.times)


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
    limits: Mapping[str, tuple[float, float]]
    """The least and the largest value that each measure can have."""
    failures: tuple[tuple[str, int, str], ...] = ()
    """Variant, seed and reason of the runs that failed and are left out."""
    alike: tuple[tuple[str, int, int], ...] = ()
    """Variants of which two seeds have the same events and model, and the seeds."""

    @property
    def verdict(self) -> str:
        """What each variant needs of the reference's time, or how it ends; a line a variant.

        Of what is not shown, it says how many pairs would show it. Then come the device-hours of
        the best, and how it stands to the next where no line before says so.
        """
        base = self._variant(self.reference)
        lines = [self._against(one, base) for one in self.variants if one is not base]
        if not lines:
            return f"{base.name} is alone: there is nothing to compare it with."
        if best := self.ranked[:2]:
            by = f"{self.shown[0]} at the end" if self.target is None else f"time to {self.target}"
            name = best[0].name
            lines.append(f"{name} has the best mean {by}, for {self.cost(name)}.")
            if len(best) > 1 and base not in best:
                lines.append(f"The two best: {self._against(*best)}")
        return "\n".join(lines)

    @property
    def ranked(self) -> list[Variant]:
        """Variants by mean time to the target, or else by the first metric that tables show.

        Those that never reached it, or never measured it, are left out.
        """
        if self.target is not None:
            return sorted((v for v in self.variants if v.n_reached), key=lambda v: v.time.mean)
        if not self.shown:
            return []
        key, sign = self.key(self.shown[0]), 1.0 if is_lower_better(self.shown[0]) else -1.0
        known = (v for v in self.variants if np.isfinite(v.means.get(key, Estimate()).mean))
        return sorted(known, key=lambda v: sign * v.means[key].mean)

    def cost(self, name: str) -> str:
        """Return a variant's device-hours in words, those to the target if there is one.

        After them comes by how many they exceed the reference's, or of the reference those of the
        best of the others.
        """
        one, base = self._variant(name), self._variant(self.reference)
        if one is base:
            base = next(other for other in (*self.ranked, *self.variants) if other is not one)
        own = estimate(list(one.device_hours.values()), _POSITIVE).half_width()
        more = difference(one.device_hours, base.device_hours).ends()
        bound = (("", "at most "), ("at least ", "~"))[one.is_bound][base.is_bound]
        return f"{'at least ' * one.is_bound}{own} device-hours: {bound}{more} against {base.name}"

    def _variant(self, name: str) -> Variant:
        return next(one for one in self.variants if one.name == name)

    def _against(self, one: Variant, base: Variant) -> str:
        """Judge a variant against another, in a sentence."""
        seeds = {run.seed for run in base.runs}
        keys = {name: self.key(name) for name in self.shown}
        return verdict(
            one.name,
            base.name,
            n=sum(run.seed in seeds for run in one.runs),
            target=self.target,
            is_reached=one.n_reached + base.n_reached > 0,
            time=speed_up(one.times, base.times),
            device_time=speed_up(one.times, base.times, "device_s"),
            ends={
                name: difference(
                    one.values.get(key, {}), base.values.get(key, {}), self.limits[key]
                )
                for name, key in keys.items()
            },
        )

    @property
    def shown(self) -> list[str]:
        """Metrics that tables show: the target's, or else the first accuracies and losses."""
        if self.target is not None:
            metric = Until.parse(self.target).metric
            return [name for name in self.sources if name == metric]
        names = sorted(name for name, source in self.sources.items() if source != "train")
        accuracies, losses, _ = by_kind(names)
        return [*accuracies, *losses][:_SHOWN]

    def key(self, metric: str) -> str:
        """Return the name under which the values of a metric are found."""
        return f"{self.sources[metric]} {metric}"

    @property
    def table(self) -> pd.DataFrame:
        """One row for each variant and measure, as in comparison.csv; NaN where there is none."""
        rows: list[dict[str, object]] = []
        for one in self.variants:
            found: list[tuple[str, str, Mapping[str, object]]] = []
            for name, mean in one.means.items():
                paired = one.differences.get(name, Estimate())
                differences = {"difference": paired.mean, "difference_low": paired.low}
                differences |= {"difference_high": paired.high, "pairs": paired.n or np.nan}
                found.append((name, "", {**mean.numbers, **differences}))
            if one.time.n:
                n = len(one.times)
                note = "at least" if one.is_bound else ""
                found.append(("time_to_target_s", note, one.time.numbers))
                found.append(("reached_share", "", {"n": n, "mean": one.n_reached / n}))
            ratios = {"speed_up": one.speed_up, "device_speed_up": one.device_speed_up}
            for name, ratio in ratios.items():
                if ratio is not None:
                    note = "" if ratio.bound == "exact" else ratio.bound
                    found.append((name, note, ratio.ratio.numbers))
            rows += [
                {"variant": one.name, "measure": measure, "note": note, **values}
                for measure, note, values in found
            ]
        table = pd.DataFrame(rows, columns=list(_COLUMNS)).replace([np.inf, -np.inf], np.nan)
        return table.astype({"n": "Int64", "pairs": "Int64"})

    @property
    def words(self) -> pd.DataFrame:
        """The table for people, one row a variant.

        A mean is followed by the half width of its interval; a difference by the ends of its own.
        "at least" stands before a time in which runs count that never reached the target.
        """
        unit, length_s = time_unit(self.horizon_s)
        rows = []
        for one in self.variants:
            is_reference = one.name == self.reference
            row = [("variant", one.name), ("runs", str(len(one.runs)))]
            if self.target is not None:
                ratio = "reference" if is_reference else str(one.speed_up or NOTHING)
                n_reached = f"{one.n_reached} of {len(one.times)}"
                words = _time(one, length_s), n_reached, ratio
                names = f"time to {self.target} ({unit})", "reached", "speed-up"
                row += zip(names, words if one.times else [NOTHING] * 3, strict=True)
            for metric in self.shown:
                key = self.key(metric)
                paired = one.differences.get(key, Estimate()).ends()
                row.append((f"{metric} at the end", one.means.get(key, Estimate()).half_width()))
                row.append(("difference", "reference" if is_reference else paired))
            share = one.means.get("device_time_wasted")
            row.append(("device-hours wasted", NOTHING if share is None else f"{share.mean:.0%}"))
            rows.append(row)
        header = [name for name, _ in rows[0]]
        return pd.DataFrame([[text for _, text in row] for row in rows], columns=header)

    @property
    def notes(self) -> list[str]:
        """The notes below the table, in sentences."""
        found = [
            "Intervals hold 95% (Student's t), cut where a value could not be; differences and "
            f"speed-ups are paired by seed with {self.reference}."
        ]
        if any(len(one.runs) < LEAST for one in self.variants):
            found.append("Fewer than three runs have no interval: their values stand there.")
        if any(one.is_bound for one in self.variants):
            found.append(
                "A run that never reached the target counts with the time that it had, so its "
                "variant took at least the time stated; a ratio marked ~ bounds nothing, because "
                "such runs are on both sides."
            )
        found += [
            f"{variant}: seeds {one} and {other} came out alike, in events and model, so intervals "
            "are too narrow: run-config sets the app's seed, or the app draws from another key of "
            "it, which `seed-key` can name, or nothing in it is random."
            for variant, one, other in self.alike
        ]
        found += [
            f"Left out: {variant}, seed {seed}, which failed ({reason})."
            for variant, seed, reason in self.failures
        ]
        return found

    def _repr_html_(self) -> str:
        """Return the verdict, the table in words and its notes, as notebooks show them."""
        first = "".join(f"<p>{html.escape(line)}</p>" for line in self.verdict.split("\n"))
        return f"{first}{self.words.to_html(index=False)}<p>{html.escape(' '.join(self.notes))}</p>"

    def __repr__(self) -> str:
        told = " ".join(self.verdict.split())
        return f"<Comparison: {told if len(told) <= _LINE else told[:_LINE] + '...'}>"


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
    names = measured_names(every)
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
    values = {name: measured(some, sources) for name, some in runs.items()}
    limits = {
        key: limits_of(key, [x for own in values.values() for x in own.get(key, {}).values()])
        for key in {key for own in values.values() for key in own}
    }
    base = times[reference]
    return Comparison(
        variants=tuple(
            Variant(
                name=name,
                runs=tuple(some),
                values=values[name],
                means={
                    key: estimate(list(found.values()), limits[key])
                    for key, found in values[name].items()
                },
                differences={
                    key: difference(found, values[reference][key], limits[key])
                    for key, found in values[name].items()
                    if name != reference and key in values[reference]
                },
                times=times[name],
                time=estimate([time.at_s for time in times[name].values()], _POSITIVE),
                speed_up=None if name == reference else speed_up(times[name], base),
                device_speed_up=None
                if name == reference
                else speed_up(times[name], base, "device_s"),
            )
            for name, some in runs.items()
        ),
        reference=reference,
        target=target,
        sources=sources,
        horizon_s=horizon_s,
        limits=limits,
        failures=tuple(failures),
        alike=tuple((name, *seeds) for name, some in runs.items() if (seeds := _first_alike(some))),
    )


def _first_alike(runs: Sequence[Run]) -> tuple[int, int] | None:
    """Return the seeds of the first two runs with the same events and model, if there are two."""
    alike = [list(runs)]
    # A model may be large: it is read where events are the same, as they seldom are.
    for name in (EVENTS, MODEL):
        alike = [same for some in alike for same in _with_the_same(name, some) if len(same) > 1]
    return next(((one.seed, other.seed) for one, other, *_ in alike), None)


def _with_the_same(name: str, runs: Sequence[Run]) -> list[list[Run]]:
    """Group runs by the content of a file of their folders, which may be missing."""
    found: dict[bytes, list[Run]] = {}
    for run in runs:
        digest = b""
        with suppress(FileNotFoundError), (run.folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "blake2b").digest()
        found.setdefault(digest, []).append(run)
    return list(found.values())


def finished(run: Run | str | Path) -> Run:
    """Return a run that came to its end.

    Args:
        run: the run, or its folder.

    Raises:
        ConfigError: it is not the folder of a run that came to its end.
        ProtocolError: a file in it cannot be read.
    """
    run = run if isinstance(run, Run) else Run(run)
    if run.status in ("failed", "interrupted"):
        ended = "failed" if run.status == "failed" else "was interrupted"
        raise ConfigError(f"run = {str(run.folder)!r} {ended}: expected a run that came to its end")
    return run


def reached(run: Run, target: Until, source: str, horizon_s: float) -> Reached:
    """Return when a run reached a target.

    Args:
        run: the run.
        target: a metric and its value.
        source: of the metric.
        horizon_s: what counts where nothing has cut the run off; no run is longer.
    """
    at_s = run.time_to(target, source=source)
    ever = bool(np.isfinite(at_s))
    if not ever:
        at_s = run.limit_s if np.isfinite(run.limit_s) else horizon_s
    return Reached(at_s=at_s, ever=ever, device_s=run.device_s_until(at_s))


def deciding_source(runs: Sequence[Run], metric: str) -> str | None:
    """Return the source of a metric: the first that all runs have, else the first that any has."""
    has = [{source for source in SOURCES if len(run.curve(metric, source)[0])} for run in runs]
    of_all = [source for source in SOURCES if has and all(source in own for own in has)]
    of_any = [source for source in SOURCES if any(source in own for own in has)]
    return next(iter([*of_all, *of_any]), None)


def target_source(runs: Sequence[Run], target: Until) -> str:
    """Return the source of the target's metric.

    Raises:
        ConfigError: no run measured it where it could decide.
    """
    metric = str(target.metric)
    source = deciding_source(runs, metric)
    if source not in _DECIDING:
        known = sorted({name for run in runs for source in _DECIDING for name in run.last(source)})
        accepted = nearest(metric, known) if known else "an evaluating app"
        raise ConfigError(
            f"target: no run measured {metric!r} in an evaluation: expected {accepted}"
        )
    return source


def measured(runs: Sequence[Run], sources: Mapping[str, str]) -> dict[str, dict[int, float]]:
    """Tabulate the last value of each metric, and the costs, by name and seed.

    Args:
        runs: with different seeds.
        sources: the source of each metric.
    """
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        last = {source: run.last(source) for source in SOURCES}
        own = {f"{s} {name}": last[s][name] for name, s in sources.items() if name in last[s]}
        for name, value in {**own, **run.costs}.items():
            found.setdefault(name, {})[run.seed] = value
    return found


def limits_of(name: str, values: Sequence[float]) -> tuple[float, float]:
    """Return the least and the largest value that a measure can have, as far as its values tell.

    Args:
        name: of a metric, with its source, or of a cost.
        values: of all runs.

    Example:
        >>> limits_of("server accuracy", [0.2, 0.9]), limits_of("server accuracy", [20.0, 90.0])
        ((0.0, 1.0), (0.0, inf))
    """
    accuracies, losses, _ = by_kind([name])
    is_cost, finite = " " not in name, [value for value in values if np.isfinite(value)]
    if not (accuracies or losses or is_cost) or min(finite, default=0.0) < 0.0:
        return ANY
    is_share = name == "device_time_wasted" or (accuracies and max(finite, default=0.0) <= 1.0)
    return (0.0, 1.0) if is_share else _POSITIVE


def grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs by variant, named after the settings in which the runs differ.

    Seeds make no difference, nor do run-config keys that equal the run's seed in all runs.

    Raises:
        ConfigError: a run has no settings of a simulation, or two of a variant have the same seed.
    """
    configs = [
        SimulationConfig.from_table(tomllib.loads(run.config_text), where=str(run.folder))
        for run in runs
    ]
    settings = [config.effective() for config in configs]
    names, shown, said = {}, dict[str, dict[str, str]](), set[str]()
    for key in dict.fromkeys(key for one in settings for key in one):
        values = [one.get(key) for one in settings]
        is_seed = key == "seed" or (
            key.startswith("run-config.")
            and all(value == config.seed for value, config in zip(values, configs, strict=True))
        )
        # Costs that follow a key of the run config say nothing that it does not.
        if not is_seed and len({*map(repr, values)}) > 1 and repr(values) not in said:
            said.add(repr(values))
            names[key] = key.removeprefix("run-config.").removeprefix("costs.")
            short = {str(value): without_folders(f"'{value}'")[1:-1] for value in values}
            # Files of one name in several folders are told apart by these.
            shown[key] = short if len({*short.values()}) == len(short) else {}
    variants: dict[str, list[Run]] = {}
    taken: dict[tuple[str, int], Run] = {}
    for run, config, own in zip(runs, configs, settings, strict=True):
        texts = {key: str(own.get(key)) for key in names}
        distinct = [
            f"{name}={shown[key].get(texts[key], texts[key])}" for key, name in names.items()
        ]
        variant = _shortened(printable(", ".join(distinct) or Path(config.app).name))
        other = taken.setdefault((variant, config.seed), run)
        if other is not run:
            raise ConfigError(
                f"runs {str(other.folder)!r} and {str(run.folder)!r} have the same settings and "
                f"seed {config.seed}: expected one run a seed"
            )
        variants.setdefault(variant, []).append(run)
    return variants


def _shortened(text: str) -> str:
    """Return text with its middle left out if it is long, and a checksum that keeps it distinct."""
    if len(text) <= _WIDEST:
        return text
    checksum = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=3).hexdigest()
    return f"{text[: _WIDEST - 8]}…{checksum}"


def _time(one: Variant, length_s: float) -> str:
    """Return the mean time to the target in words."""
    if one.is_bound:
        # A bound has no interval that would hold anything.
        return f"at least {one.time.mean / length_s:.2f}"
    return one.time.half_width(lambda value: f"{value / length_s:.2f}")
