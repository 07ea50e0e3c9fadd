"""Which executor runs the clients of a run: by name, or chosen by measuring.

The default starts in this process, measures, and moves to a pool of processes where that pays. Both
give the same bytes, so a run does not depend on what was chosen; where clients share something in
their process, which others would not have, it stays. `batched` rounds otherwise, so it is used only
by name.
"""

import logging
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Number
from types import ModuleType
from typing import Any

import numpy as np
from flwr.clientapp import ClientApp

from fedstale.config import ExecutorKind
from fedstale.errors import ConfigError, not_installed
from fedstale.simulation.executors.base import ClientCall, ClientReply, Executor, InlineExecutor
from fedstale.simulation.executors.workers import ProcessExecutor, RayExecutor
from fedstale.simulation.flower_app import BatchedFunctions, FlowerApp
from fedstale.strategies.types import n_cores

logger = logging.getLogger(__name__)

# A worker takes seconds to start: a run that is over by then is better off without.
_MEASURED_S = 10.0
# Below this a message costs more to send to a worker than the client costs.
_SHORT_CALL_S = 0.002
_MOST = 10_000
"""Entries of a container that are looked at."""
_FRAMEWORKS = ("torch", "tensorflow.random", "keras.random")


class AutoExecutor(Executor):
    """Starts in this process, and moves to processes once training has taken long enough to pay.

    It stays where clients share what each process would have for itself.
    """

    def __init__(
        self,
        client_app: ClientApp,
        load: Callable[[], ClientApp],
        workers: int | None = None,
        shared: Callable[[], str] = str,
    ) -> None:
        """Start in this process.

        Args:
            client_app: the app in this process.
            load: returns the app in another process.
            workers: most processes; None takes as many as there are cores.
            shared: looks for what clients share, and returns its name; empty if they share nothing.
        """
        self._load, self._workers = load, workers or n_cores()
        self._now: Executor = InlineExecutor(client_app)
        self._shared, self._is_chosen = shared, self._workers == 1
        self._busy_s, self._n_calls, self._n_runs = 0.0, 0, 0
        self.description = f"{self._now.description}: not enough training yet to choose another"

    def run(self, calls: Sequence[ClientCall]) -> list[ClientReply]:
        """Return the replies in the order of the calls."""
        # Processor time: what other programs take from this one is no reason for more processes.
        busy = _processor_s()
        replies = self._now.run(calls)
        if not self._is_chosen and calls:
            self._busy_s += _processor_s() - busy
            self._n_calls, self._n_runs = self._n_calls + len(calls), self._n_runs + 1
            is_time = self._busy_s >= _MEASURED_S
            # More and more seldom: whatever changes has changed by the next look, too.
            shared = self._shared() if is_time or self._n_runs & (self._n_runs - 1) == 0 else ""
            if shared:
                self._stay(f"clients share {shared}")
            elif is_time:
                self._try()
        return replies

    def __exit__(self, *problem: object) -> None:
        """Stop the workers, if there are any."""
        self._now.__exit__(*problem)

    def _try(self) -> None:
        """Move to processes, if clients are long enough and enough of them run together."""
        each_s, together = self._busy_s / self._n_calls, self._n_calls / self._n_runs
        measured = f"{1000 * each_s:.3g} ms a client, {together:.3g} at a time"
        if each_s < _SHORT_CALL_S or together < min(2, self._workers):
            self._stay(measured)
            return
        try:
            pool = ProcessExecutor(self._load, self._workers)
        except ConfigError as problem:
            self._stay(str(problem))
            return
        self._now, self.batch, self.is_remote = pool, pool.batch, pool.is_remote
        self._is_chosen, self.description = True, f"{pool.description}: {measured}"
        logger.info("clients run in %s", self.description)

    def _stay(self, why: str) -> None:
        self._is_chosen, self.description = True, f"{self._now.description}: {why}"
        logger.info("clients run %s", self.description)


def _processor_s() -> float:
    """Return the processor time in s of this process, and of its children that have ended.

    A client may compute in a framework's threads, and read by the workers of a DataLoader.
    """
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def executor_for(
    app: FlowerApp,
    client: ClientApp,
    kind: ExecutorKind = "auto",
    workers: int | None = None,
    gpus: float | None = None,
    *,
    limit_s: float | None = None,
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

    Raises:
        ConfigError: the app cannot be run so, or something is not installed.
    """
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
        return RayExecutor(app, workers, gpus=gpus)
    if kind == "inline" or (kind == "auto" and workers == 1):
        return InlineExecutor(client)
    # A function of the script that is run, which processes do not import, may say the work.
    load = replace(app, work=None).load_client
    if kind == "processes" or (workers or 1) > 1:
        return ProcessExecutor(load, workers or n_cores(), limit_s)
    shared = SharedState(app.modules).look
    return AutoExecutor(client, load, shared=shared)


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


class SharedState:
    """Finds globals of an app's modules by which one client changes the next one's work.

    Those are generators of random numbers, numbers and texts that change, and entries of
    containers that are replaced. What is made once and kept, such as a dataset that is loaded by
    the first client or a cache that only grows, is none.
    """

    def __init__(self, modules: Callable[[], Iterable[str]]) -> None:
        """Look at nothing yet.

        Args:
            modules: returns the names of the app's own modules.
        """
        self._modules = modules
        self._before: dict[tuple[str, str], Any] = {}

    def look(self) -> str:
        """Return the name of something that is shared, such as "task.rng"; empty for nothing yet.

        Whatever has changed since the last look, in which clients have run, is shared.
        """
        now: dict[tuple[str, str], Any] = {}
        for module, name, value in self._globals():
            if isinstance(value, _generators()):
                return f"{module}.{name}"
            kept = _fingerprint(value)
            before = self._before.get((module, name))
            if before is not None and _is_changed(before, kept):
                return f"{module}.{name}"
            if kept is not None:
                now[module, name] = kept
        self._before = now
        return ""

    def _globals(self) -> Iterator[tuple[str, str, Any]]:
        for module in self._modules():
            for name, value in list(vars(sys.modules.get(module, ModuleType(module))).items()):
                if not name.startswith("__"):
                    yield module, name, value


def _generators() -> tuple[type, ...]:
    """Return the classes of generators of random numbers, of libraries that are loaded."""
    found = [getattr(sys.modules.get(name), "Generator", None) for name in _FRAMEWORKS]
    return (
        *(np.random.Generator, np.random.RandomState, random.Random),
        *(one for one in found if isinstance(one, type)),
    )


def _fingerprint(value: object) -> Any:
    """Return the fingerprint of a global, which changes with it; None if it has none."""
    if isinstance(value, Number | str):
        return value
    if isinstance(value, Mapping) and len(value) <= _MOST:
        return dict(value)
    if isinstance(value, Sequence) and len(value) <= _MOST:
        return dict(enumerate(value))
    return None


def _is_changed(before: Any, now: Any) -> bool:
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return type(before) is not type(now) or before != now
    return any(key in before and before[key] is not value for key, value in now.items())
