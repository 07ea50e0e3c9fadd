"""What each version of the model scored, how far a run has come, and when that is far enough.

`Evaluations` averages what devices measure while training goes on, and hands metrics to the result,
the progress and the callbacks; `StopWhen` is a limit of a strategy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import TYPE_CHECKING, Literal

from flwr.app import ArrayRecord, MetricRecord

from fedstale.strategies.server.runtime import Runtime
from fedstale.strategies.types import Stateful, require

if TYPE_CHECKING:
    from fedstale.strategies.server.strategy import StaleStrategy

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
"""Measures a version on the server, from its number and its model."""


@dataclass(slots=True, kw_only=True)
class Progress(Stateful):
    """Where a run stands."""

    saved = ("started_at", "version", "sent_bytes", "received_bytes", "metrics")

    started_at: float
    """Instant in s at which it started."""
    now: float
    """Instant in s."""
    version: int = 0
    """Model versions made so far."""
    sent_bytes: int = 0
    """Bytes of arrays sent to devices."""
    received_bytes: int = 0
    """Bytes of arrays in the replies, rejected ones too."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Latest value of each metric, from training, evaluation on devices or on the server."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self.now - self.started_at


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWhen:
    """Stop at the first of several conditions; checked after each merge.

    Example:
        >>> stop = StopWhen(at_least={"accuracy": 0.9}, elapsed_s=3600)
        >>> stop(Progress(started_at=0, now=60, metrics={"accuracy": 0.91}))
        True
    """

    at_least: Mapping[str, float] = field(default_factory=dict)
    """Metrics, and the value from which on each one is good enough."""
    at_most: Mapping[str, float] = field(default_factory=dict)
    """The same for metrics that fall, such as a loss."""
    elapsed_s: float = inf
    """Time since the start in s, > 0."""
    total_bytes: float = inf
    """Bytes of arrays sent and received, > 0."""

    def __post_init__(self) -> None:
        require(self.elapsed_s > 0, "stop_when.elapsed_s", self.elapsed_s, "seconds > 0")
        require(self.total_bytes > 0, "stop_when.total_bytes", self.total_bytes, "bytes > 0")

    def __call__(self, progress: Progress) -> bool:
        """Return whether one of the conditions holds."""
        metrics = progress.metrics
        for name, goal in self.at_least.items():
            if metrics.get(name, -inf) >= goal:
                return True
        for name, goal in self.at_most.items():
            if metrics.get(name, inf) <= goal:
                return True
        is_late = progress.elapsed_s >= self.elapsed_s
        return is_late or progress.sent_bytes + progress.received_bytes >= self.total_bytes


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
