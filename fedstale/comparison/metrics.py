"""What the runs of a comparison measured, and which runs belong to one variant.

A metric counts as `--until` counts it: from a central evaluation if there is one, else from the
clients. A run that never reached the target counts with the time that it had: with its limit where
it had one; a run whose app ended by itself keeps its model, so it counts to the end of the longest.
"""

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from fedstale.comparison.statistics import Reached
from fedstale.config import SimulationConfig, Until
from fedstale.errors import ConfigError
from fedstale.reports.run import Run

_SOURCES = ("server", "evaluate", "train")
_DECIDING = ("server", "evaluate")
_WIDEST = 80
# Changes where and how often something is computed or kept, never what comes out.
_WITHOUT_EFFECT = ("workers", "checkpoint_every")


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
        horizon_s: what counts where nothing has cut the run off.
    """
    metric = str(target.metric)
    for time, value in zip(*run.curve(metric, source), strict=True):
        if target.is_reached(0, {metric: float(value)}):
            return Reached(at_s=float(time), ever=True)
    had = run.limit_s if np.isfinite(run.limit_s) else max(run.end_s, horizon_s)
    return Reached(at_s=float(had), ever=False)


def deciding_source(runs: Sequence[Run], metric: str) -> str | None:
    """Return the source of a metric: the first that all runs have, else the first that any has."""
    has = [{source for source in _SOURCES if len(run.curve(metric, source)[0])} for run in runs]
    for found in (set.intersection(*has), set.union(*has)) if has else ():
        for source in _SOURCES:
            if source in found:
                return source
    return None


def target_source(runs: Sequence[Run], target: Until) -> str:
    """Return the source of the target's metric.

    Raises:
        ConfigError: no run measured it where it could decide.
    """
    metric = str(target.metric)
    source = deciding_source(runs, metric)
    if source not in _DECIDING:
        known = sorted({name for run in runs for source in _DECIDING for name in run.last(source)})
        near = get_close_matches(metric, known, n=1)
        accepted = repr(near[0]) if near else f"one of {known}" if known else "an evaluating app"
        raise ConfigError(
            f"target: no run measured {metric!r} in an evaluation: expected {accepted}"
        )
    return source


def measured(run: Run, sources: Mapping[str, str]) -> dict[str, float]:
    """Return what a run measured by name: the last value of each metric, and its costs.

    Args:
        run: the run.
        sources: the source of each metric.
    """
    last = {source: run.last(source) for source in _SOURCES}
    metrics = {
        f"{source} {name}": last[source][name]
        for name, source in sources.items()
        if name in last[source]
    }
    return {**metrics, **run.costs}


def differing(before: SimulationConfig, now: SimulationConfig) -> str:
    """Return in words which settings differ that results depend on, or nothing."""
    old, new = flat(before), flat(now)
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return ", ".join(f"{key} = {old.get(key)!r} instead of {new.get(key)!r}" for key in keys)


def flat(config: SimulationConfig) -> dict[str, Any]:
    """Return the settings that results depend on, those of tables under `table.key`."""
    found: dict[str, Any] = {}
    for name, value in asdict(config).items():
        if name in ("run_config", "costs"):
            found |= {f"{name.replace('_', '-')}.{key}": inner for key, inner in value.items()}
        elif name == "executor":
            # All others give the same bytes.
            found[name] = "batched" if value == "batched" else "exact"
        elif name not in _WITHOUT_EFFECT:
            found[name.replace("_", "-")] = value
    return found


def grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return runs by variant, which is named after the settings in which the runs differ.

    Seeds make no difference, nor do run-config keys that equal the run's seed in all runs.

    Raises:
        ConfigError: a run has no settings of a simulation, or two of a variant have the same seed.
    """
    configs = [
        SimulationConfig.from_table(tomllib.loads(run.config_text), where=str(run.folder))
        for run in runs
    ]
    settings = [flat(config) for config in configs]
    names = {}
    for key in dict.fromkeys(key for one in settings for key in one):
        values = [one.get(key) for one in settings]
        is_seed = key == "seed" or (
            key.startswith("run-config.")
            and all(value == config.seed for value, config in zip(values, configs, strict=True))
        )
        if not is_seed and len({repr(value) for value in values}) > 1:
            names[key] = key.removeprefix("run-config.").removeprefix("costs.")
    variants: dict[str, list[Run]] = {}
    taken: dict[tuple[str, int], Run] = {}
    for run, config, own in zip(runs, configs, settings, strict=True):
        distinct = [f"{name}={own.get(key)}" for key, name in names.items()]
        variant = _shortened(printable(", ".join(distinct) or config.app))
        other = taken.setdefault((variant, config.seed), run)
        if other is not run:
            raise ConfigError(
                f"runs {str(other.folder)!r} and {str(run.folder)!r} have the same settings and "
                f"seed {config.seed}: expected one run a seed"
            )
        variants.setdefault(variant, []).append(run)
    return variants


def printable(text: str) -> str:
    r"""Return text that a terminal shows and does not obey.

    Example:
        >>> print(printable("fast\x1b[2J"))
        fast\x1b[2J
    """
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _shortened(text: str) -> str:
    """Return text with its middle left out if it is long, and a checksum that keeps it distinct."""
    if len(text) <= _WIDEST:
        return text
    checksum = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=3).hexdigest()
    return f"{text[: _WIDEST - 8]}…{checksum}"
