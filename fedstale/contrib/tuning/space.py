"""What is to be tuned, read from a TOML file and checked before anything runs.

The keys at the top are those of a comparison's plan: what every run has. A table `search` names
keys of the app's run config, each with a list of values or with a range, and arguments of the
strategy that stands there: with `strategy = "FedBuff(20, 5)"`, `strategy.eta` is one. `held-out`
has the seeds and devices on which nothing is tuned. All that can be wrong is found here, without
Ray.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from fedstale.comparison import Plan, PlannedRun, seeds_in
from fedstale.config import SimulationConfig, flat, instant_s, read_toml
from fedstale.contrib.tuning.objective import Objective
from fedstale.errors import ConfigError, nearest
from fedstale.simulation import FlowerApp
from fedstale.traces import TraceSet

Search = Literal["tpe", "random"]
"""How configurations are proposed."""
Stop = Literal["asha", "none"]
"""What stops configurations early, at the rungs."""
Domain = CategoricalDistribution | FloatDistribution | IntDistribution
"""Values that a key may have."""
Plain = bool | int | float | str
Parameters = Mapping[str, Plain]
"""Values of the keys that are searched, by key of the run config."""

_OWN = ("objective", "trials", "budget", "rungs", "keep", "held-out", "search", "seeds")
_FIXED = tuple(f.name.replace("_", "-") for f in fields(SimulationConfig) if f.name != "seed")
_ONE_PROCESS = {"executor", "workers", "gpus", "client-limit-s"}
_IN_ONE_PROCESS = (("executor", "inline"), ("executor", "batched"))
_RANGE = {"from": "low", "to": "high", "log": "log", "step": "step"}
"""Keys of a range, and what Optuna calls them."""
_STRATEGY = "strategy."
_RUNGS = (8, 4, 2)
_KEEP = 1 / 4
_BEST_OF = 2
"""Held-out seeds that give an interval at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Configurations to search, and by what they are judged."""

    shared: Mapping[str, Any]
    """Settings of all runs, as a plan has them."""
    domains: Mapping[str, Domain]
    """Optuna's distribution of each searched key."""
    seeds: tuple[int, ...]
    objective: Objective
    until_s: float
    """Virtual time of a run in s."""
    rungs_s: tuple[float, ...]
    """Virtual instants in s at which configurations are compared, rising, before `until_s`."""
    held_out: Mapping[str, Any]
    """`traces` and `seeds` on which nothing is tuned."""
    trials: int | None = None
    """Configurations to try; None of no limit but the budget."""
    budget_s: float = math.inf
    """Wall time in s, after which no configuration is begun."""
    keep: float = _KEEP
    """Share of the configurations that goes on at a rung."""
    table: Mapping[str, Any]
    """As it was given."""

    @classmethod
    def read(cls, source: "str | Path | Mapping[str, Any] | Space") -> "Space":
        """Read the space of a file or a table.

        Raises:
            ConfigError: a key is unknown, missing or out of range.
            TraceError: the devices cannot be read.
        """
        if isinstance(source, Space):
            return source
        table = source if isinstance(source, Mapping) else read_toml(Path(source))
        where = "space" if table is source else str(source)
        given = {key.replace("_", "-"): value for key, value in table.items()}
        known = (*_OWN, *_FIXED)
        for key, value in given.items():
            if key not in known:
                raise ConfigError(f"{where}: unknown key {key!r}: expected {nearest(key, known)}")
            if key in _ONE_PROCESS and (key, value) not in _IN_ONE_PROCESS:
                raise ConfigError(
                    f"{where}: {key} = {value!r}: configurations run side by side already, each "
                    "in one process; leave it out"
                )
        for key in ("app", "traces"):
            if not isinstance(given.get(key), str):
                raise ConfigError(f"{where}: {key} is missing: expected a text")
        trials, keep, budget = given.get("trials"), given.get("keep", _KEEP), given.get("budget")
        if trials is not None and (type(trials) is not int or trials < 1):
            raise ConfigError(f"{where}: trials = {trials!r}: expected a whole number >= 1")
        if trials is None and budget is None:
            raise ConfigError(f"{where}: trials is missing: expected a number, or a budget")
        if type(keep) not in (int, float) or not 0 < keep < 1:
            raise ConfigError(f"{where}: keep = {keep!r}: expected a share above 0 and below 1")
        until_s = instant_s(given.get("until"), f"{where}: until")
        space = cls(
            # Whole paths: a configuration runs in a process that may be elsewhere.
            shared={
                **{key: value for key, value in given.items() if key not in _OWN},
                "app": _place(given["app"]) if Path(given["app"]).is_dir() else given["app"],
                "traces": _place(given["traces"]),
            },
            domains=_domains(
                given.get("search"), FlowerApp.find(given["app"]).defaults, f"{where}: search"
            ),
            seeds=seeds_in(given.get("seeds"), f"{where}: seeds"),
            objective=Objective.parse(given.get("objective")),
            until_s=until_s,
            rungs_s=_rungs(given.get("rungs"), until_s, where),
            held_out=_held_out(given, where),
            trials=trials,
            budget_s=math.inf if budget is None else instant_s(budget, f"{where}: budget"),
            keep=float(keep),
            table=given,
        )
        space._check_separate(where)
        space._check_app(where)
        for traces in {space.shared["traces"], space.held_out["traces"]}:
            TraceSet.load(traces, seed=0)
        return space

    @property
    def instants_s(self) -> tuple[float, ...]:
        """The rungs and the end, in s."""
        return (*self.rungs_s, self.until_s)

    def plan(
        self, variants: Mapping[str, Mapping[str, Any]], *, held_out: bool, reference: str
    ) -> Plan:
        """Plan the runs of some configurations.

        Args:
            variants: what differs in each, as in a plan.
            held_out: whether on the seeds and devices on which nothing is tuned.
            reference: the variant that the others are compared with.
        """
        table = {
            **self.shared,
            "seeds": list(self.held_out["seeds"] if held_out else self.seeds),
            "reference": reference,
            "variants": dict(variants),
        }
        if held_out:
            table["traces"] = self.held_out["traces"]
        if self.objective.kind == "time":
            table["target"] = self.objective.text.removeprefix("time to ")
        return Plan.from_table(table, where="space")

    def settings(self, parameters: Parameters) -> dict[str, Any]:
        """Return the settings of a configuration, as a variant of a plan.

        That is keys of the run config, and the strategy with its arguments: in the run config of an
        app that has it there, unless the top of the file names another.

        Raises:
            ConfigError: the strategy has no such argument.
        """
        if not any(f"{key}.".startswith(_STRATEGY) for key in parameters):
            return {"run-config": dict(parameters)}
        app = FlowerApp.find(self.shared["app"]).defaults
        defaults = {**app, **dict(flat(self.shared.get("run-config", {})))}
        keys = {k: v for k, v in parameters.items() if not _is_argument(k, defaults)}
        arguments = {
            key.removeprefix(_STRATEGY): value
            for key, value in parameters.items()
            if key not in keys
        }
        usual = self.shared["strategy"] if "strategy" in self.shared else defaults.get("strategy")
        text = keys.pop("strategy", usual)
        if arguments:
            # Loads all strategies, which a search of other keys never does here.
            from fedstale.strategies import with_arguments  # noqa: PLC0415

            text = with_arguments(str(text), arguments)
        if self._names_strategy(defaults):
            return {"run-config": keys, "strategy": text}
        return {"run-config": keys | {"strategy": text}}

    def runs(self, parameters: Parameters, folder: Path) -> list[PlannedRun]:
        """Plan the runs of a configuration, one a seed.

        Raises:
            ConfigError: the app cannot run so.
        """
        plan = self.plan({"trial": self.settings(parameters)}, held_out=False, reference="trial")
        return [
            PlannedRun(
                variant="trial", config=plan.config("trial", seed), folder=folder / f"seed-{seed}"
            )
            for seed in self.seeds
        ]

    def _names_strategy(self, defaults: Mapping[str, Any]) -> bool:
        """Return whether the strategy is a setting of runs, and no key of their run config."""
        return "strategy" in self.shared or "strategy" not in defaults

    def _check_separate(self, where: str) -> None:
        """Check that nothing that judges also tunes."""
        traces = self.held_out["traces"]
        both = set(self.seeds) & set(self.held_out["seeds"])
        if both and traces == self.shared["traces"]:
            raise ConfigError(
                f"{where}: held-out has seed {min(both)} on {traces!r}, which also tunes: expected "
                "other seeds on the same traces, or other traces"
            )

    def _check_app(self, where: str) -> None:
        """Check the searched keys and their values, and that the defaults can run."""
        app = FlowerApp.find(self.shared["app"])
        taken = {app.takes_seed(self.shared.get("seed-key")), *self.shared.get("run-config", {})}
        if both := sorted(taken & self.domains.keys()):
            raise ConfigError(
                f"{where}: search.{both[0]} cannot be tuned: it is the seed of a run, or stands in "
                "run-config already"
            )
        first = {key: _first(domain) for key, domain in self.domains.items()}
        changed = [
            {**first, key: value}
            for key, domain in self.domains.items()
            if key == "strategy" or _is_argument(key, app.defaults)
            for value in getattr(domain, "choices", ())[1:]
        ]
        for parameters in ({}, first, *changed):
            plan = self.plan({"one": self.settings(parameters)}, held_out=False, reference="one")
            plan.config("one", self.seeds[0])


