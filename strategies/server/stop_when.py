"""`StopWhen`, the rule that ends a run, and `Progress`, which it looks at."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Annotated

from annotated_types import Gt

from fedstale.strategies.types import Seconds, Stateful, check_fields


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
    """Metrics, and the value from which on each one is good enough; infinity never is."""
    at_most: Mapping[str, float] = field(default_factory=dict)
    """The same for metrics that fall, such as a loss."""
    elapsed_s: Seconds = inf
    """Time since the start in s, > 0."""
    total_bytes: Annotated[float, Gt(0), "bytes > 0"] = inf
    """Bytes of arrays sent and received, > 0."""

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, progress: Progress) -> bool:
        """Return whether one of the conditions holds."""
        metrics = progress.metrics
        for name, goal in self.at_least.items():
            if goal <= metrics.get(name, -inf) < inf:
                return True
        for name, goal in self.at_most.items():
            if -inf < metrics.get(name, inf) <= goal:
                return True
        is_late = progress.elapsed_s >= self.elapsed_s
        return is_late or progress.sent_bytes + progress.received_bytes >= self.total_bytes
