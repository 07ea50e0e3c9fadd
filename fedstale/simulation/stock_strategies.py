"""Lets Flower's own strategies, and strategies built on them, tell the runtime what they do.

A stock strategy reports to its log only. Here whatever it aggregates and evaluates is also told to
the runtime of the grid that it runs on, with the round as the model version. That holds for a
strategy with a `start` of its own too, as long as it calls its own `aggregate_train` and
`aggregate_evaluate`. Strategies of fedstale tell their runtime themselves and are left alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Strategy

from fedstale.strategies import StaleStrategy
from fedstale.strategies.server.runtime import Runtime, RuntimeGrid

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

_RUNNING: WeakKeyDictionary[Strategy, Runtime] = WeakKeyDictionary()
"""The runtime of each strategy whose `start` has not returned."""
_AGGREGATING: WeakKeyDictionary[Strategy, str] = WeakKeyDictionary()
"""The verb that a strategy is in; a subclass calls that of its base inside."""


@contextmanager
def stock_strategies_reporting() -> Iterator[None]:
    """Let the stock strategies that are defined by now report while the block runs."""
    replaced = report_stock_strategies()
    try:
        yield
    finally:
        for owner, name, original in replaced:
            setattr(owner, name, original)


def report_stock_strategies() -> list[tuple[type[Strategy], str, Callable[..., Any]]]:
    """Let the stock strategies that are defined by now report, each class once.

    Returns:
        The methods that were replaced: class, name and original.
    """
    replaced = []
    base: Any = Strategy  # abstract, and its methods are replaced all the same
    for owner in _family(base):
        for name, wrapped in (
            ("start", _started),
            ("aggregate_train", _aggregated_train),
            ("aggregate_evaluate", _aggregated_evaluate),
        ):
            original = vars(owner).get(name)
            if original is not None and not hasattr(original, "reports"):
                reporting = wrapped(original)
                reporting.reports = True  # type: ignore[attr-defined]
                setattr(owner, name, reporting)
                replaced.append((owner, name, original))
    return replaced


def numbers(metrics: MetricRecord) -> dict[str, float]:
    """Return the scalar metrics of a record."""
    return {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}


def _family(strategy: type[Strategy]) -> Iterator[type[Strategy]]:
    if strategy is StaleStrategy:
        return
    yield strategy
    for kind in strategy.__subclasses__():
        yield from _family(kind)


def _started(original: Callable[..., Any]) -> Callable[..., Any]:
    parameters = signature(original)

    @wraps(original)
    def start(self: Strategy, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the original
        values = (*args, *kwargs.values())
        grid = next((value for value in values if isinstance(value, RuntimeGrid)), None)
        if grid is None or self in _RUNNING:
            return original(self, *args, **kwargs)
        call = parameters.bind(self, *args, **kwargs)
        evaluate_fn = call.arguments.get("evaluate_fn")
        if evaluate_fn is not None:
            call.arguments["evaluate_fn"] = _reporting(evaluate_fn, grid.runtime)
        _RUNNING[self] = grid.runtime
        try:
            return original(*call.args, **call.kwargs)
        finally:
            del _RUNNING[self]

    return start


def _aggregated_train(original: Callable[..., Any]) -> Callable[..., Any]:
    def tell(runtime: Runtime, server_round: int, outcome: Any) -> None:  # noqa: ANN401
        arrays, metrics = outcome
        if arrays is not None:
            runtime.new_version(server_round, arrays)
        runtime.metrics(server_round, "train", numbers(metrics) if metrics is not None else {})

    return _telling(original, tell)


def _aggregated_evaluate(original: Callable[..., Any]) -> Callable[..., Any]:
    def tell(runtime: Runtime, server_round: int, outcome: MetricRecord | None) -> None:
        if outcome is not None:
            runtime.metrics(server_round, "evaluate", numbers(outcome))

    return _telling(original, tell)


def _telling(
    original: Callable[..., Any], tell: Callable[[Runtime, int, Any], None]
) -> Callable[..., Any]:
    @wraps(original)
    def aggregate(self: Strategy, server_round: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if self not in _RUNNING or _AGGREGATING.get(self) == original.__name__:
            return original(self, server_round, *args, **kwargs)
        _AGGREGATING[self] = original.__name__
        try:
            outcome = original(self, server_round, *args, **kwargs)
        finally:
            del _AGGREGATING[self]
        tell(_RUNNING[self], server_round, outcome)
        return outcome

    return aggregate


def _reporting(evaluate_fn: EvaluateFn, runtime: Runtime) -> EvaluateFn:
    @wraps(evaluate_fn)
    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        metrics = evaluate_fn(server_round, arrays)
        if metrics is not None:
            runtime.metrics(server_round, "server", numbers(metrics))
        return metrics

    return evaluate
