"""Lets Flower's own strategies, and strategies built on them, run on our grids and be heard.

A stock strategy reports to its log only. Here whatever it aggregates and evaluates is also told to
the runtime of the grid that it runs on, with the round as the model version. That holds for a
strategy with a `start` of its own too, as long as it calls its own `aggregate_train` and
`aggregate_evaluate`; what it evaluates centrally is read off the `evaluate_fn` that it is given, or
off the `Result` that it fills. Strategies of fedstale tell their runtime themselves and are left
alone. What no strategy reports, `MessageRounds` reads off the messages of the app.

ServerApps of Flower's older API (`server_fn`, strategies of `flwr.server`) send to every client
from a thread of its own, and one more thread updates the list of clients every five wall seconds.
On a virtual clock threads would take turns in no fixed order. Here one thread does it all: the
messages of a round are sent together, and `ClientManagerSync` takes the place of the updating
thread. Flower has no seam for this, so its functions are replaced for the duration of a run: all of
them are in `fedstale.flower.legacy`. Proxies that are called one by one (`client.get_properties`)
work as they are, from that one thread.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from inspect import BoundArguments, signature
from math import isfinite
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Result, Strategy

from fedstale.compat import replaced
from fedstale.errors import ConfigError, RunEnded
from fedstale.flower import features, legacy
from fedstale.simulation.replacement import Replacement, started
from fedstale.strategies import StaleStrategy
from fedstale.strategies.server import (
    Runtime,
    RuntimeGrid,
    Sums,
    add_metrics,
    means_of,
    numbers,
)

if TYPE_CHECKING:
    from fedstale.simulation.trace_grid import TraceGrid

logger = logging.getLogger(__name__)

_UPDATE_EVERY_S = 5.0  # as Flower's own thread does
_PATIENCE_S = 86_400  # of Flower's own wait_for
_TIMEOUT_S = 3600.0  # of the strategies of flwr.serverapp

# Objects of flwr.server.
_OlderStrategy = Any
_Server = Any
_ClientManager = Any
_Client = Any

_Listener = Callable[[int, Any, Any], None]
"""Is told a round, what a method has returned for it, and of what: the replies, or the model."""


@contextmanager
def stock_strategies_reporting(
    runtime: Runtime, replacement: Replacement | None = None
) -> Iterator[None]:
    """Let stock strategies report while the block runs, also those that are defined in it.

    An app may call their verbs from a loop of its own, which is no strategy's `start`.

    Args:
        runtime: of the run.
        replacement: what may start in the place of a strategy, and is told of all that start.
    """
    verbs = _Verbs(runtime)

    def evaluated(version: int, metrics: MetricRecord, _: object) -> None:
        if not runtime.n_loops:
            runtime.metrics(version, "server", numbers(metrics))

    undo = report_stock_strategies(verbs.replace, replacement)
    try:
        with _results_heard(evaluated):
            yield
    finally:
        undo()


def report_stock_strategies(
    more: Callable[[type[Strategy]], Mapping[str, Any]] = lambda owner: {},
    replacement: Replacement | None = None,
) -> Callable[[], None]:
    """Let stock strategies report, those that are defined by now and those to come.

    Args:
        more: returns other attributes that are replaced in a class.
        replacement: what may start in the place of a strategy.

    Returns:
        Puts back what was replaced.
    """
    base: Any = Strategy  # abstract, and its methods are replaced all the same
    replaced: list[tuple[Any, str, Any]] = []

    def report(owner: type[Strategy]) -> None:
        stand_ins = dict(more(owner))
        # It may stand in a class that is no strategy, beside the one that it is mixed into.
        start = owner.start
        if not hasattr(start, "reports") and start is not StaleStrategy.start:
            start = _started(start)
        if replacement is not None and not hasattr(start, "replaces"):
            start = _replaced(start, replacement)
        if start is not owner.start:
            stand_ins["start"] = start
        for name, stand_in in stand_ins.items():
            replaced.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, stand_in)

    def defined(owner: type[Any], /, **options: Any) -> None:  # noqa: ANN401 - as the original
        super(base, owner).__init_subclass__(**options)
        report(owner)

    for owner in _family(base):
        report(owner)
    # An app may import or define its strategy only when it is run.
    before = vars(base).get("__init_subclass__")
    base.__init_subclass__ = classmethod(defined)

    def undo() -> None:
        for owner, name, original in reversed(replaced):
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        if before is None:
            del base.__init_subclass__
        else:
            base.__init_subclass__ = before

    return undo


def _family(strategy: type[Strategy]) -> Iterator[type[Strategy]]:
    yield strategy
    for kind in strategy.__subclasses__():
        yield from _family(kind)


def _replaced(original: Callable[..., Any], replacement: Replacement) -> Callable[..., Any]:
    """Return a `start` that may start another strategy."""
    parameters = signature(original)

    def start(self: Strategy, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the original
        grid = _grid_in(args, kwargs)
        if grid is None or (made := replacement.starting(grid.runtime, self)) is self:
            return original(self, *args, **kwargs)
        return started(made, parameters.bind(self, *args, **kwargs), args)

    start.replaces = True  # type: ignore[attr-defined]
    return wraps(original)(start)


def _grid_in(args: Sequence[object], kwargs: Mapping[str, object]) -> RuntimeGrid | None:
    values = (*args, *kwargs.values())
    return next((value for value in values if isinstance(value, RuntimeGrid)), None)


def _started(original: Callable[..., Any]) -> Callable[..., Any]:
    parameters = signature(original)

    def start(self: Strategy, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the original
        grid = _grid_in(args, kwargs)
        if grid is None:
            return original(self, *args, **kwargs)
        runtime, call = grid.runtime, parameters.bind(self, *args, **kwargs)
        if hasattr(self.aggregate_train, "reports"):
            # A `start` of its own that calls that of its base, once or for each round.
            with runtime.loop(self):
                return original(self, *args, **kwargs)
        on_server: set[int] = set()
        trained: list[int] = []

        def aggregated(version: int, outcome: Any, replies: object) -> None:  # noqa: ANN401
            trained.append(version)
            _tell_training(runtime, self, version, outcome, replies)

        def evaluated_on_server(version: int, metrics: MetricRecord | None, _: object) -> None:
            found, number = numbers(metrics), runtime.before + version
            if runtime.tells and not trained:
                # It calls the `start` of a strategy of fedstale, which tells it.
                return
            if found and number not in on_server:
                on_server.add(number)
                runtime.metrics(version, "server", found)

        listeners: dict[str, _Listener] = {
            "aggregate_train": aggregated,
            "aggregate_evaluate": partial(_tell_evaluation, runtime, self),
        }
        _listen(call, "evaluate_fn", evaluated_on_server)
        with _heard(self, listeners), _results_heard(evaluated_on_server), runtime.loop(self):
            return original(*call.args, **call.kwargs)

    start.reports = True  # type: ignore[attr-defined]
    return wraps(original)(start)


def _tell_training(
    runtime: Runtime,
    strategy: Strategy,
    version: int,
    outcome: Any,  # noqa: ANN401 - as the strategy returns it
    replies: object,
) -> None:
    """Tell what `aggregate_train` has returned for a round."""
    arrays, metrics = outcome if isinstance(outcome, tuple) else (outcome, None)
    runtime.new_round(version)
    if isinstance(arrays, ArrayRecord):
        runtime.new_version(version, arrays)
    runtime.metrics(version, "train", _means(strategy, "train", metrics, replies))


def _tell_evaluation(
    runtime: Runtime,
    strategy: Strategy,
    version: int,
    metrics: MetricRecord | None,
    replies: object,
) -> None:
    """Tell what `aggregate_evaluate` has returned for a round."""
    if metrics is not None:
        runtime.metrics(version, "evaluate", _means(strategy, "evaluate", metrics, replies))


class _Verbs:
    """Hears a strategy's verbs where no `start` of a strategy goes on."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._depth = 0

    def replace(self, owner: type[Strategy]) -> dict[str, Any]:
        """Return stand-ins for the verbs that a class defines."""
        listeners: dict[str, Callable[..., None]] = {
            # Its messages are of a round that is told, and not to be read off them.
            "configure_train": self._begin,
            "aggregate_train": partial(_tell_training, self._runtime),
            "aggregate_evaluate": partial(_tell_evaluation, self._runtime),
        }
        return {
            name: self._heard(vars(owner)[name], listener)
            for name, listener in listeners.items()
            if name in vars(owner)
        }

    def _begin(self, strategy: Strategy, version: int, messages: object, model: object) -> None:
        self._runtime.tells = True

    def _heard(self, verb: Callable[..., Any], listener: Callable[..., None]) -> Callable[..., Any]:
        @wraps(verb)
        def heard(strategy: Strategy, server_round: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self._depth += 1
            try:
                outcome = verb(strategy, server_round, *args, **kwargs)
            finally:
                self._depth -= 1
            # A subclass may call the verb of its base, and a wrapper that of what it wraps.
            if not self._depth and not self._runtime.n_loops:
                listener(strategy, server_round, outcome, args[0] if args else None)
            return outcome

        return heard


def _means(
    strategy: Strategy, verb: str, metrics: MetricRecord | None, replies: object
) -> dict[str, float]:
    """Return what a strategy has aggregated of metrics, means over the replies that have numbers.

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


def _listen(call: BoundArguments, name: str, listener: _Listener) -> None:
    """Let a function that is an argument of a call report what it returns."""
    rest = (a for a in call.arguments.values() if isinstance(a, dict) and callable(a.get(name)))
    given = call.arguments if callable(call.arguments.get(name)) else next(rest, None)
    if given is not None:
        given[name] = _reporting(given[name], listener)


class _ToldMetrics(dict[int, MetricRecord]):
    """Metrics by round that are told as they are entered; its copies are plain."""

    listener: _Listener | None = None

    def __setitem__(self, version: int, metrics: MetricRecord) -> None:
        super().__setitem__(version, metrics)
        if self.listener is not None:
            self.listener(version, metrics, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


@contextmanager
def _results_heard(listener: _Listener) -> Iterator[None]:
    """Let central evaluations report that are entered into a Result which is made inside.

    A strategy with a `start` of its own may evaluate as it likes, and notes it there as Flower's.
    """
    original, told = Result.__init__, list[_ToldMetrics]()

    def init(self: Result, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as the original
        original(self, *args, **kwargs)
        metrics = _ToldMetrics(self.evaluate_metrics_serverapp)
        metrics.listener = listener
        self.evaluate_metrics_serverapp = metrics
        told.append(metrics)

    Result.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        Result.__init__ = original  # type: ignore[method-assign]
        for metrics in told:
            metrics.listener = None


@contextmanager
def _heard(strategy: Any, listeners: Mapping[str, _Listener]) -> Iterator[None]:  # noqa: ANN401
    """Let methods of one strategy report what they return; a subclass may call those of its base.

    Args:
        strategy: of either API, whose methods are called with a round.
        listeners: told by which method.
    """
    own = vars(strategy)
    before = {name: own[name] for name in listeners if name in own}
    own.update({n: _reporting(getattr(strategy, n), heard) for n, heard in listeners.items()})
    try:
        yield
    finally:
        for name in listeners:
            del own[name]
        own.update(before)


def _reporting(method: Callable[..., Any], listener: _Listener) -> Callable[..., Any]:
    def reporting(server_round: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        outcome = method(server_round, *args, **kwargs)
        listener(server_round, outcome, args[0] if args else None)
        return outcome

    reporting.reports = True  # type: ignore[attr-defined]
    return wraps(method)(reporting)


class ClientManagerSync:
    """Brings a ClientManager up to date with who is online whenever the manager is read.

    Waiting for clients waits on the virtual clock.
    """

    def __init__(self, grid: "TraceGrid", manager: _ClientManager) -> None:
        """Take over the methods of one manager that need to know who is online.

        Args:
            grid: knows who is online, and the time.
            manager: where proxies of the online nodes are registered, in the order of their ids.
        """
        self._grid, self._manager = grid, manager
        self._count = manager.num_available
        self._registered: dict[int, _Client] = {}
        self.shortage = ""
        """The last wait that found too few clients, in words; empty if there was none."""
        for name in ("num_available", "all", "sample"):
            setattr(manager, name, self._updating(getattr(manager, name)))
        manager.wait_for = self._wait_for

    def _updating(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def updated(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the original
            self._update()
            return method(*args, **kwargs)

        return updated

    def _update(self) -> None:
        online = dict.fromkeys(self._grid.get_node_ids())
        for node_id in [n for n in self._registered if n not in online]:
            self._manager.unregister(self._registered.pop(node_id))
        for node_id in online:
            if node_id not in self._registered:
                self._registered[node_id] = legacy.client_of(self._grid, node_id)
                self._manager.register(self._registered[node_id])

    def _wait_for(self, num_clients: int, timeout: float = _PATIENCE_S) -> bool:
        """Wait on the virtual clock; like Flower's, gives up after a day and lets the app go on."""
        begin, most = self._grid.now(), 0
        while True:
            self._update()
            most = max(most, count := self._count())
            if count >= num_clients:
                return True
            if self._grid.now() - begin >= timeout:
                break
            self._grid.sleep(min(_UPDATE_EVERY_S, begin + timeout - self._grid.now()))
        self.shortage = (
            f"waited {timeout:,.0f} s of virtual time for {num_clients} clients, but at most "
            f"{most} were online at once: let the strategy wait for fewer, or use more devices"
        )
        logger.warning("%s", self.shortage)
        return False


@contextmanager
def server_fn_on(grid: "TraceGrid", *packages: str) -> Iterator[None]:
    """Let apps of the older API, and workflows of `flwr.server`, run on a grid.

    What their strategies aggregate and evaluate is told to the grid as its metrics and models, with
    the round as the model version.

    Args:
        grid: where messages go.
        packages: import names of the app, whose modules may have bound Flower's functions by name.
    """
    if not features.has("older API"):
        # An app of it is not loaded, but one of the other may use a workflow.
        with legacy.contexts_heard(_refuse):
            yield
        return
    syncs: list[ClientManagerSync] = []

    def run(run_rounds: Callable[..., Any], server: _Server, config: Any) -> object:  # noqa: ANN401
        if isinstance(server.strategy, StaleStrategy):
            return _start(server, grid, config)
        with _watched(server.strategy, grid.runtime) as trained:
            history: object = run_rounds(server, config)
        shortage = syncs[-1].shortage if syncs else ""
        if shortage and not trained:
            raise RunEnded(shortage, stuck=True)
        return history

    def update(
        _: object, manager: _ClientManager
    ) -> tuple[threading.Thread, threading.Event, threading.Event]:
        # What Flower expects: a thread to join, here one that has nothing to do.
        syncs.append(ClientManagerSync(grid, manager))
        ready = threading.Event()
        thread = threading.Thread(target=ready.set, daemon=True)
        thread.start()
        return thread, threading.Event(), ready

    stand_ins = legacy.stand_ins(run=run, update=update, ask=partial(_send_to_all, grid))
    with (
        ExitStack() as watching,
        replaced(stand_ins, within=(*legacy.CALLERS, *packages)),
        # Whatever workflow it is for, of Flower or of the app, and for how long: until the end.
        legacy.contexts_heard(
            lambda made: watching.enter_context(_watched(made.strategy, grid.runtime))
        ),
    ):
        yield


def _start(server: _Server, grid: "TraceGrid", config: Any) -> Result:  # noqa: ANN401
    """Start a strategy of the message API that a server of the older one was given.

    Raises:
        ConfigError: no client has a model to begin with.
    """
    manager, strategy = server.client_manager(), server.strategy
    manager.wait_for(1)
    arrays = legacy.initial_arrays(next(iter(manager.all().values())))
    if not arrays:
        raise ConfigError(
            f"{type(strategy).__name__} in ServerAppComponents begins with what a client's "
            "get_parameters returns, and that is nothing: implement it, or call "
            f"{type(strategy).__name__}.start(grid, initial_arrays) under @app.main()"
        )
    result: Result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        num_rounds=config.num_rounds,
        timeout=config.round_timeout or _TIMEOUT_S,
    )
    return result