def _is_argument(key: str, defaults: Mapping[str, Any]) -> bool:
    """Return whether a searched key is an argument of the app's strategy, and no key of its own."""
    return key.startswith(_STRATEGY) and key not in defaults


def _domains(table: object, defaults: Mapping[str, Any], where: str) -> dict[str, Domain]:
    if not isinstance(table, Mapping) or not table:
        raise ConfigError(
            f"{where} is missing: expected keys of the app's run config, such as "
            "learning-rate = { from = 0.01, to = 1.0, log = true }"
        )
    return {key: _domain(v, defaults.get(key, 1), f"{where}.{key}") for key, v in _leaves(table)}


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys, with dots in those of inner tables, down to lists and ranges."""
    for key, value in table.items():
        if isinstance(value, Mapping) and not {"from", "to"} & value.keys():
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _domain(value: object, default: object, where: str) -> Domain:
    """Return Optuna's distribution of a list of values, or of a range of numbers."""
    if isinstance(value, list) and value and all(isinstance(one, Plain) for one in value):
        if len({repr(one) for one in value}) < len(value):
            raise ConfigError(f"{where} = {value!r}: expected each value once")
        return CategoricalDistribution(value)
    if not isinstance(value, Mapping) or isinstance(default, bool):
        raise ConfigError(
            f"{where} = {value!r}: expected a list of values, or of a number a range such as "
            "{ from = 5, to = 60, step = 5 }"
        )
    for key in value:
        if key not in _RANGE:
            raise ConfigError(f"{where}: unknown key {key!r}: expected {nearest(key, _RANGE)}")
    numbers = {key: value.get(key) for key in ("from", "to", *({"step"} & value.keys()))}
    for key, one in numbers.items():
        if isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one):
            raise ConfigError(f"{where}: {key} = {one!r}: expected a number")
    if not isinstance(value.get("log", False), bool):
        raise ConfigError(f"{where}: log = {value['log']!r}: expected true or false")
    named = {_RANGE[key]: one for key, one in value.items()}
    if named.get("step", 0) > 0:
        # A last step that is cut short would be another step.
        low, step = named["low"], named["step"]
        named["high"] = low + math.floor((named["high"] - low) / step + 1e-9) * step
    is_whole = {type(one) for one in (*numbers.values(), default)} <= {int, str}
    kind = IntDistribution if is_whole else FloatDistribution
    try:
        return kind(**named)
    except ValueError as problem:
        raise ConfigError(f"{where} = {dict(value)}: {problem}") from None


