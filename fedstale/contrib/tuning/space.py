"""What is to be tuned, read from a TOML file and checked before anything runs.

The keys at the top are those of a comparison's plan: what every run has. A table `search` names
keys of the app's run config, each with a list of values or with a range, and arguments of the
strategy that stands there: with `strategy = "FedBuff(20, 5)"`, `strategy.eta` is one. `held-out`
has the seeds and devices on which nothing is tuned. All that can be wrong is found here, without
Ray.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Literal, get_args

from fedstale.comparison import Plan, PlannedRun, seeds_in
from fedstale.config import SimulationConfig, flat, instant_s, read_toml
from fedstale.contrib.tuning.objective import Objective
from fedstale.errors import ConfigError, nearest
from fedstale.simulation import FlowerApp
from fedstale.traces import TraceSet

Search = Literal["tpe", "random", "grid"]
"""How configurations are proposed; TPE is NSGA-II where there are several objectives."""
Stop = Literal["asha", "none"]
"""What stops configurations early, at the rungs."""
Plain = bool | int | float | str
Parameters = Mapping[str, Plain]
"""Values of the keys that are searched, by key of the run config."""

_OWN = (
    *("objective", "trials", "budget", "rungs", "keep", "held-out", "search"),
    "seeds",
)
_FIXED = tuple(f.name.replace("_", "-") for f in fields(SimulationConfig) if f.name != "seed")
_ONE_PROCESS = {"executor", "workers", "gpus", "client-limit-s"}
_IN_ONE_PROCESS = (("executor", "inline"), ("executor", "batched"))
_RANGE = {"from", "to", "log", "step"}
_STRATEGY = "strategy."
_RUNGS = (8, 4, 2)
_KEEP = 1 / 4
_BEST_OF = 2
"""Held-out seeds that give an interval at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """A key that takes one of some values."""

    values: tuple[Plain, ...]

    @property
    def first(self) -> Plain:
        """The value that stands first."""
        return self.values[0]

    def grid(self, key: str) -> Sequence[Plain]:
        """Return all values."""
        return self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A key that takes a number between two, both included."""

    low: float
    high: float
    """The last value that steps from `low` come to."""
    step: float | None = None
    is_log: bool = False
    is_whole: bool = False

    @property
    def first(self) -> Plain:
        """The lowest value."""
        return self.low

    def grid(self, key: str) -> Sequence[Plain]:
        """Return the values in steps.

        Raises:
            ConfigError: there are no steps.
        """
        if self.step is None:
            raise ConfigError(
                f"search.{key} has no step: a grid needs one, or a list of values; search by "
                "'random' or 'tpe' needs none"
            )
        n = round((self.high - self.low) / self.step) + 1
        values = [self.low + i * self.step for i in range(n)]
        return [int(value) for value in values] if self.is_whole else values


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Configurations to search, and by what they are judged."""

    shared: Mapping[str, Any]
    """Settings of all runs, as a plan has them."""
    domains: Mapping[str, Choices | Range]
    """What each searched key may be."""
    seeds: tuple[int, ...]
    objectives: tuple[Objective, ...]
    until_s: float
    """Virtual time of a run in s."""
    rungs_s: tuple[float, ...]
    """Virtual instants in s at which configurations are compared, rising, before `until_s`."""
    held_out: Mapping[str, Any]
    """`traces` and `seeds` on which nothing is tuned."""
    trials: int | None = None
    """Configurations to try; None of no limit but the budget, or the whole grid."""
    budget_s: float = math.inf
    """Wall time in s, after which no configuration is begun."""
    keep: float = _KEEP
    """Share of the configurations that goes on at a rung."""
    table: Mapping[str, Any]
    """As it was given."""

    @classmethod
    def read(cls, source: "str | Path | Mapping[str, Any] | Space") -> "Space":
        """Return the space in a file or a table.

        Raises:
            ConfigError: a key is unknown, missing or out of range.
            TraceError: the devices cannot be read.
        """
        if isinstance(source, Space):
            return source
        table = source if isinstance(source, Mapping) else read_toml(Path(source))
        return cls.from_table(table, where="space" if table is source else str(source))

    @classmethod
    def from_table(cls, table: Mapping[str, Any], *, where: str) -> "Space":
        """Return the space in a table, rejecting what means nothing; errors as of `read`."""
        given = {key.replace("_", "-"): value for key, value in table.items()}
        known = (*_OWN, *_FIXED)
        for key in given:
            if key not in known:
                raise ConfigError(f"{where}: unknown key {key!r}: expected {nearest(key, known)}")
        for key in given.keys() & _ONE_PROCESS:
            if (key, given[key]) not in _IN_ONE_PROCESS:
                raise ConfigError(
                    f"{where}: {key} = {given[key]!r}: configurations run side by side already, "
                    "each in one process; leave it out"
                )
        for key in ("app", "traces"):
            if not isinstance(given.get(key), str):
                raise ConfigError(f"{where}: {key} is missing: expected a text")
        until_s = instant_s(given.get("until"), f"{where}: until")
        space = cls(
            # Whole paths: a configuration runs in a process that may be elsewhere.
            shared={
                **{key: value for key, value in given.items() if key not in _OWN},
                "app": _place(given["app"]) if Path(given["app"]).is_dir() else given["app"],
                "traces": _place(given["traces"]),
            },
            domains=_domains(given.get("search"), f"{where}: search"),
            seeds=seeds_in(given.get("seeds"), f"{where}: seeds"),
            objectives=_objectives(given.get("objective"), where),
            until_s=until_s,
            rungs_s=_rungs(given.get("rungs"), until_s, where),
            held_out=_held_out(given, where),
            trials=_trials(given.get("trials"), where),
            budget_s=(
                instant_s(given["budget"], f"{where}: budget") if "budget" in given else math.inf
            ),
            keep=_share(given.get("keep", _KEEP), where),
            table=given,
        )
        space._check_separate(where)
        space._check_app(where)
        for traces in {space.shared["traces"], space.held_out["traces"]}:
            TraceSet.load(traces, seed=0)
        return space

    def check(self, search: Search, stop: Stop | None) -> Stop:
        """Return what stops configurations, once the way of searching is known to fit.

        Raises:
            ConfigError: it does not.
        """
        for name, value, kinds in (("search", search, Search), ("stop", stop or "none", Stop)):
            if value not in get_args(kinds):
                raise ConfigError(f"{name} = {value!r}: expected one of {get_args(kinds)}")
        if search == "grid":
            n = len(self.grid())
            if self.trials is not None and self.trials < n:
                raise ConfigError(
                    f"trials = {self.trials}: the grid has {n} configurations; leave trials out"
                )
        elif self.trials is None and self.budget_s == math.inf:
            raise ConfigError("trials is missing: expected a number of configurations, or a budget")
        if len(self.objectives) > 1 and stop == "asha":
            raise ConfigError(
                f"stop = {stop!r}: of several objectives none says alone what is to be stopped; "
                "expected 'none'"
            )
        return stop or ("asha" if len(self.objectives) == 1 else "none")

    def grid(self) -> list[dict[str, Plain]]:
        """Return all configurations of the grid, the last key changing fastest.

        Raises:
            ConfigError: a range has no step.
        """
        values = [domain.grid(key) for key, domain in self.domains.items()]
        return [dict(zip(self.domains, one, strict=True)) for one in product(*values)]

    @property
    def instants_s(self) -> tuple[float, ...]:
        """The rungs and the end, in s."""
        return (*self.rungs_s, self.until_s)

    @property
    def notes(self) -> list[str]:
        """What is worth a warning, in sentences."""
        if len(self.seeds) > 1:
            return []
        return [
            f"seeds = {list(self.seeds)}: one seed alone may prefer what diverges on others; three "
            "cost three times as much and are worth it"
        ]

    def plan(
        self, variants: Mapping[str, Mapping[str, Any]], *, held_out: bool, reference: str
    ) -> Plan:
        """Return a plan of some configurations.

        Args:
            variants: what differs in each, as in a plan.
            held_out: whether on the seeds and devices on which nothing is tuned.
            reference: the variant that the others are compared with.
        """
        where = (
            self.held_out if held_out else {"traces": self.shared["traces"], "seeds": self.seeds}
        )
        first = self.objectives[0]
        table = {
            **self.shared,
            "traces": where["traces"],
            "seeds": list(where["seeds"]),
            "reference": reference,
            "variants": dict(variants),
        }
        if first.kind == "time":
            table["target"] = first.text.removeprefix("time to ")
        return Plan.from_table(table, where="space")

    def settings(self, parameters: Parameters) -> dict[str, Any]:
        """Return what a configuration has of its own, as a variant of a plan.

        That is keys of the run config, and the strategy with its arguments: in the run config of an
        app that has it there, unless the top of the file names another.

        Raises:
            ConfigError: the strategy has no such argument.
        """
        if not any(f"{key}.".startswith(_STRATEGY) for key in parameters):
            return {"run-config": dict(parameters)}
        defaults = self._defaults()
        keys = {k: v for k, v in parameters.items() if not _is_argument(k, defaults)}
        arguments = {
            key.removeprefix(_STRATEGY): value
            for key, value in parameters.items()
            if key not in keys
        }
        is_named = self._names_strategy(defaults)
        usual = self.shared["strategy"] if "strategy" in self.shared else defaults.get("strategy")
        text = keys.pop("strategy", usual)
        if arguments:
            # Loads all strategies, which a search of other keys never does here.
            from fedstale.strategies import with_arguments  # noqa: PLC0415

            text = with_arguments(str(text), arguments)
        if is_named:
            return {"run-config": keys, "strategy": text}
        return {"run-config": keys | {"strategy": text}}

    def _names_strategy(self, defaults: Mapping[str, Any]) -> bool:
        """Return whether the strategy is a setting of runs, and no key of their run config."""
        return "strategy" in self.shared or "strategy" not in defaults

    def _defaults(self) -> Mapping[str, Any]:
        """Return the run config of all runs."""
        defaults = FlowerApp.find(self.shared["app"]).defaults
        return {**defaults, **dict(flat(self.shared.get("run-config", {})))}

    def runs(self, parameters: Parameters, folder: Path) -> list[PlannedRun]:
        """Return the runs of a configuration, one a seed.

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

    def _check_separate(self, where: str) -> None:
        """Check that nothing that judges also tunes."""
        tuned = {(self.shared["traces"], seed) for seed in self.seeds}
        judged = {(self.held_out["traces"], seed) for seed in self.held_out["seeds"]}
        both = sorted(tuned & judged)
        if both:
            traces, seed = both[0]
            raise ConfigError(
                f"{where}: held-out has seed {seed} on {traces!r}, which also tunes: expected "
                "other seeds on the same traces, or other traces"
            )

    def _check_app(self, where: str) -> None:
        """Check the searched keys and their values, and that the defaults can run."""
        app = FlowerApp.find(self.shared["app"])
        has_strategy = any("strategy" in keys for keys in (self.shared, self.domains, app.defaults))
        taken = {app.takes_seed(self.shared.get("seed-key")), *self.shared.get("run-config", {})}
        for key, domain in self.domains.items():
            if _is_argument(key, app.defaults) and has_strategy:
                continue
            if key == "strategy" and self._names_strategy(app.defaults):
                continue
            _check_key(key, app.defaults, taken, where)
            default = app.defaults[key]
            is_number = isinstance(default, int | float) and not isinstance(default, bool)
            if isinstance(domain, Range) and not is_number and default != "":
                raise ConfigError(
                    f"{where}: search.{key} is a range, but the app's default is {default!r}: "
                    "expected a list of values"
                )
            if isinstance(domain, Range) and domain.is_whole and isinstance(default, float):
                raise ConfigError(
                    f"{where}: search.{key} is a range of whole numbers, but the app's default is "
                    f"{default}: write them as {domain.low:.1f} and {domain.high:.1f}"
                )
        self._check_variant({})
        first = {key: domain.first for key, domain in self.domains.items()}
        self._check_variant(first)
        for key, domain in self.domains.items():
            if isinstance(domain, Choices) and (
                key == "strategy" or _is_argument(key, app.defaults)
            ):
                for value in domain.values[1:]:
                    self._check_variant({**first, key: value})

    def _check_variant(self, parameters: Parameters) -> None:
        """Check that one configuration can run, by what it has in its run config."""
        plan = self.plan({"one": self.settings(parameters)}, held_out=False, reference="one")
        plan.config("one", self.seeds[0])


def _is_argument(key: str, defaults: Mapping[str, Any]) -> bool:
    """Return whether a searched key is an argument of the app's strategy, and no key of its own."""
    return key.startswith(_STRATEGY) and key not in defaults


