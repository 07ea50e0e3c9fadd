"""ServerApps of Flower's older API (`server_fn`, strategies of `flwr.server`) on a virtual clock.

They send to every client from a thread of its own, and one more thread updates the list of clients
every five wall seconds. On a virtual clock threads would take turns in no fixed order. Here one
thread does it all: the messages of a round are sent together, and `ClientManagerSync` takes the
place of the updating thread. Flower has no seam for this, so its functions are replaced for the
duration of a run: all of them are in `fedstale.flower.legacy`. Proxies that are called one by one
(`client.get_properties`) work as they are, from that one thread.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from math import isfinite
from typing import Any

from flwr.app import Message, RecordDict

from fedstale.compat.callers import replaced
from fedstale.compat.stock_strategies import Listener, reporting
from fedstale.errors import ConfigError, RunEnded
from fedstale.flower import features, legacy
from fedstale.strategies import StaleStrategy
from fedstale.strategies.server import Runtime, RuntimeGrid, Sums, add_metrics, means_of, numbers

logger = logging.getLogger(__name__)

_UPDATE_EVERY_S = 5.0  # as Flower's own thread does
_PATIENCE_S = 86_400  # of Flower's own wait_for
_TIMEOUT_S = 3600.0  # of the strategies of flwr.serverapp

# Objects of flwr.server.
_Strategy = Any
_Manager = Any


class ClientManagerSync:
    """Brings a ClientManager up to date with who is online whenever the manager is read.

    Waiting for clients waits on the virtual clock.
    """

    def __init__(self, grid: Any, manager: Any) -> None:
        """Replace the methods of one manager that need to know who is online.

        Args:
            grid: knows who is online, and the time.
            manager: where proxies of the online nodes are registered, in the order of their ids.
        """
        self._grid, self._manager = grid, manager
        self._count = manager.num_available
        self._registered: dict[int, Any] = {}
        self.shortage = ""
        """The last wait that found too few clients, in words; empty if there was none."""
        for name in ("num_available", "all", "sample"):
            setattr(manager, name, self._updating(getattr(manager, name)))
        manager.wait_for = self._wait_for

    def _updating(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def updated(*args: Any, **kwargs: Any) -> Any:
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
def server_fn_on(grid: RuntimeGrid, *packages: str) -> Iterator[None]:
    """Run apps of the older API, and workflows of `flwr.server`, on a grid.

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

    def run(run_rounds: Callable[..., Any], server: Any, config: Any) -> object:
        if isinstance(server.strategy, StaleStrategy):
            return _start(server, grid, config)
        with _watched(server.strategy, grid.runtime) as trained:
            history: object = run_rounds(server, config)
        shortage = syncs[-1].shortage if syncs else ""
        if shortage and not trained:
            raise RunEnded(shortage, stuck=True)
        return history

    def update(
        _: object, manager: _Manager
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


def _start(server: Any, grid: RuntimeGrid, config: Any) -> object:
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
    result: object = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        num_rounds=config.num_rounds,
        timeout=config.round_timeout or _TIMEOUT_S,
    )
    return result


def _refuse(_: object) -> None:
    features.require("older API")


def _send_to_all(  # noqa: PLR0917 - as Flower calls it
    grid: RuntimeGrid,
    request: legacy.Request,
    client_instructions: Sequence[tuple[Any, Any]],
    max_workers: int | None,
    timeout: float | None,
    group_id: int,
) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any] | BaseException]]:
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
    results: list[tuple[Any, Any]] = []
    failures: list[tuple[Any, Any] | BaseException] = []
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


def _mean_loss(strategy: _Strategy, loss: float, results: object) -> float:
    """Return the mean loss of clients over those that have one, where Flower's own is no number."""
    is_mean = type(strategy).aggregate_evaluate.__module__.startswith("flwr.")
    if not (is_mean and isinstance(results, list)):
        return loss
    sums: Sums = {}
    for _, result in results:
        add_metrics(sums, result.num_examples, {"loss": result.loss})
    return means_of(sums).get("loss", loss)


@contextmanager
def _heard(strategy: Any, listeners: Mapping[str, Listener]) -> Iterator[None]:
    """Hear methods of one strategy; a subclass may call those of its base.

    Args:
        strategy: of either API, whose methods are called with a round.
        listeners: told by which method.
    """
    own = vars(strategy)
    before = {name: own[name] for name in listeners if name in own}
    own.update({n: reporting(getattr(strategy, n), heard) for n, heard in listeners.items()})
    try:
        yield
    finally:
        for name in listeners:
            del own[name]
        own.update(before)


@contextmanager
def _watched(strategy: _Strategy, runtime: Runtime) -> Iterator[list[int]]:
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

    listeners: dict[str, Listener] = {
        "aggregate_fit": aggregated,
        "aggregate_evaluate": partial(evaluated, "evaluate"),
        "evaluate": partial(evaluated, "server"),
    }
    with _heard(strategy, listeners), runtime.loop(strategy):
        yield trained
