"""The strategies that the built-in apps offer, by their run config.

Flower's strategies work in rounds; fedstale's aggregate replies as they come, also stale ones.
"""

from flwr.app import Context
from flwr.serverapp.strategy import FedAvg, Strategy

from fedstale.agents import AgentSelector
from fedstale.strategies import DirectionAware, FedBuff, GapAware, selection

IN_ROUNDS = {"fedavg": FedAvg}
AS_THEY_COME = {"fedbuff": FedBuff, "gap-aware": GapAware, "direction-aware": DirectionAware}
SELECTORS = {
    "random": selection.Random,
    "fedcs": selection.Fastest,
    "oort": selection.Oort,
    "refl": selection.LeastAvailable,
    "most-reliable": selection.MostReliable,
    "expected-utility": selection.ExpectedUtility,
    "agent": AgentSelector,
}


def configured(context: Context) -> Strategy:
    """Return the strategy that a run config names, with its options.

    Raises:
        ValueError: there is no such strategy or selector, or the strategy keeps no checkpoints.
    """
    config = context.run_config
    name, selector = str(config["strategy"]), str(config["selector"])
    if selector not in SELECTORS:
        raise ValueError(f"selector = {selector!r}: expected one of {[*SELECTORS]}")
    if name in AS_THEY_COME:
        return AS_THEY_COME[name](
            concurrency=int(config["concurrency"]),
            buffer_size=int(config["buffer-size"]),
            selector=SELECTORS[selector](),
            forecast_request=selection.ForecastRequest() if config["forecasts"] else None,
            checkpoints=str(config["checkpoints"]) or None,
            resume=str(config["resume"]) or None,
            seed=int(config["seed"]),
        )
    if name not in IN_ROUNDS:
        raise ValueError(f"strategy = {name!r}: expected one of {[*IN_ROUNDS, *AS_THEY_COME]}")
    for key in ("checkpoints", "resume"):
        if config[key]:
            raise ValueError(f"{key} = {config[key]!r}: {name} keeps none, only {[*AS_THEY_COME]}")
    return IN_ROUNDS[name](
        fraction_train=float(config["fraction-train"]),
        fraction_evaluate=float(config["fraction-evaluate"]),
        min_train_nodes=1,
        min_evaluate_nodes=1,
        min_available_nodes=1,
    )
