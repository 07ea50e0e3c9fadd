"""Makes Flower's own strategies, and strategies built on them, heard on the grids of fedstale.

A stock strategy reports to its log only. Here whatever it aggregates and evaluates is also told to
the runtime of the grid that it runs on, with the round as the model version: its verbs are heard,
whoever calls them, a `start` of Flower's or of its own, or a loop of the app. What it evaluates
centrally is read off the `evaluate_fn` that its `start` is given, or off the `Result` that it
fills. Strategies of fedstale tell their runtime themselves and are left alone. What no strategy
reports, `MessageRounds` reads off the messages of the app.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import BoundArguments, signature
from math import isfinite
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result, Strategy

from fedstale.compat.replacement import Replacement, started
from fedstale.strategies import StaleStrategy
from fedstale.strategies.server import Runtime, RuntimeGrid, Sums, add_metrics, means_of, numbers

Listener = Callable[[int, Any, Any], None]
"""Is told a round, what a method has returned for it, and of what: the replies, or the model."""


@contextmanager
def stock_strategies_reporting(
    runtime: Runtime, replacement: Replacement | None = None
) -> Iterator[None]:
    """Hear stock strategies while the block runs, also those that are defined in it.

    Args:
        runtime: of the run, which is told what verbs return that a loop of the app's own calls.
        replacement: what may start in the place of a strategy, and is told of all that start.
    """
    hearing = _Hearing(runtime, replacement)
    with hearing.replaced, _results_heard(hearing.evaluated):
        yield


def report_stock_strategies() -> Callable[[], None]:
    """Hear stock strategies from now on, those that are defined by now and those to come.

    Returns:
        Puts back what was replaced.
    """
    return _Hearing().replaced.close


class _Hearing:
    """Tells a runtime what strategies aggregate and evaluate."""

    def __init__(
        self, runtime: Runtime | None = None, replacement: Replacement | None = None
    ) -> None:
        """Replace `start` and the verbs in every strategy, of now and to come."""
        self._runtime, self._replacement = runtime, replacement
        """The runtime of the latest `start`, or that of the run."""
        self._started: list[Strategy] = []
        self._depth = self._n_trained = 0
        """Verbs that are under way, in one another; and trainings that were told."""
        self.replaced = ExitStack()
        """Puts back what was replaced, once it is closed."""
        base: Any = Strategy  # abstract, and its methods are replaced all the same

        def defined(owner: type[Any], /, **options: Any) -> None:
            super(base, owner).__init_subclass__(**options)
            self._hear(owner)

        todo: list[type[Strategy]] = [base]
        for owner in todo:
            self._hear(owner)
            todo += owner.__subclasses__()
        # An app may import or define its strategy only when it is run.
        self._replace(base, "__init_subclass__", classmethod(defined))

    def _replace(self, owner: Any, name: str, stand_in: object) -> None:
        if (original := vars(owner).get(name)) is None:
            self.replaced.callback(delattr, owner, name)
        else:
            self.replaced.callback(setattr, owner, name, original)
        setattr(owner, name, stand_in)

    def _hear(self, owner: type[Strategy]) -> None:
        verbs: dict[str, Callable[..., None]] = {
            "configure_train": self._begun,
            "aggregate_train": self._trained,
            "aggregate_evaluate": self._evaluated,
        }
        for name in sorted(verbs.keys() & vars(owner).keys()):
            self._replace(owner, name, self._heard(_unheard(vars(owner)[name]), verbs[name]))
        # It may stand in a class that is no strategy, beside the one that it is mixed into.
        start = owner.start
        if getattr(start, "heard_by", None) is not self:
            self._replace(owner, "start", self._start(_unheard(start)))

    def _heard(self, verb: Callable[..., Any], listener: Callable[..., None]) -> Callable[..., Any]:
        @wraps(verb)
        def heard(strategy: Strategy, server_round: int, *args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                outcome = verb(strategy, server_round, *args, **kwargs)
            finally:
                self._depth -= 1
            # A subclass may call the verb of its base, and a wrapper that of what it wraps.
            if not self._depth and self._runtime is not None:
                replies = args[0] if args else None
                listener(self._runtime, strategy, server_round, outcome, replies)
            return outcome

        heard.heard_by = self  # type: ignore[attr-defined]
        return heard

    def _begun(self, runtime: Runtime, *_: object) -> None:
        if not runtime.n_loops:
            # Its messages are of a round that is told, and not to be read off them.
            runtime.tells = True

    def _trained(
        self, runtime: Runtime, strategy: Strategy, version: int, outcome: Any, replies: object
    ) -> None:
        arrays, metrics = outcome if isinstance(outcome, tuple) else (outcome, None)
        self._n_trained += 1
        runtime.new_round(version)
        if isinstance(arrays, ArrayRecord):
            runtime.new_version(version, arrays)
        runtime.metrics(version, "train", _means(strategy, "train", metrics, replies))

    def _evaluated(
        self,
        runtime: Runtime,
        strategy: Strategy,
        version: int,
        metrics: MetricRecord | None,
        replies: object,
    ) -> None:
        if metrics is not None:
            runtime.metrics(version, "evaluate", _means(strategy, "evaluate", metrics, replies))

    def evaluated(self, version: int, metrics: MetricRecord, _: object) -> None:
        """Report a central evaluation of an app that calls the verbs in a loop of its own."""
        if self._runtime is not None and not self._runtime.n_loops:
            self._runtime.metrics(version, "server", numbers(metrics))

    def _start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `start` that is heard, and that may start another strategy."""
        parameters, is_ours = signature(original), original is StaleStrategy.start

        @wraps(original)
        def start(strategy: Strategy, *args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            grid = next((value for value in values if isinstance(value, RuntimeGrid)), None)
            if grid is None:
                return original(strategy, *args, **kwargs)
            call = parameters.bind(strategy, *args, **kwargs)
            if self._replacement is not None:
                made = self._replacement.starting(grid.runtime, strategy)
                if made is not strategy:
                    return started(made, call, args)
            if is_ours:
                return original(strategy, *args, **kwargs)
            if any(one is strategy for one in self._started):
                # A `start` of its own that calls that of its base, once or for each round.
                with grid.runtime.loop(strategy):
                    return original(strategy, *args, **kwargs)
            return self._run(grid.runtime, strategy, original, call)

        start.heard_by = self  # type: ignore[attr-defined]
        return start

    def _run(
        self,
        runtime: Runtime,
        strategy: Strategy,
        original: Callable[..., Any],
        call: BoundArguments,
    ) -> object:
        """Run a strategy's own `start` as a loop of rounds."""
        on_server, n_trained = set[int](), self._n_trained

        def evaluated(version: int, metrics: MetricRecord | None, _: object) -> None:
            found, number = numbers(metrics), runtime.before + version
            if runtime.tells and self._n_trained == n_trained:
                # It calls the `start` of a strategy of fedstale, which tells it.
                return
            if found and number not in on_server:
                on_server.add(number)
                runtime.metrics(version, "server", found)

        rest = (
            given
            for given in call.arguments.values()
            if isinstance(given, dict) and callable(given.get("evaluate_fn"))
        )
        is_named = callable(call.arguments.get("evaluate_fn"))
        given = call.arguments if is_named else next(rest, None)
        if given is not None:
            given["evaluate_fn"] = reporting(given["evaluate_fn"], evaluated)
        before, self._runtime = self._runtime, runtime
        self._started.append(strategy)
        try:
            with _results_heard(evaluated), runtime.loop(strategy):
                return original(*call.args, **call.kwargs)
        finally:
            self._started.pop()
            self._runtime = before


def _unheard(method: Any) -> Any:
    """Return a method as it was before an earlier hearing, in whose place another one comes."""
    return method.__wrapped__ if hasattr(method, "heard_by") else method


def _means(
    strategy: Strategy, verb: str, metrics: MetricRecord | None, replies: object
) -> dict[str, float]:
    """Return the metrics that a strategy has aggregated, over the replies that have numbers.

    One reply with a NaN makes Flower's mean NaN. What averages in another way than Flower, and so
    may mean something else by it, is taken as it is.
    """
    told = numbers(metrics)
    # By its name: a Flower that has it elsewhere stops no simulation.
    function = getattr(strategy, f"{verb}_metrics_aggr_fn", None)
    is_mean = getattr(function, "__name__", "") == "aggregate_metricrecords"
    if all(map(isfinite, told.values())) or not (is_mean and isinstance(replies, Sequence)):
        return told
    sums: Sums = {}
    key = getattr(strategy, "weighted_by_key", "")
    for reply in replies:
        for record in () if reply.has_error() else reply.content.metric_records.values():
            values = numbers(record)
            add_metrics(sums, values.pop(key, 1.0), values)
    means = means_of(sums)
    return {k: v if isfinite(v) else means.get(k, v) for k, v in told.items()}


class _HeardMetrics(dict[int, MetricRecord]):
    """Metrics by round that are told as they are entered; its copies are plain."""

    listener: Listener | None = None

    def __setitem__(self, version: int, metrics: MetricRecord) -> None:
        super().__setitem__(version, metrics)
        if self.listener is not None:
            self.listener(version, metrics, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


@contextmanager
def _results_heard(listener: Listener) -> Iterator[None]:
    """Hear central evaluations that are entered into a Result which is made inside.

    A strategy with a `start` of its own may evaluate as it likes, and notes it there as Flower's.
    """
    original, heard = Result.__init__, list[_HeardMetrics]()

    def init(self: Result, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        metrics = _HeardMetrics(self.evaluate_metrics_serverapp)
        metrics.listener = listener
        self.evaluate_metrics_serverapp = metrics
        heard.append(metrics)

    Result.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        Result.__init__ = original  # type: ignore[method-assign]
        for metrics in heard:
            metrics.listener = None


def reporting(method: Callable[..., Any], listener: Listener) -> Callable[..., Any]:
    """Return a method of rounds that tells a listener what it returns."""

    @wraps(method)
    def heard(server_round: int, *args: Any, **kwargs: Any) -> Any:
        outcome = method(server_round, *args, **kwargs)
        listener(server_round, outcome, args[0] if args else None)
        return outcome

    heard.reports = True  # type: ignore[attr-defined]
    return heard
