"""What is to be compared, read from a TOML file: variants of one simulation, and seeds.

Keys at the top hold for all variants, in the words of `SimulationConfig`; the table of a variant
replaces them, and its tables run-config and costs are merged key by key. Every (variant, seed)
becomes one resolved configuration, checked against the app before anything runs.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fedstale.config import SimulationConfig, Until, nearest, read_toml
from fedstale.errors import ConfigError
from fedstale.simulation.costs import Costs
from fedstale.simulation.flower_app import FlowerApp

_OWN = ("seeds", "seed-key", "target", "reference", "variants")
_TABLES = ("run-config", "costs")
_NUMBERS = ("devices", "workers", "checkpoint-every")
_SETTINGS = tuple(f.name.replace("_", "-") for f in fields(SimulationConfig) if f.name != "seed")
_SEED_KEY = "seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run of a comparison."""

    variant: str
    seed: int
    config: SimulationConfig
    """Resolved settings."""
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Variants, and the seeds with which each of them runs."""

    shared: Mapping[str, Any]
    """Settings of all variants, by dashed key."""
    variants: Mapping[str, Mapping[str, Any]]
    """Settings of each variant that replace the shared ones."""
    seeds: tuple[int, ...]
    reference: str
    """The variant that the others are compared with."""
    target: str | None = None
    """A metric and the value that it is to reach, as in `until`."""
    seed_key: str | None = None
    """Run-config key of the app that gets the seed too; empty for none, None for `seed` if the app
    has it."""

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """Read a plan.

        Raises:
            ConfigError: the file cannot be read, or does not say what to compare.
        """
        return cls.from_table(read_toml(path), where=str(path))

    @classmethod
    def from_table(cls, table: Mapping[str, Any], *, where: str) -> "Plan":
        """Return the plan in a table, rejecting what means nothing.

        Raises:
            ConfigError: a key is unknown or missing, or a value is out of range.
        """
        own = {key: table.get(key) for key in _OWN}
        rest = {key: value for key, value in table.items() if key not in own}
        shared = _settings(rest, where, known=(*_OWN, *_SETTINGS))
        variants = _variants(own["variants"], where)
        reference = table.get("reference", next(iter(variants)))
        if not isinstance(reference, str) or reference not in variants:
            raise ConfigError(
                f"{where}: reference = {reference!r}: expected {nearest(reference, variants)}"
            )
        for name in ("target", "seed-key"):
            if not isinstance(own[name], str | None):
                raise ConfigError(f"{where}: {name} = {own[name]!r}: expected a text")
        check_target(own["target"])
        plan = cls(
            shared=shared,
            variants=variants,
            seeds=_seeds(own["seeds"], where),
            reference=reference,
            target=own["target"],
            seed_key=own["seed-key"],
        )
        for name in variants:
            for key in ("app", "traces"):
                if key not in plan._table(name):
                    raise ConfigError(f"{where}: {key} is missing, for all or for {name!r}")
        return plan

    def config(self, variant: str, seed: int) -> SimulationConfig:
        """Return the resolved settings of a run, as its folder keeps them.

        Raises:
            ConfigError: the app, or a value, is not usable.
        """
        table = self._table(variant)
        given = {key.replace("-", "_"): value for key, value in table.items()}
        # Runs are already side by side: processes for clients would only get in their way.
        given.setdefault("executor", "inline" if given.get("workers") is None else "auto")
        try:
            config = SimulationConfig(**given, seed=seed)
            app = FlowerApp.find(config.app)
            overrides = dict(config.run_config)
            key = _SEED_KEY if self.seed_key is None else self.seed_key
            if key and (self.seed_key is not None or key in app.defaults):
                overrides.setdefault(key, seed)
            run_config = app.run_config(overrides)
            costs = Costs.from_table({**app.costs.table(), **config.costs}).resolved(run_config)
        except ConfigError as problem:
            raise ConfigError(f"variant {variant!r}: {problem}") from None
        return replace(config, run_config=run_config, costs=costs.table())

    def runs(self, folder: Path) -> list[PlannedRun]:
        """Return all runs: all variants of a seed, then the next, so that pairs come whole.

        Args:
            folder: where the folders of the variants are, each with one folder a seed.

        Raises:
            ConfigError: the app, or a value, is not usable.
        """
        return [
            PlannedRun(
                variant=variant,
                seed=seed,
                config=self.config(variant, seed),
                folder=folder / folder_name(variant) / str(seed),
            )
            for seed in self.seeds
            for variant in self.variants
        ]

    def table(self) -> dict[str, Any]:
        """Return the plan as a table that `from_table` reads."""
        own = {"seeds": list(self.seeds), "reference": self.reference}
        own |= {} if self.target is None else {"target": self.target}
        own |= {} if self.seed_key is None else {"seed-key": self.seed_key}
        return {**self.shared, **own, "variants": {k: dict(v) for k, v in self.variants.items()}}

    def _table(self, variant: str) -> dict[str, Any]:
        shared, own = self.shared, self.variants[variant]
        merged = {name: {**shared.get(name, {}), **own.get(name, {})} for name in _TABLES}
        return {**shared, **own, **merged}


def folder_name(variant: str) -> str:
    """Return a name for a variant's folder, distinct and safe, whatever the variant is called.

    Example:
        >>> folder_name("Gap-Aware"), folder_name("../b c")
        ('Gap-Aware', 'b-c-2dc68644')
    """
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", variant):
        return variant
    safe = re.sub(r"[^A-Za-z0-9_]+", "-", variant).strip("-")[:40]
    digest = hashlib.blake2b(variant.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{safe}-{digest}" if safe else digest


def check_target(target: str | None) -> None:
    """Check that a target, if there is one, is a metric and its value.

    Raises:
        ConfigError: it is something else.
    """
    with suppress(ConfigError):
        if target is None or Until.parse(target).metric is not None:
            return
    raise ConfigError(
        f"target = {target!r}: expected a metric and the value that it is to reach, such as "
        "'accuracy 0.9'"
    )


def _variants(table: object, where: str) -> dict[str, dict[str, Any]]:
    if not isinstance(table, dict) or not table:
        raise ConfigError(
            f"{where} has no variants: expected at least one table such as [variants.FedAvg]"
        )
    for name, settings in table.items():
        if not name.strip() or not name.isprintable():
            raise ConfigError(f"{where}: variant {name!r}: expected a name of printable characters")
        if not isinstance(settings, dict):
            raise ConfigError(
                f"{where}: variants.{name} = {settings!r}: expected a table of settings"
            )
    return {
        name: _settings(settings, f"{where}: variant {name!r}", known=_SETTINGS)
        for name, settings in table.items()
    }


def _seeds(seeds: object, where: str) -> tuple[int, ...]:
    fine = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not isinstance(seeds, list) or not fine or not seeds:
        what = "has no seeds" if seeds is None else f"has seeds = {seeds!r}"
        raise ConfigError(f"{where} {what}: expected whole numbers >= 0 such as [1, 2, 3, 4, 5]")
    twice = [seed for seed in dict.fromkeys(seeds) if seeds.count(seed) > 1]
    if twice:
        raise ConfigError(f"{where} has the seed {twice[0]} twice: expected each once")
    return tuple(seeds)


def _settings(table: Mapping[str, Any], where: str, *, known: Sequence[str]) -> dict[str, Any]:
    """Return settings by dashed key; a run's config.toml spells the same with underscores."""
    found: dict[str, Any] = {}
    for given, value in table.items():
        key = given.replace("_", "-")
        if key not in _SETTINGS:
            raise ConfigError(f"{where}: unknown key {given!r}: expected {nearest(key, known)}")
        if key in found:
            raise ConfigError(f"{where}: {key} is there twice, with and without underscores")
        _check_kind(key, value, where)
        found[key] = value
    return found


def _check_kind(key: str, value: object, where: str) -> None:
    if key in _TABLES:
        fine = isinstance(value, dict) and all(
            isinstance(inner, bool | int | float | str) for inner in value.values()
        )
        accepted = "a table of numbers, texts, true and false"
    elif key in _NUMBERS:
        fine, accepted = type(value) is int, "a whole number"
    else:
        fine, accepted = isinstance(value, str), "a text"
    if not fine:
        raise ConfigError(f"{where}: {key} = {value!r}: expected {accepted}")
