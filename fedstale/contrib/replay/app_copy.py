"""A trace in real time: an app on SuperNodes of this machine that act replayed devices.

The app itself stays as it is. Flower loads what pyproject.toml names and offers no other way to
add something around a ClientApp, so what runs is a copy whose pyproject.toml names two modules
of the copy's own. They wrap the app's ClientApp in a `RealtimeApp` and its ServerApp in a
`ReplayedServerApp`.
"""

import json
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedstale.compat import stock_strategies_reporting
from fedstale.config import Costs, SimulationConfig
from fedstale.contrib.replay.client import RealtimeApp
from fedstale.contrib.replay.grid import ReplayGrid
from fedstale.deployment import written_at_end
from fedstale.errors import ConfigError, RunEnded
from fedstale.runs import RunFolder
from fedstale.simulation import FlowerApp, RunMetrics, enrolled, overrides_in
from fedstale.strategies.server import SuperLinkGrid
from fedstale.traces import TraceSet
from fedstale.until import Until

_CLIENT, _SERVER = "replayed_client", "replayed_server"
_OMITTED = shutil.ignore_patterns("__pycache__", ".git", ".venv", ".flwr", "runs")

_CODE = '''"""One half of the app, on nodes that act a trace."""

import json

from {place} import {name} as real
from {wrapper.__module__} import {wrapper.__name__}

app = {wrapper.__name__}(real{rest}, **json.loads({settings!r}))
'''


def replay_config(
    app: FlowerApp, traces: str, *, nodes: int, run_config: str = "", seed: int = 0
) -> SimulationConfig:
    """Return the settings of a simulation that a replay repeats with real processes.

    Args:
        app: the app.
        traces: file of traces, synthetic:N, synthetic:N@desktops or @sites, or ideal:N.
        nodes: how many devices of the traces are acted, drawn with the seed.
        run_config: overrides, as flwr run takes them.
        seed: of the draw, and of the app.

    Raises:
        ConfigError: a setting means nothing, or there are fewer devices.
        TraceError: the traces cannot be read, or lack a channel.
    """
    config = SimulationConfig(
        app=str(app.directory),
        traces=str(Path(traces).resolve()) if Path(traces).exists() else traces,
        devices=nodes,
        seed=seed,
        run_config=overrides_in([run_config], "run-config"),
    )
    config = app.resolved(config)
    enrolled(TraceSet.load(config.traces, seed=seed), config).complete()
    return config


def write_replayed(
    config: SimulationConfig, out: Path, *, speed_up: float, nodes: Sequence[int], run: Path
) -> None:
    """Write the copy of an app, whose ServerApp is a `ReplayedServerApp` with these settings.

    Args:
        config: from `replay_config`.
        out: folder to make, which `run_app` takes.
        speed_up: seconds of the trace in one real second, > 0.
        nodes: Flower's id of the node that acts each device, by position.
        run: folder of the run, as `fedstale simulate` writes it; its config.toml simulates the
            same.

    Raises:
        ConfigError: the app has something of the names that the copy adds.
    """
    app = Path(config.app)
    for name in (f"{_CLIENT}.py", f"{_SERVER}.py", _CLIENT, _SERVER):
        if (app / name).exists():
            raise ConfigError(f"app = {str(app)!r} has a {name}: a replay adds one; rename yours")
    settings = {"config": config.table(), "speed_up": speed_up, "nodes": nodes, "run": str(run)}
    shutil.copytree(app, out, ignore=_OMITTED)
    project = tomllib.loads((out / "pyproject.toml").read_text(encoding="utf-8"))
    components = project["tool"]["flwr"]["app"]["components"]
    # The seed of the run is no default of the app.
    project["tool"]["flwr"]["app"]["config"] = dict(config.run_config)
    for key, module, wrapper, options in (
        ("clientapp", _CLIENT, RealtimeApp, {}),
        ("serverapp", _SERVER, ReplayedServerApp, settings),
    ):
        place, _, attribute = components[key].partition(":")
        name, dot, rest = attribute.partition(".")
        text = _CODE.format(
            place=place, name=name, rest=dot + rest, wrapper=wrapper, settings=json.dumps(options)
        )
        (out / f"{module}.py").write_text(text, encoding="utf-8")
        components[key] = f"{module}:app"
    (out / "pyproject.toml").write_text(tomli_w.dumps(project), encoding="utf-8")


class ReplayedServerApp(ServerApp):
    """Another ServerApp, on nodes that act a trace."""

    def __init__(
        self,
        app: ServerApp,
        *,
        config: Mapping[str, Any],
        speed_up: float,
        nodes: Sequence[int],
        run: str,
    ) -> None:
        """Wrap an app.

        Args:
            app: what runs the strategy.
            config: table of a `SimulationConfig`.
            speed_up: as of `write_replayed`, and so are the others.
            nodes: by position of the device.
            run: folder.
        """
        super().__init__()
        self._app, self._speed_up, self._nodes, self._run = app, speed_up, nodes, Path(run)
        self._simulation = SimulationConfig.from_table(config, where="the replay's settings")

    def __call__(self, grid: Grid, context: Context) -> None:
        """Run the app and write the run's folder, also if the app fails."""
        config = self._simulation
        traces = enrolled(TraceSet.load(config.traces, seed=config.seed), config)
        metrics = RunMetrics(Until.parse(config.until))
        with (
            RunFolder.create(self._run, overwrite=True) as folder,
            SuperLinkGrid(grid) as superlink,
        ):
            folder.write_config(config)
            replay = ReplayGrid(
                superlink,
                traces,
                self._nodes,
                costs=Costs.from_table(config.costs),
                speed_up=self._speed_up,
                on_interrupt=config.on_interrupt,
                until_s=metrics.until.time_s,
            )
            replay.runtime.add(metrics)
            facts = partial(self._facts, replay, traces.epoch)
            with (
                suppress(RunEnded),
                written_at_end(folder, replay.runtime, replay.events, metrics, facts),
                stock_strategies_reporting(replay.runtime),
            ):
                self._app(replay, context)

    def _facts(self, replay: ReplayGrid, epoch: str | None) -> dict[str, Any]:
        def middle(seconds: list[float]) -> float | None:
            return round(median(seconds), 3) if seconds else None

        return {
            "app": Path(self._simulation.app).name,
            "devices": len(self._nodes),
            "seed": self._simulation.seed,
            "epoch": epoch,
            "executor": f"{len(self._nodes)} SuperNodes",
            "speed_up": self._speed_up,
            # Real seconds by which replies were late, and that Flower took for a message.
            "median_late_s": middle(replay.late_s),
            "median_there_s": middle(replay.there_s),
            "median_back_s": middle(replay.back_s),
        }
