"""What each version of the model scored: who measures it, and where it is noted."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Literal

from flwr.app import ArrayRecord, MetricRecord

from fedstale.strategies.server.runtime import Runtime
from fedstale.strategies.server.stop_when import Progress
from fedstale.strategies.types import Stateful

if TYPE_CHECKING:
    from fedstale.strategies.server.strategy import StaleStrategy

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
"""Measures a version on the server, from its number and its model."""
Sums = dict[str, list[float]]
"""Of each metric, the sum of its values times examples, and of these examples."""


def add_metrics(sums: Sums, examples: float, metrics: Mapping[str, float]) -> None:
    """Add what one client measured on some examples; values that are not finite are left out."""
    for key, value in metrics.items():
        if isfinite(value):
            total = sums.setdefault(key, [0.0, 0.0])
            total[0] += examples * value
            total[1] += examples


def means_of(sums: Sums) -> dict[str, float]:
    """Return the mean of each metric over the clients that measured it, by examples."""
    means = {}
    for key, (total, n) in sums.items():
        means[key] = total / n
    return means


class Evaluations(Stateful):
    """Says who evaluates a version, averages what devices measure of it, and notes all metrics.

    They are noted in the result, the progress and the callbacks.
    """

    saved = ("_waiting", "_sums")

    def __init__(
        self,
        strategy: "StaleStrategy",
        progress: Progress,
        runtime: Runtime,
        on_server: EvaluateFn | None,
    ) -> None:
        """Evaluate as a strategy says, and on the server by a function of version and model."""
        self.result, self.progress, self.runtime = strategy.result, progress, runtime
        self._on_server, self._every = on_server, strategy.evaluate_every
        self._share, self._least = strategy.fraction_evaluate, strategy.min_evaluate_nodes
        self.by_nodes = self._share > 0 or self._least > 0
        """Whether nodes evaluate at all."""
        self._waiting: dict[int, int] = {}
        self._sums: dict[int, Sums] = {}

    def is_due(self, version: int) -> bool:
        """Return whether a version is evaluated."""
        return version % self._every == 0

    def start(self, version: int, n_online: int) -> int:
        """Return how many of the nodes that are online evaluate a version, and wait for them."""
        n = min(max(int(n_online * self._share), self._least), n_online)
        if n:
            self._waiting[version], self._sums[version] = n, {}
        return n

    def add(self, version: int, examples: float, metrics: dict[str, float]) -> None:
        """Take in one device's measurements."""
        add_metrics(self._sums[version], examples, metrics)

    def ended(self, version: int) -> None:
        """Count one more device that has answered or failed; after the last, note the averages."""
        self._waiting[version] -= 1
        if self._waiting[version]:
            return
        del self._waiting[version]
        if metrics := means_of(self._sums.pop(version)):
            self.note("evaluate", version, metrics)

    def note(
        self, source: Literal["train", "evaluate"], version: int, metrics: Mapping[str, float]
    ) -> None:
        """Note metrics that devices measured of a version, or while they trained for it."""
        train = source == "train"
        result = self.result
        book = result.train_metrics_clientapp if train else result.evaluate_metrics_clientapp
        book[version] = MetricRecord(dict(metrics))
        self._tell(source, version, metrics)

    def on_server(self, version: int, record: Callable[[], ArrayRecord]) -> None:
        """Let the app itself measure a version, if it does."""
        found = None if self._on_server is None else self._on_server(version, record())
        if found is None:
            return
        self.result.evaluate_metrics_serverapp[version] = found
        scalars = {k: float(v) for k, v in found.items() if not isinstance(v, list)}
        self._tell("server", version, scalars)

    def _tell(self, source: str, version: int, metrics: Mapping[str, float]) -> None:
        self.progress.metrics.update(metrics)
        self.runtime.metrics(version, source, metrics)