def _check_key(key: str, defaults: Mapping[str, Any], taken: set[Any], where: str) -> None:
    """Check that a key is one of the app's that a search may set."""
    if key in taken:
        raise ConfigError(
            f"{where}: search.{key} cannot be tuned: it is the seed of a run, or stands in "
            "run-config already"
        )
    if key in defaults:
        return
    if key.replace("_", "-") in (*_FIXED, "seed"):
        raise ConfigError(
            f"{where}: search.{key} cannot be tuned: it is a setting of all runs, and no key of "
            "the app's run config; it belongs to the top of the file"
        )
    raise ConfigError(
        f"{where}: search.{key} is unknown: expected {nearest(key, sorted(defaults))}"
    )


def _domains(table: object, where: str) -> dict[str, Choices | Range]:
    if not isinstance(table, Mapping) or not table:
        raise ConfigError(
            f"{where} is missing: expected keys of the app's run config, such as "
            "learning-rate = { from = 0.01, to = 1.0, log = true }"
        )
    return {key: _domain(value, f"{where}.{key}") for key, value in _leaves(table)}


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys, with dots in those of inner tables, down to lists and ranges."""
    for key, value in table.items():
        if isinstance(value, Mapping) and not {"from", "to"} & value.keys():
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _domain(value: object, where: str) -> Choices | Range:
    if isinstance(value, Mapping):
        return _range(value, where)
    fine = isinstance(value, list) and all(
        isinstance(one, bool | int | float | str) for one in value
    )
    if not isinstance(value, list) or not fine or not value:
        raise ConfigError(
            f"{where} = {value!r}: expected a list of values, or a range such as "
            "{ from = 5, to = 60, step = 5 }"
        )
    if len({repr(one) for one in value}) < len(value):
        raise ConfigError(f"{where} = {value!r}: expected each value once")
    return Choices(values=tuple(value))


def _range(table: Mapping[str, Any], where: str) -> Range:
    for key in table:
        if key not in _RANGE:
            raise ConfigError(f"{where}: unknown key {key!r}: expected {nearest(key, _RANGE)}")
    numbers = {key: table[key] for key in ("from", "to", "step") if key in table}
    for key in ("from", "to"):
        if key not in table:
            raise ConfigError(f"{where}: {key} is missing")
    for key, value in numbers.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise ConfigError(f"{where}: {key} = {value!r}: expected a number")
    low, high, step, is_log = table["from"], table["to"], table.get("step"), table.get("log", False)
    if low > high:
        raise ConfigError(f"{where}: from = {low} is above to = {high}: expected the lower first")
    if not isinstance(is_log, bool):
        raise ConfigError(f"{where}: log = {is_log!r}: expected true or false")
    if is_log and low <= 0:
        raise ConfigError(f"{where}: log with from = {low}: expected a number > 0")
    if step is not None and (step <= 0 or is_log):
        raise ConfigError(f"{where}: step = {step}: expected a number > 0, and no log beside it")
    if step is not None:
        # A last step that is cut short would be another step.
        high = low + math.floor((high - low) / step + 1e-9) * step
    is_whole = all(isinstance(value, int) for value in numbers.values())
    return Range(low=low, high=high, step=step, is_log=is_log, is_whole=is_whole)


def _objectives(value: object, where: str) -> tuple[Objective, ...]:
    texts = value if isinstance(value, list) else [value]
    if value is None or not texts:
        raise ConfigError(f"{where}: objective is missing: expected such as 'accuracy'")
    found = tuple(Objective.parse(text) for text in texts)
    if len(set(found)) < len(found):
        raise ConfigError(f"{where}: objective = {value!r}: expected each once")
    return found


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


def _trials(value: object, where: str) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(f"{where}: trials = {value!r}: expected a whole number >= 1")
    return value


def _share(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ConfigError(f"{where}: keep = {value!r}: expected a share above 0 and below 1")
    return float(value)


def _place(name: str) -> str:
    """Return an app or traces by one name, however and from wherever their path is spelt."""
    return str(Path(name).resolve()) if Path(name).exists() else name