def _refuse(_: object) -> None:
    features.require("older API")


def _send_to_all(  # noqa: PLR0917 - as Flower calls it
    grid: "TraceGrid",
    request: legacy.Request,
    client_instructions: Sequence[tuple[_Client, Any]],
    max_workers: int | None,
    timeout: float | None,
    group_id: int,
) -> tuple[list[tuple[_Client, Any]], list[tuple[_Client, Any] | BaseException]]:
    """Send to all clients of a round at once; stands in for fit_clients and evaluate_clients.

    Args:
        grid: where messages go.
        request: the kind of request.
        client_instructions: the clients, and what each is to do.
        max_workers: how many threads Flower would use; has no meaning here.
        timeout: seconds for which each message is valid; None takes Flower's 12 hours.
        group_id: the round.

    Returns:
        Results and failures, each in the order in which the server saw them.
    """
    contents: dict[int, RecordDict] = {}
    messages = []
    for client, ins in client_instructions:
        # Strategies give one object to all clients, which is then measured and packed once.
        if id(ins) not in contents:
            contents[id(ins)] = request.pack(ins)
        content, node_id = contents[id(ins)], int(client.cid)
        messages.append(
            Message(content, node_id, request.kind, ttl=timeout, group_id=str(group_id))
        )
    replies = grid.send_and_receive(messages)
    ids = [message.metadata.message_id for message in messages]
    clients = dict(zip(ids, (client for client, _ in client_instructions), strict=True))
    results: list[tuple[_Client, Any]] = []
    failures: list[tuple[_Client, Any] | BaseException] = []
    for reply in replies:
        message_id = reply.metadata.reply_to_message_id
        client = clients[message_id]
        if reply.has_error():
            failures.append(ValueError(f"node {client.cid} failed: {reply.error.reason}"))
            continue
        try:
            result = request.unpack(reply.content)
        except Exception as problem:
            grid.runtime.rejected(message_id, reason=f"{type(problem).__name__}: {problem}")
            failures.append(problem)
            continue
        status = result.status
        if status.code.name == "OK":
            results.append((client, result))
        else:
            grid.runtime.rejected(message_id, reason=f"{status.code.name}: {status.message}")
            failures.append((client, result))
    return results, failures


