"""Which executor runs the clients of a run: by name, or chosen by measuring.

The default starts in this process, measures, and moves to a pool of processes where that pays. Both
give the same bytes, so a run does not depend on what was chosen. `batched` rounds otherwise, so it
is used only by name.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import copy, deepcopy
from io import StringIO

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from fedstale.config import ExecutorKind
from fedstale.errors import ConfigError, not_installed
from fedstale.flower import own_message
from fedstale.simulation.executors.base import ClientCall, ClientReply, Executor, InlineExecutor
from fedstale.simulation.executors.workers import ProcessExecutor, RayExecutor
from fedstale.simulation.flower_app import BatchedFunctions, FlowerApp
from fedstale.strategies.types import n_cores

logger = logging.getLogger(__name__)

# A worker takes seconds to start: a run that is over by then is better off without.
_MEASURED_S = 10.0
# Below this a message costs more to send to a worker than the client costs.
_SHORT_CALL_S = 0.002


class AutoExecutor(Executor):
    """Starts in this process, and moves to processes once training has taken long enough to pay.

    The first client runs twice, and its replies are compared: an app that replies to the same
    message in another way the second time would give other results in every executor.
    """

    def __init__(
        self,
        client_app: ClientApp,
        load: Callable[[], ClientApp],
        workers: int | None = None,
        limit_s: float | None = None,
    ) -> None:
        """Start in this process.

        Args:
            client_app: the app in this process.
            load: returns the app in another process.
            workers: most processes; None takes as many as there are cores.
            limit_s: as of `ProcessExecutor`.
        """
        self._load, self._workers, self._limit_s = load, workers or n_cores(), limit_s
        self._now: Executor = InlineExecutor(client_app)
        self._is_chosen, self._is_checked = self._workers == 1, False
        self._spent_s, self._n_calls, self._n_runs = 0.0, 0, 0
        why = "not enough training yet to choose anything else"
        self.description = f"{self._now.description}: {why}"

    def run(self, calls: Sequence[ClientCall]) -> list[ClientReply]:
        """Return the replies in the order of the calls.

        Raises:
            ConfigError: the app does not reply to the same message twice in the same way.
        """
        if self._is_chosen and self._is_checked:
            return self._now.run(calls)
        first = _copied(calls[0]) if calls and not self._is_checked else None
        # Processor time: what other programs take from this one is no reason for more processes.
        started = time.thread_time()
        replies = self._now.run(calls)
        self._spent_s += time.thread_time() - started
        if first is not None:
            self._check(first, replies[0])
        self._n_calls, self._n_runs = self._n_calls + len(calls), self._n_runs + (len(calls) > 0)
        if not self._is_chosen and self._spent_s >= _MEASURED_S:
            self._choose()
        return replies

    def __exit__(self, *problem: object) -> None:
        """Stop the workers, if there are any."""
        self._now.__exit__(*problem)

    def _choose(self) -> None:
        self._is_chosen = True
        each_s, together = self._spent_s / self._n_calls, self._n_calls / self._n_runs
        measured = f"{1000 * each_s:.3g} ms a client, {together:.3g} at a time"
        if each_s >= _SHORT_CALL_S and together >= min(2, self._workers):
            self._now = ProcessExecutor(self._load, self._workers, self._limit_s)
            self.batch, self.is_remote = self._now.batch, self._now.is_remote
        self.description = f"{self._now.description}: {measured}"
        logger.info("clients run in %s", self.description)

    def _check(self, first: ClientCall, before: ClientReply) -> None:
        self._is_checked = True
        # Each line that a client writes is shown once.
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), _no_log():
            (again,) = self._now.run([first])
        # Metrics may well tell the time; a client that fails may fail otherwise.
        failed = before.reply.has_error() or again.reply.has_error()
        if not failed and _arrays(before.reply) != _arrays(again.reply):
            raise ConfigError(
                "the ClientApp answered the same message in two ways, so results would depend on "
                "where and in which order clients run: keep what lasts in context.state and draw "
                "from random, numpy.random or torch, which are seeded; or name an executor, such "
                "as executor = 'inline', to run it as it is"
            )


def executor_for(
    app: FlowerApp,
    client: ClientApp,
    kind: ExecutorKind = "auto",
    workers: int | None = None,
    gpus: float | None = None,
    *,
    limit_s: float | None = None,
    address: str | None = None,
) -> Executor:
    """Return the executor of a run.

    Args:
        app: where the ClientApp comes from.
        client: the ClientApp.
        kind: which one; "auto" starts in this process and measures.
        workers: processes or actors; 1 stays in this process, None takes one a core where several
            are of use.
        gpus: of each Ray actor.
        limit_s: wall-clock s that a client in a process of its own may take; inf if None.
        address: of a running Ray cluster; None joins the one of RAY_ADDRESS, or starts one here.

    Raises:
        ConfigError: the app cannot be run so, or something is not installed.
    """
    if address is not None and kind != "ray":
        raise ConfigError(f"address = {address!r}: expected together with executor = 'ray'")
    if kind == "batched":
        return _batched(app, client)
    if not isinstance(app.client, str):
        if kind not in ("auto", "inline") or (workers or 1) > 1:
            raise ConfigError(
                f"executor = {kind!r}, workers = {workers}: a ClientApp that is an object is run "
                "in this process alone; give the directory of an app to run it in others"
            )
        return InlineExecutor(client)
    if kind == "ray":
        if limit_s is not None:
            raise ConfigError(
                f"client_limit_s = {limit_s:g}: Ray's actors have no limit; use another executor"
            )
        return RayExecutor(app, workers, gpus=gpus, address=address)
    if kind == "inline" or (kind == "auto" and workers == 1):
        return InlineExecutor(client)
    if kind == "processes" or (workers or 1) > 1:
        return ProcessExecutor(app.load_client, workers or n_cores(), limit_s)
    return AutoExecutor(client, app.load_client, limit_s=limit_s)


def _batched(app: FlowerApp, client: ClientApp) -> Executor:
    if app.batched is None:
        raise ConfigError(
            f"executor = 'batched': {app.name} does not say how; declare job, network and losses "
            "in [tool.fedstale.batched] of its pyproject.toml"
        )
    functions = BatchedFunctions.load(app.batched, app.directory)
    try:
        import torch  # noqa: PLC0415 - an app without torch should not pay for it
    except ModuleNotFoundError as problem:
        raise ConfigError(f"executor = 'batched' {not_installed(problem)}") from None

    # Imported here for the same reason.
    from fedstale.simulation.executors.batched import BatchedExecutor  # noqa: PLC0415

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return BatchedExecutor(client, functions, device=device)


@contextmanager
def _no_log() -> Iterator[None]:
    """Let no logger say anything while the block runs."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        logging.disable(before)


def _copied(call: ClientCall) -> ClientCall:
    """Return a call of its own, whose context and records nothing else writes to."""
    own = copy(call.context)
    own.node_config, own.run_config = dict(own.node_config), dict(own.run_config)
    own.state = deepcopy(own.state) if len(own.state) else RecordDict()
    return ClientCall(own_message(call.message), own, call.seed)


def _arrays(reply: Message) -> list[dict[str, bytes]]:
    records: list[ArrayRecord] = list(reply.content.array_records.values())
    return [{name: array.data for name, array in record.items()} for record in records]