def _first(domain: Domain) -> Plain:
    """Return the first choice, or the lowest value."""
    found = domain.choices[0] if isinstance(domain, CategoricalDistribution) else domain.low
    return cast("Plain", found)


def _rungs(value: object, until_s: float, where: str) -> tuple[float, ...]:
    if value is None:
        return tuple(until_s / part for part in _RUNGS)
    if not isinstance(value, list):
        raise ConfigError(f"{where}: rungs = {value!r}: expected instants such as ['30m', '1h']")
    found = tuple(instant_s(one, f"{where}: rungs") for one in value)
    if any(a >= b for a, b in pairwise((*found, until_s))):
        raise ConfigError(
            f"{where}: rungs = {value!r}: expected rising instants before until, which is "
            f"{until_s:,.0f} s"
        )
    return found


def _held_out(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    table = given.get("held-out")
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"{where}: held-out is missing: what is tuned and what is judged are not the same; "
            "expected { traces = 'phones-test.parquet', seeds = [11, 12, 13] }"
        )
    for key in table:
        if key not in ("traces", "seeds"):
            raise ConfigError(
                f"{where}: held-out has unknown key {key!r}: expected 'traces' or 'seeds'"
            )
    traces = table.get("traces", given["traces"])
    if not isinstance(traces, str):
        raise ConfigError(f"{where}: held-out.traces = {traces!r}: expected a text")
    seeds = seeds_in(table.get("seeds"), f"{where}: held-out.seeds", least=_BEST_OF)
    return {"traces": _place(traces), "seeds": seeds}


def _place(name: str) -> str:
    """Return an app or traces by one name, however and from wherever their path is spelt."""
    return str(Path(name).resolve()) if Path(name).exists() else name