def _mean_loss(strategy: _OlderStrategy, loss: float, results: object) -> float:
    """Return the mean loss of clients over those that have one, where Flower's own is no number."""
    is_mean = type(strategy).aggregate_evaluate.__module__.startswith("flwr.")
    if not (is_mean and isinstance(results, list)):
        return loss
    sums: Sums = {}
    for _, result in results:
        add_metrics(sums, result.num_examples, {"loss": result.loss})
    return means_of(sums).get("loss", loss)


@contextmanager
def _watched(strategy: _OlderStrategy, runtime: Runtime) -> Iterator[list[int]]:
    """Report what a strategy aggregates and evaluates; yields the rounds that trained so far."""
    trained: list[int] = []
    if isinstance(strategy, StaleStrategy):
        name = type(strategy).__name__
        raise ConfigError(
            f"{name} in a workflow of flwr.server: its rounds are those of the older API; expected "
            f"a strategy of flwr.server.strategy, or {name}.start without the workflow"
        )
    if hasattr(strategy.aggregate_fit, "reports"):
        # The strategy of an earlier workflow, started again.
        with runtime.loop(strategy):
            yield trained
        return

    def aggregated(version: int, outcome: tuple[Any, Mapping[str, Any]], _: object) -> None:
        trained.append(version)
        parameters, metrics = outcome
        runtime.new_round(version)
        arrays = legacy.arrays_of(parameters)
        if arrays is not None:
            runtime.new_version(version, arrays)
        runtime.metrics(version, "train", numbers(metrics))

    def evaluated(
        source: str,
        version: int,
        outcome: tuple[float | None, Mapping[str, Any]] | None,
        of: object,
    ) -> None:
        loss, metrics = outcome or (None, {})
        if loss is not None:
            loss = float(loss) if isfinite(loss) else _mean_loss(strategy, float(loss), of)
            runtime.metrics(version, source, {**numbers(metrics), "loss": loss})

    listeners: dict[str, _Listener] = {
        "aggregate_fit": aggregated,
        "aggregate_evaluate": partial(evaluated, "evaluate"),
        "evaluate": partial(evaluated, "server"),
    }
    with _heard(strategy, listeners), runtime.loop(strategy):
        yield trained
