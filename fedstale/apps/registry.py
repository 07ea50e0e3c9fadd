"""What a run config can name: strategies, selectors, weightings and robust rules.

`NAMES` is the one table of them, by the key of the run config; docs/strategies.md lists it. Names
are read without regard to case, hyphens and underscores, so the name of a class is one too:
`gap-aware` and `GapAware` are the same. A name stands for a part with its own defaults; who needs
other settings composes a strategy in Python.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

from flwr.app.user_config import UserConfig
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from flwr.serverapp.strategy import Strategy

from fedstale import strategies
from fedstale.agents import AgentSelector, LinUCB
from fedstale.config import nearest
from fedstale.errors import ConfigError
from fedstale.strategies import StaleStrategy, robust, selection, weighting
from fedstale.strategies.weighting import ByAge

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
        "agent": AgentSelector,
        "lin-ucb": LinUCB,
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
    `fraction-train` for FedAvg and what is like it.

    Raises:
        ConfigError: a name or a number is not one of those offered, or Flower's strategy has no
            such part.
    """
    make = named("strategy", str(config["strategy"]))
    if make is FlowersFedAvg:
        return _flowers(config)
    options: dict[str, Any] = {
        "fraction_evaluate": float(config["fraction-evaluate"]),
        "forecast_request": selection.ForecastRequest() if config["forecasts"] else None,
        "checkpoints": str(config["checkpoints"]) or None,
        "resume": str(config["resume"]) or None,
        "seed": int(config["seed"]),
    }
    sizes = signature(make).parameters
    if make in _IN_ROUNDS:
        options["fraction_train"] = float(config["fraction-train"])
    elif "concurrency" in sizes:
        options["concurrency"] = int(config["concurrency"])
    if "buffer_size" in sizes:
        options["buffer_size"] = int(config["buffer-size"])
    for key in ("selector", "weighting"):
        if config[key]:
            options[key] = named(key, str(config[key]))()
    if config["robust"]:
        schedule = make(**options).schedule
        # A rule counts nodes: none may be in a buffer twice.
        options["schedule"] = replace(schedule, distinct=True)
        options["robust"] = named("robust", str(config["robust"]))(f=int(config["adversaries"]))
    made: StaleStrategy = make(**options)
    return made


def _flowers(config: UserConfig) -> Strategy:
    for key in ("selector", "weighting", "robust", "checkpoints", "resume"):
        if config[key]:
            raise ConfigError(
                f"{key} = {config[key]!r}: {FLOWERS} is Flower's own and has none; expected a "
                "strategy of fedstale such as strategy='fedavg'"
            )
    return FlowersFedAvg(
        fraction_train=float(config["fraction-train"]),
        fraction_evaluate=float(config["fraction-evaluate"]),
        min_train_nodes=1,
        min_evaluate_nodes=1,
        min_available_nodes=1,
    )


_IN_ROUNDS = [
    make
    for make in NAMES["strategy"].values()
    if isinstance(make, type) and issubclass(make, strategies.FedAvg)
]


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")
