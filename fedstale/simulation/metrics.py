"""What was measured in a run, whether that is enough, and how it stands in the run's folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord

from fedstale.config import Until
from fedstale.errors import FedstaleError
from fedstale.reports.costs import COST_COLUMNS, ledger, rejections
from fedstale.reports.folder import RunFolder
from fedstale.reports.run import Run, report_at_end
from fedstale.strategies.server.runtime import Callback, Limit, RunEnded, Runtime
from fedstale.strategies.state import Stateful


@dataclass(eq=False)
class RunMetrics(Stateful, Callback):
    """Keeps metrics and the latest model, and ends the run when its limit is reached."""

    saved = ("rounds", "server_evaluates", "rows", "latest", "limits")

    until: Until
    """Limit of the run."""
    rounds: int = 0
    """Aggregations so far: rounds, or versions of the model."""
    server_evaluates: bool = False
    """Whether a central evaluation has measured anything."""
    arrays: ArrayRecord | None = None
    rows: list[tuple[float, int, str, str, float]] = field(default_factory=list)
    """Instant in s, version, source, name and value of each measurement."""
    latest: dict[str, float] = field(default_factory=dict)
    """The latest value of each metric, by source and name."""
    limits: dict[Limit, dict[int, int]] = field(
        default_factory=lambda: {"capped": {}, "clipped": {}}
    )
    """How often numbers of examples were capped and norms clipped, of each node."""

    def limited(self, run: Runtime, node_id: int, kind: Limit) -> None:
        """Count what validation has limited."""
        by_node = self.limits[kind]
        by_node[node_id] = by_node.get(node_id, 0) + 1

    def new_version(self, run: Runtime, version: int, arrays: ArrayRecord) -> None:
        """Keep the new model."""
        self.arrays = arrays

    def metrics(self, run: Runtime, version: int, source: str, values: Mapping[str, float]) -> None:
        """Keep metrics of a version.

        Raises:
            RunEnded: the limit of the run is reached.
        """
        now = run.now()
        for name, value in values.items():
            self.rows.append((now, version, source, name, value))
            self.latest[f"{source} {name}"] = value
        if source == "train":
            self.rounds = max(self.rounds, version)
        self.server_evaluates |= source == "server" and bool(values)
        # A client's own metric decides only where the server evaluates nothing.
        decides = source == "server" or (source == "evaluate" and not self.server_evaluates)
        if self.until.is_reached(self.rounds, values if decides else {}):
            goal = self.until.metric or "rounds"
            value = values.get(goal, self.rounds) if self.until.metric else self.rounds
            raise RunEnded(f"reached {goal} {value:g}")


def write_run(
    folder: RunFolder, run: Runtime, metrics: RunMetrics, facts: Mapping[str, Any]
) -> Run:
    """Write what came of a run.

    Args:
        folder: of the run, in which its events are written already.
        run: that has ended.
        metrics: what was measured.
        facts: for the summary: status, reason, app, devices, seed and the like.
    """
    folder.write_metrics(metrics.rows)
    if metrics.arrays is not None:
        folder.write_model(metrics.arrays)
    folder.write_summary(
        {
            **facts,
            "virtual_s": run.now(),
            "rounds": metrics.rounds,
            **ledger(folder.read_events(COST_COLUMNS)),
            "rejected": rejections(folder.read_events(["status", "reason"])),
            **{
                kind: {"replies": sum(by_node.values()), "nodes": len(by_node)}
                for kind, by_node in metrics.limits.items()
            },
            "metrics": metrics.latest,
        }
    )
    return report_at_end(folder.path)


def ending(problem: BaseException) -> tuple[str, str]:
    """Return how a run ended that an exception has ended, as a status and a reason."""
    if isinstance(problem, RunEnded):
        return ("stuck" if problem.stuck else "stopped"), problem.reason
    if isinstance(problem, FedstaleError):
        return "failed", str(problem)
    return "failed", f"{type(problem).__name__}: {problem}"
