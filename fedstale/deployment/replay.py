"""A trace in real time: an app on SuperNodes of this machine that act replayed devices.

The app itself stays as it is. Flower loads what pyproject.toml names and offers no other way to
add something around a ClientApp, so `replay_app` runs a copy whose pyproject.toml names two modules
of the copy's own. They wrap the app's ClientApp in a `PacedApp` and its ServerApp in a
`ReplayedServerApp`.
"""

import json
import shutil
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w
from flwr.app import Context
from flwr.common.config import flatten_dict, parse_config_args
from flwr.serverapp import Grid, ServerApp

from fedstale.config import SimulationConfig, Until
from fedstale.deployment.local import LocalDeployment, run_app
from fedstale.deployment.replay_grid import ReplayGrid
from fedstale.deployment.run_folder import written_at_end
from fedstale.errors import ConfigError, ProtocolError
from fedstale.reports.folder import RunFolder
from fedstale.simulation.costs import Costs
from fedstale.simulation.flower_app import FlowerApp
from fedstale.simulation.metrics import RunMetrics
from fedstale.simulation.run import enrolled
from fedstale.simulation.stock_strategies import stock_strategies_reporting
from fedstale.strategies.server.runtime import RunEnded
from fedstale.strategies.server.superlink import SuperLinkGrid
from fedstale.traces import TraceSet

RUN = "run"
"""Name of the run's folder in the deployment's."""

_CLIENT, _SERVER, _SETTINGS = "replayed_client", "replayed_server", "replay.json"
_OMITTED = shutil.ignore_patterns("__pycache__", ".git", ".venv", ".flwr", "runs")

