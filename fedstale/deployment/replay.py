"""A trace in real time: an app on SuperNodes of this machine that act replayed devices."""

from collections.abc import Callable
from pathlib import Path

from flwr.common.config import flatten_dict, parse_config_args

from fedstale.config import SimulationConfig
from fedstale.deployment.fleet import Fleet
from fedstale.deployment.replayed_app import write_replayed
from fedstale.deployment.replayed_server import ReplaySettings
from fedstale.deployment.up import run_app
from fedstale.errors import ConfigError
from fedstale.simulation.flower_app import FlowerApp
from fedstale.simulation.run import enrolled
from fedstale.traces import TraceSet

RUN = "run"
"""Name of the run's folder in the fleet's."""


def replay_config(
    app: FlowerApp, traces: str, *, nodes: int, run_config: str = "", seed: int = 0
) -> SimulationConfig:
    """Return the settings of a simulation that a replay repeats with real processes.

    Args:
        app: the app.
        traces: file of traces, or synthetic:N.
        nodes: how many devices of the traces are acted, drawn with the seed.
        run_config: overrides, as flwr run takes them.
        seed: of the draw.

    Raises:
        ConfigError: a setting means nothing, or there are fewer devices.
        TraceError: the traces cannot be read, or lack a channel.
    """
    settings = app.run_config(flatten_dict(parse_config_args([run_config] if run_config else None)))
    config = SimulationConfig(
        app=str(app.directory),
        traces=str(Path(traces).resolve()) if Path(traces).exists() else traces,
        devices=nodes,
        seed=seed,
        run_config=settings,
        costs=app.costs.resolved(settings).table(),
    )
    enrolled(TraceSet.load(config.traces, seed=seed), config).require(
        "availability", "compute", "downlink", "uplink"
    )
    return config


def replay_app(
    fleet: Fleet,
    config: SimulationConfig,
    *,
    speed_up: float,
    run_config: str = "",
    show: Callable[[str], None] = print,
) -> Path:
    """Run an app on a fleet whose nodes act the devices of a trace.

    Args:
        fleet: with its nodes online, one for each device.
        config: from `replay_config`.
        speed_up: seconds of the trace in one real second, > 0.
        run_config: overrides, as flwr run takes them.
        show: is told each line of the log.

    Returns:
        The run's folder, in the fleet's, as `fedstale simulate` writes it. Its config.toml
        simulates the same.

    Raises:
        ConfigError: there are other devices than nodes.
        FedstaleError: the run did not complete.
    """
    if config.devices != len(fleet.node_ids):
        raise ConfigError(
            f"devices = {config.devices}: expected {len(fleet.node_ids)}, as many as nodes"
        )
    settings = ReplaySettings(
        config=config,
        speed_up=speed_up,
        nodes=fleet.node_ids,
        out=fleet.folder / RUN,
    )
    copy = write_replayed(Path(config.app), fleet.folder / "app", settings)
    run_app(fleet, copy, run_config=run_config, show=show)
    return settings.out
