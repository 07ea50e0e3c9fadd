"""What a run config can name: strategies, selectors, weightings and robust rules, and settings.

`NAMES` is the one table of parts, by the key of the run config, and `SETTINGS` of the settings that
hold for any strategy of fedstale; docs/strategies.md lists both. Names are read without regard to
case, hyphens and underscores, so the name of a class is one too: `gap-aware` and `GapAware` are the
same. A name stands for a part with its own defaults; who needs others composes a strategy in
Python.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature
from typing import Any, TypeVar, cast

from flwr.app.user_config import UserConfig
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from flwr.serverapp.strategy import Strategy

from fedstale import strategies
from fedstale.agents import AgentSelector
from fedstale.config import instant_s, nearest
from fedstale.errors import ConfigError
from fedstale.strategies import (
    AuditRecord,
    Compression,
    ForecastRequest,
    LocalWork,
    Privacy,
    StaleStrategy,
    robust,
    selection,
    weighting,
)
from fedstale.strategies.messages import FORMATS
from fedstale.strategies.stages import Stage
from fedstale.strategies.types import FormatName
from fedstale.strategies.weighting import ByAge

T = TypeVar("T", int, float)
FLOWERS = "flower-fedavg"

NAMES: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "strategy": {
        FLOWERS: FlowersFedAvg,
        "fedavg": strategies.FedAvg,
        "fedavg-over-selected": strategies.FedAvgOverSelected,
        "fedprox": strategies.FedProx,
        "fedavgm": strategies.FedAvgM,
        "fedadam": strategies.FedAdam,
        "fedyogi": strategies.FedYogi,
        "fedadagrad": strategies.FedAdagrad,
        "fedbuff": strategies.FedBuff,
        "fedasync": strategies.FedAsync,
        "gap-aware": strategies.GapAware,
        "direction-aware": strategies.DirectionAware,
        "refl": strategies.REFL,
        "fadas": strategies.FADAS,
        "asyncfeded": strategies.AsyncFedED,
        "ca2fl": strategies.CA2FL,
        "fedstale": strategies.FedStale,
        "adaptive-sync": strategies.AdaptiveSync,
    },
    "selector": {
        "random": selection.Random,
        "fedcs": selection.Fastest,
        "power-of-choice": partial(selection.PowerOfChoice, 30),
        "oort": selection.Oort,
        "refl": selection.LeastAvailable,
        "most-reliable": selection.MostReliable,
        "expected-utility": selection.ExpectedUtility,
        "probing": lambda: selection.Probing(selection.ExpectedUtility()),
        "agent": AgentSelector,
    },
    "weighting": {
        "constant": lambda: ByAge(weighting.constant()),
        "polynomial": lambda: ByAge(weighting.polynomial()),
        "hinge": lambda: ByAge(weighting.hinge()),
        "exponential": lambda: ByAge(weighting.exponential()),
        "staleness-aware": lambda: ByAge(weighting.staleness_aware()),
        "inverse": lambda: ByAge(weighting.inverse()),
        "inverse-root": lambda: ByAge(weighting.inverse_root()),
        "gap": weighting.Gap,
        "directional-gap": weighting.DirectionalGap,
        "relevance-aware": weighting.RelevanceAware,
        "euclidean-staleness": weighting.EuclideanStaleness,
        "cached-updates": weighting.CachedUpdates,
    },
    "robust": {
        "median": robust.Median,
        "trimmed-mean": robust.TrimmedMean,
        "geometric-median": robust.GeometricMedian,
        "krum": robust.Krum,
        "multi-krum": robust.MultiKrum,
        "bulyan": robust.Bulyan,
        "centred-clipping": robust.CentredClipping,
        "ctma": robust.CTMA,
    },
}
"""What makes a part, by its name, by the key of the run config that names it."""


_PRIVACY = {
    f"privacy.{name.replace('_', '-')}": setting
    for name, setting in signature(Privacy).parameters.items()
}
"""Settings of `Privacy`, by the key of the run config."""
SETTINGS = (
    *("max-staleness", "messages", "messages-down", "work", "work-least", "normalise"),
    *_PRIVACY,
)
"""Keys of the run config that are empty where they are not set."""


def named(key: str, name: str) -> Callable[..., Any]:
    """Return what makes the part that a run config names.

    Args:
        key: of the run config: strategy, selector, weighting or robust.
        name: its value.

    Raises:
        ConfigError: there is no such part; names the nearest one.

    Example:
        >>> named("weighting", "Relevance_Aware").__name__
        'RelevanceAware'
        >>> named("robust", "crum")
        Traceback (most recent call last):
        fedstale.errors.ConfigError: robust = 'crum': expected 'krum'
    """
    known = {_plain(name): make for name, make in NAMES[key].items()}
    if _plain(name) not in known:
        raise ConfigError(f"{key} = {name!r}: expected {nearest(name.lower(), NAMES[key])}")
    return known[_plain(name)]


def strategy(config: UserConfig) -> Strategy:
    """Return the strategy that the run config of a built-in app names, with its parts.

    `selector`, `weighting` and `robust` replace the parts that the strategy composes itself; empty
    ones leave them. The sizes that it takes are `concurrency` and `buffer-size`, or
    `fraction-train` for FedAvg and what is like it. `SETTINGS` that are empty are not set; with one
    of `privacy` the strategy is private, and needs all that `Privacy` has no default for.

    Raises:
        ConfigError: a name or a number is not one of those offered, parts do not go together, or
            Flower's strategy has no such part.
    """
    make = named("strategy", str(config["strategy"]))
    if make is FlowersFedAvg:
        return _flowers(config)
    options: dict[str, Any] = {
        "fraction_evaluate": _number(config, "fraction-evaluate", float),
        "stages": _stages(config),
        "checkpoints": str(config["checkpoints"]) or None,
        "resume": str(config["resume"]) or None,
        "seed": _number(config, "seed", int),
    }
    sizes = signature(make).parameters
    if make in _IN_ROUNDS:
        options["fraction_train"] = _number(config, "fraction-train", float)
    elif "concurrency" in sizes:
        options["concurrency"] = _number(config, "concurrency", int)
    if "buffer_size" in sizes:
        options["buffer_size"] = _number(config, "buffer-size", int)
    for key in ("selector", "weighting"):
        if config[key]:
            options[key] = named(key, str(config[key]))()
    if config["max-staleness"] != "":
        options["max_staleness"] = config["max-staleness"]
    if config["normalise"] != "":
        options["normalise"] = config["normalise"]
    if config["robust"]:
        schedule = make(**options).schedule
        # A rule counts nodes: none may be in a buffer twice.
        options["schedule"] = replace(schedule, distinct=True)
        rule = named("robust", str(config["robust"]))
        options["robust"] = rule(f=_number(config, "adversaries", int))
    made: StaleStrategy = make(**options)
    return made


def check(config: Mapping[str, bool | int | float | str]) -> None:
    """Check the strategy that a run config names, without its folders.

    Raises:
        ConfigError: as `strategy`.
    """
    strategy({**config, "checkpoints": "", "resume": "", "record": False})


def _flowers(config: UserConfig) -> Strategy:
    for key in ("selector", "weighting", "robust", "checkpoints", "resume", "record", *SETTINGS):
        # 0 is a setting, too.
        if config[key] != "" and config[key] is not False:
            raise ConfigError(
                f"{key} = {config[key]!r}: {FLOWERS} is Flower's own and has none; expected a "
                "strategy of fedstale such as strategy='fedavg'"
            )
    return FlowersFedAvg(
        fraction_train=_number(config, "fraction-train", float),
        fraction_evaluate=_number(config, "fraction-evaluate", float),
        min_train_nodes=1,
        min_evaluate_nodes=1,
        min_available_nodes=1,
    )


def _stages(config: UserConfig) -> list[Stage]:
    """Return the stages that a run config names."""
    record = config["record"]
    stages = [
        _compression(config),
        _local_work(config),
        ForecastRequest() if config["forecasts"] else None,
        _privacy(config),
        AuditRecord(None if record is True else str(record)) if record else None,
    ]
    return [stage for stage in stages if stage is not None]


def _compression(config: UserConfig) -> Compression | None:
    up, down = (str(config[key]).lower() or None for key in ("messages", "messages-down"))
    for key, name in (("messages", up), ("messages-down", down)):
        if name not in (None, *FORMATS):
            raise ConfigError(f"{key} = {config[key]!r}: expected {nearest(str(name), FORMATS)}")
    if up is None and down is None:
        return None
    return Compression(cast(FormatName | None, up), down=cast(FormatName | None, down))


def _local_work(config: UserConfig) -> LocalWork | None:
    """Return the share that `work` names: a number, or the longest time of a job as text."""
    work, least = config["work"], config["work-least"]
    if isinstance(work, str) and work:
        if not config["forecasts"]:
            raise ConfigError(f"work = {work!r}: expected a share such as 0.5, or forecasts=true")
        options = {} if least == "" else {"least": _number(config, "work-least", float)}
        return LocalWork(within_s=instant_s(work, "work"), **options)
    if least != "":
        raise ConfigError(f"work-least = {least!r}: expected with a time such as work='10m'")
    return None if work == "" else LocalWork(cast(float, work))


def _privacy(config: UserConfig) -> Privacy | None:
    given = {key: config[key] for key in _PRIVACY if config[key] != ""}
    if not given:
        return None
    needed = [key for key, setting in _PRIVACY.items() if setting.default is Parameter.empty]
    missing = [key for key in needed if key not in given]
    if missing:
        raise ConfigError(f"{', '.join(missing)} missing: expected beside {', '.join(given)}")
    settings: dict[str, Any] = {
        _PRIVACY[key].name: value if isinstance(value, int) else _number(config, key, float)
        for key, value in given.items()
    }
    return Privacy(**settings)


def _number(config: UserConfig, key: str, kind: type[T]) -> T:
    try:
        return kind(config[key])
    except ValueError:
        raise ConfigError(f"{key} = {config[key]!r}: expected a number") from None


_IN_ROUNDS = [
    make
    for make in NAMES["strategy"].values()
    if isinstance(make, type) and issubclass(make, strategies.FedAvg)
]


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")
