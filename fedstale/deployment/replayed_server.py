"""The ServerApp of a replay: another ServerApp, on nodes that act a trace, with a run folder."""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedstale.config import SimulationConfig, Until
from fedstale.deployment.replay_grid import ReplayGrid
from fedstale.deployment.run_folder import write_run
from fedstale.errors import FedstaleError, ProtocolError
from fedstale.reports.folder import RunFolder
from fedstale.simulation.clock import RunEnded
from fedstale.simulation.costs import Costs
from fedstale.simulation.progress import Progress
from fedstale.simulation.run import enrolled
from fedstale.simulation.stock_strategies import probe
from fedstale.strategies.server.superlink import without_stalls
from fedstale.traces import TraceSet

logger = logging.getLogger(__name__)


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
        progress = Progress(Until.parse(config.until))
        with (
            RunFolder.create(settings.out, overwrite=True) as folder,
            without_stalls(grid) as pulling,
        ):
            folder.write_config(config)
            replay = ReplayGrid(
                pulling,
                traces,
                settings.nodes,
                costs=Costs.from_table(config.costs),
                speed_up=settings.speed_up,
                on_interrupt=config.on_interrupt,
                until_s=progress.until.time_s,
            )
            replay.on_aggregated = progress.aggregated
            replay.on_measured = lambda version, source, metrics: progress.measured(
                replay.now(), version, source, metrics
            )
            started, end = time.perf_counter(), ("failed", "the ServerApp raised an exception")
            try:
                with probe(replay.on_measured, replay.on_aggregated):
                    self._app(replay, context)
                end = "finished", ""
            except RunEnded as ended:
                end = ("stuck" if ended.stuck else "stopped"), ended.reason
            except FedstaleError as problem:
                end = "failed", str(problem)
                raise
            finally:
                status, reason = end
                facts = {"status": status, "reason": reason, **_facts(settings, replay)}
                facts["wall_s"] = round(time.perf_counter() - started, 3)
                write_run(folder, replay, progress, facts)


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
