"""The strategy of an app that names it in its run config, under the key `strategy`."""

from collections.abc import Mapping

from flwr.serverapp.strategy import Strategy

from fedstale.errors import ConfigError
from fedstale.strategies import ForecastRequest, LocalWork, parse


def strategy(config: Mapping[str, bool | int | float | str]) -> Strategy:
    """Return the strategy that the run config of a built-in app describes.

    Args:
        config: with the keys strategy, a text for `fedstale.strategies.parse`, and seed,
            checkpoints, resume and forecasts; empty texts set nothing.

    Raises:
        ConfigError: the strategy is not one of those that there are, or its stages need forecasts
            that devices do not make.
    """
    made = parse(
        str(config["strategy"]),
        seed=_whole(config, "seed"),
        checkpoints=str(config["checkpoints"]) or None,
        resume=str(config["resume"]) or None,
    )
    for stage in getattr(made, "stages", ()):
        by_time = isinstance(stage, LocalWork) and stage.within_s is not None
        if (by_time or isinstance(stage, ForecastRequest)) and not config["forecasts"]:
            raise ConfigError(f"forecasts = false: expected true, which {stage!r} needs")
    return made


def check(config: Mapping[str, bool | int | float | str]) -> None:
    """Check the strategy that a run config describes, without its folders.

    Raises:
        ConfigError: as `strategy`.
    """
    strategy({**config, "checkpoints": "", "resume": ""})


def _whole(config: Mapping[str, bool | int | float | str], key: str) -> int:
    try:
        return int(config[key])
    except ValueError:
        raise ConfigError(f"{key} = {config[key]!r}: expected a whole number") from None
