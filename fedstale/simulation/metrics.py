"""What was measured in a run, and whether that is enough."""

from collections.abc import Mapping

from flwr.app import ArrayRecord

from fedstale.config import Until
from fedstale.strategies.server.runtime import Callback, RunEnded, Runtime
from fedstale.strategies.state import Stateful


class RunMetrics(Stateful, Callback):
    """Keeps metrics and the latest model, and ends the run when its limit is reached."""

    saved = ("rounds", "server_evaluates", "rows", "latest")

    def __init__(self, until: Until) -> None:
        """Start with nothing measured.

        Args:
            until: limit of the run.
        """
        self.until = until
        self.rounds = 0
        """Aggregations so far: rounds, or versions of the model."""
        self.server_evaluates = False
        """Whether a central evaluation has measured anything."""
        self.arrays: ArrayRecord | None = None
        self.rows: list[tuple[float, int, str, str, float]] = []
        """Instant in s, version, source, name and value of each measurement."""
        self.latest: dict[str, float] = {}
        """The latest value of each metric, by source and name."""

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
