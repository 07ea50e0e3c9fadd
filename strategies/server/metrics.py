"""What each version of the model scored, and evaluation on devices while training goes on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from fedstale.strategies.server.observer import Observer
from fedstale.strategies.server.progress import Progress


@dataclass(slots=True)
class _Poll:
    waiting: int
    sums: dict[str, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class Evaluations:
    """Averages what devices measure of a version, by their examples, until each has ended."""

    _polls: dict[int, _Poll] = field(default_factory=dict)

    def start(self, version: int, n_devices: int) -> None:
        """Wait for some devices' measurements of a version."""
        self._polls[version] = _Poll(n_devices)

    def add(self, version: int, examples: float, metrics: dict[str, float]) -> None:
        """Take in one device's measurements; those that are not finite are left out."""
        for key, value in metrics.items():
            if isfinite(value):
                total = self._polls[version].sums.setdefault(key, [0.0, 0.0])
                total[0] += examples * value
                total[1] += examples

    def ended(self, version: int) -> dict[str, float] | None:
        """Note that one device has answered or failed; return the averages after the last."""
        poll = self._polls[version]
        poll.waiting -= 1
        if poll.waiting:
            return None
        del self._polls[version]
        return {key: total / n for key, (total, n) in poll.sums.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what is still waited for."""
        return {str(v): {"waiting": p.waiting, "sums": p.sums} for v, p in self._polls.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._polls = {int(version): _Poll(**poll) for version, poll in state.items()}


@dataclass(frozen=True, slots=True)
class Scores:
    """Writes metrics wherever they are wanted: the result, the progress and the observer."""

    result: Result
    progress: Progress
    observer: Observer

    def note(
        self, source: Literal["train", "evaluate"], version: int, metrics: Mapping[str, float]
    ) -> None:
        """Note metrics that devices measured of a version, or while they trained for it."""
        train = source == "train"
        result = self.result
        book = result.train_metrics_clientapp if train else result.evaluate_metrics_clientapp
        book[version] = MetricRecord(dict(metrics))
        self._tell(source, version, metrics)

    def on_server(self, version: int, found: MetricRecord | None) -> None:
        """Note what the app itself measured of a version, if it did."""
        if found is None:
            return
        self.result.evaluate_metrics_serverapp[version] = found
        scalars = {k: float(v) for k, v in found.items() if not isinstance(v, list)}
        self._tell("server", version, scalars)

    def _tell(self, source: str, version: int, metrics: Mapping[str, float]) -> None:
        self.progress.metrics.update(metrics)
        self.observer.measured(version=version, source=source, metrics=metrics)
