"""What each version of the model scored: who measures it, and where it is noted.

A metric that is NaN or infinite has no weight in a mean, so that one device cannot hide what the
others measured; a mean of nothing else is NaN.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from math import isfinite, nan
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from flwr.app import ArrayRecord, MetricRecord

from fedstale.strategies.server.runtime import Runtime
from fedstale.strategies.types import Stateful, as_float

if TYPE_CHECKING:
    from fedstale.strategies.server.strategy import StaleStrategy

logger = logging.getLogger(__name__)

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
"""Measures a version on the server, from its number and its model."""
Sums = dict[str, list[float]]
"""Of each metric, the sum of its values times examples, and of these examples."""


MOST_ELEMENTS = 100
"""Elements of one list that are metrics of their own."""


def numbers(metrics: object) -> dict[str, float]:
    """Return the numbers among metrics by name, those in tables and lists under dotted names.

    Args:
        metrics: by name: numbers, arrays of them, tables and lists, also within one another. Of a
            list count the first `MOST_ELEMENTS`. What is no mapping has no metrics, and a text or
            bytes are none.

    Example:
        >>> numbers({"loss": 0.5, "per_class": {"cat": 1, "dog": 0}, "auc": [0.7, 0.8], "of": "a"})
        {'loss': 0.5, 'per_class.cat': 1.0, 'per_class.dog': 0.0, 'auc.0': 0.7, 'auc.1': 0.8}
    """
    return dict(_flat(metrics.items(), "")) if isinstance(metrics, Mapping) else {}


def _flat(items: Any, prefix: str) -> Iterator[tuple[str, float]]:  # noqa: ANN401 - of any mapping
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(value, Real):
            yield name, as_float(value)  # type: ignore[arg-type]
            continue
        # Arrays of NumPy and of torch, whatever their number of axes.
        found = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(found, Real):
            yield name, as_float(found)  # type: ignore[arg-type]
        elif isinstance(found, Mapping):
            yield from _flat(found.items(), f"{name}.")
        elif isinstance(found, list | tuple):
            if len(found) > MOST_ELEMENTS:
                _warn_of_length(name)
            yield from _flat(enumerate(found[:MOST_ELEMENTS]), f"{name}.")


@cache
def _warn_of_length(name: str) -> None:
    """Say once that a metric is a long list."""
    logger.warning("metric %s is a list of more than %d: the rest is left out", name, MOST_ELEMENTS)


def add_metrics(sums: Sums, examples: float, metrics: Mapping[str, float]) -> None:
    """Add what one client measured on some examples.

    Args:
        sums: to add to.
        examples: how much it counts; nothing, unless this is a finite number above 0.
        metrics: by name; those that are not finite do not count.
    """
    weight = examples if isfinite(examples) and examples > 0 else 0.0
    for key, value in metrics.items():
        total = sums.setdefault(key, [0.0, 0.0])
        if isfinite(value):
            total[0] += weight * value
            total[1] += weight


def means_of(sums: Sums) -> dict[str, float]:
    """Return the mean of each metric over the clients that measured it, by examples.

    It is NaN where no client's value counts.
    """
    return {key: total / n if n else nan for key, (total, n) in sums.items()}


class Evaluations(Stateful):
    """Says who evaluates a version, averages what devices measure of it, and notes all metrics.

    They are noted in the result and the callbacks.
    """

    saved = ("_waiting", "_sums", "is_reached")

    def __init__(
        self,
        strategy: "StaleStrategy",
        runtime: Runtime,
        on_server: EvaluateFn | None,
    ) -> None:
        """Evaluate as a strategy says, and on the server by a function of version and model."""
        self.result, self.runtime, self._until = strategy.result, runtime, strategy.until
        self.is_reached = False
        """Whether a metric has reached the target of the strategy's `until`."""
        self._on_server, self._every = on_server, strategy.evaluate_every
        self._share, self._least = strategy.fraction_evaluate, strategy.min_evaluate_nodes
        self.by_nodes = self._share > 0 or self._least > 0
        """Whether nodes evaluate at all."""
        self._waiting: dict[int, int] = {}
        self._sums: dict[int, Sums] = {}

    def is_due(self, version: int) -> bool:
        """Return whether a version is evaluated, by anybody."""
        return (self.by_nodes or self._on_server is not None) and version % self._every == 0

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

    def on_server(self, version: int, record: Callable[[], ArrayRecord]) -> None:
        """Let the app itself measure a version, if it does."""
        found = None if self._on_server is None else self._on_server(version, record())
        if found is not None:
            self.note("server", version, numbers(found), found)

    def note(
        self,
        source: Literal["train", "evaluate", "server"],
        version: int,
        metrics: Mapping[str, float],
        record: MetricRecord | None = None,
    ) -> None:
        """Note what was measured of a version, or while devices trained for it.

        Args:
            source: who has measured.
            version: of the model.
            metrics: by name.
            record: as the app returned it; made of the metrics if not given.
        """
        book = {
            "train": self.result.train_metrics_clientapp,
            "evaluate": self.result.evaluate_metrics_clientapp,
            "server": self.result.evaluate_metrics_serverapp,
        }[source]
        book[version] = MetricRecord(dict(metrics)) if record is None else record
        if self._until is not None and self._until.is_reached(version, metrics):
            self.is_reached = True
        self.runtime.metrics(version, source, metrics)
