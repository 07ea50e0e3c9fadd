"""Listens to Flower's own strategies, which do not know that they are watched.

A stock strategy reports to its log only. While a probe is on, whatever it aggregates or evaluates
is also told to an observer, with the round as the model version. Strategies that report to their
grid by themselves are left alone.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import Result, Strategy

Measured = Callable[[int, str, Mapping[str, float]], None]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@contextmanager
def probe(on_measured: Measured, on_arrays: Callable[[int, ArrayRecord], None]) -> Iterator[None]:
    """Report what stock strategies aggregate and evaluate.

    Args:
        on_measured: called with (round, source, metrics); the source is "server" for a central
            evaluation, "train" and "evaluate" for metrics averaged over clients.
        on_arrays: called with (round, arrays) when a new model has been aggregated.
    """
    original = Strategy.start
    signature = inspect.signature(original)

    @wraps(original)
    def start(*args: Any, **kwargs: Any) -> Result:  # noqa: ANN401 - as the original
        call = signature.bind(*args, **kwargs)
        evaluate_fn = call.arguments.get("evaluate_fn")
        call.arguments["evaluate_fn"] = _watched_evaluation(evaluate_fn, on_measured)
        with _watched(call.arguments["self"], on_measured, on_arrays):
            return original(*call.args, **call.kwargs)

    Strategy.start = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        Strategy.start = original  # type: ignore[method-assign]


def numbers(metrics: MetricRecord) -> dict[str, float]:
    """Return the scalar metrics of a record."""
    return {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}


@contextmanager
def _watched(
    strategy: Strategy, on_measured: Measured, on_arrays: Callable[[int, ArrayRecord], None]
) -> Iterator[None]:
    train, evaluate = strategy.aggregate_train, strategy.aggregate_evaluate

    def aggregate_train(
        server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = train(server_round, replies)
        if arrays is not None:
            on_arrays(server_round, arrays)
        on_measured(server_round, "train", numbers(metrics) if metrics is not None else {})
        return arrays, metrics

    def aggregate_evaluate(server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        metrics = evaluate(server_round, replies)
        if metrics is not None:
            on_measured(server_round, "evaluate", numbers(metrics))
        return metrics

    strategy.aggregate_train = aggregate_train  # type: ignore[method-assign]
    strategy.aggregate_evaluate = aggregate_evaluate  # type: ignore[method-assign]
    try:
        yield
    finally:
        del strategy.aggregate_train, strategy.aggregate_evaluate


def _watched_evaluation(evaluate_fn: EvaluateFn | None, on_measured: Measured) -> EvaluateFn | None:
    if evaluate_fn is None:
        return None

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        metrics = evaluate_fn(server_round, arrays)
        if metrics is not None:
            on_measured(server_round, "server", numbers(metrics))
        return metrics

    return evaluate