_CLIENT_CODE = '''"""The app's ClientApp, which takes as long as the trace says."""

from {module} import {name} as real
from fedstale.deployment.paced import PacedApp

app = PacedApp(real{rest})
'''
_SERVER_CODE = '''"""The app's ServerApp, on nodes that act a trace."""

from pathlib import Path

from {module} import {name} as real
from fedstale.deployment.replay import ReplayedServerApp

app = ReplayedServerApp(real{rest}, Path(__file__).with_name("{settings}"))
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """What a replay needs to know besides the app."""

    config: SimulationConfig
    """The same settings as of a simulation of this app on these traces."""
    speed_up: float
    """Seconds of the trace in one real second."""
    nodes: Mapping[int, int]
    """Flower's id of the node that acts each device, by position."""
    out: Path
    """Folder of the run."""

    def write(self, path: Path) -> None:
        """Write the settings as JSON."""
        facts = {
            "config": self.config.table(),
            "speed_up": self.speed_up,
            "nodes": {str(device): str(node) for device, node in self.nodes.items()},
            "out": str(self.out),
        }
        path.write_text(json.dumps(facts), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "ReplaySettings":
        """Read what `write` wrote.

        Raises:
            ProtocolError: it is something else.
        """
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                config=SimulationConfig.from_table(facts["config"], where=str(path)),
                speed_up=float(facts["speed_up"]),
                nodes={int(device): int(node) for device, node in facts["nodes"].items()},
                out=Path(facts["out"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            raise ProtocolError(f"{path} holds no settings of a replay: {problem}") from None


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
    deployment: LocalDeployment,
    config: SimulationConfig,
    *,
    speed_up: float,
    run_config: str = "",
    show: Callable[[str], None] = print,
) -> Path:
    """Run an app on a deployment whose nodes act the devices of a trace.

    Args:
        deployment: with its nodes online, one for each device.
        config: from `replay_config`.
        speed_up: seconds of the trace in one real second, > 0.
        run_config: overrides, as flwr run takes them.
        show: is told each line of the log.

    Returns:
        The run's folder, in the deployment's, as `fedstale simulate` writes it. Its config.toml
        simulates the same.

    Raises:
        ConfigError: there are other devices than nodes.
        FedstaleError: the run did not complete.
    """
    if config.devices != len(deployment.node_ids):
        raise ConfigError(
            f"devices = {config.devices}: expected {len(deployment.node_ids)}, as many as nodes"
        )
    settings = ReplaySettings(
        config=config,
        speed_up=speed_up,
        nodes=deployment.node_ids,
        out=deployment.folder / RUN,
    )
    copy = write_replayed(Path(config.app), deployment.folder / "app", settings)
    run_app(deployment, copy, run_config=run_config, show=show)
    return settings.out


def write_replayed(app: Path, out: Path, settings: ReplaySettings) -> Path:
    """Write the copy of an app.

    Args:
        app: its folder.
        out: folder to make.
        settings: of the replay.

    Returns:
        The folder, which `flwr run` takes.

    Raises:
        ConfigError: the app has something of the names that the copy adds.
    """
    for name in (f"{_CLIENT}.py", f"{_SERVER}.py", _CLIENT, _SERVER, _SETTINGS):
        if (app / name).exists():
            raise ConfigError(f"app = {str(app)!r} has a {name}: a replay adds one; rename yours")
    shutil.copytree(app, out, ignore=_OMITTED)
    project = tomllib.loads((out / "pyproject.toml").read_text(encoding="utf-8"))
    components = project["tool"]["flwr"]["app"]["components"]
    for key, module, code in (
        ("clientapp", _CLIENT, _CLIENT_CODE),
        ("serverapp", _SERVER, _SERVER_CODE),
    ):
        place, _, attribute = components[key].partition(":")
        name, _, rest = attribute.partition(".")
        text = code.format(
            module=place, name=name, rest=f".{rest}" if rest else "", settings=_SETTINGS
        )
        (out / f"{module}.py").write_text(text, encoding="utf-8")
        components[key] = f"{module}:app"
    (out / "pyproject.toml").write_text(tomli_w.dumps(project), encoding="utf-8")
    settings.write(out / _SETTINGS)
    return out


class ReplayedServerApp(ServerApp):
    """Another ServerApp, on nodes that act a trace."""

    def __init__(self, app: ServerApp, settings: Path) -> None:
        """Wrap an app.

        Args:
            app: what runs the strategy.
            settings: file of `ReplaySettings`.
        """
        super().__init__()
        self._app, self._settings = app, settings

    def __call__(self, grid: Grid, context: Context) -> None:
        """Run the app and write the run's folder, also if the app fails."""
        settings = ReplaySettings.read(self._settings)
        config = settings.config
        traces = enrolled(TraceSet.load(config.traces, seed=config.seed), config)
        metrics = RunMetrics(Until.parse(config.until))
        with (
            RunFolder.create(settings.out, overwrite=True) as folder,
            SuperLinkGrid(grid) as superlink,
        ):
            folder.write_config(config)
            replay = ReplayGrid(
                superlink,
                traces,
                settings.nodes,
                costs=Costs.from_table(config.costs),
                speed_up=settings.speed_up,
                on_interrupt=config.on_interrupt,
                until_s=metrics.until.time_s,
            )
            replay.runtime.add(metrics)
            facts = partial(_facts, settings, replay)
            with (
                suppress(RunEnded),
                written_at_end(folder, replay.runtime, replay.events, metrics, facts),
                stock_strategies_reporting(),
            ):
                self._app(replay, context)


def _facts(settings: ReplaySettings, replay: ReplayGrid) -> dict[str, Any]:

    def middle(seconds: list[float]) -> float | None:
        return round(median(seconds), 3) if seconds else None

    return {
        "app": Path(settings.config.app).name,
        "devices": len(settings.nodes),
        "seed": settings.config.seed,
        "executor": f"{len(settings.nodes)} SuperNodes",
        "speed_up": settings.speed_up,
        # Real seconds, by which replies were late and which Flower took for a message both ways.
        "median_late_s": middle(replay.late_s),
        "median_there_s": middle(replay.there_s),
        "median_back_s": middle(replay.back_s),
    }
