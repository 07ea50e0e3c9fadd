"""Clients in the actors of a Ray cluster: the way beyond one machine.

Each set of arrays goes into Ray's object store once, and a message names it. An actor loads the app
once; app and fedstale must be installed, or be at the same path, on every machine of the cluster.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.app.error import Error
from flwr.clientapp import ClientApp

from fedstale.errors import ConfigError
from fedstale.simulation import quick_arrays
from fedstale.simulation.compat import ErrorCode, identity, own_copy, with_content
from fedstale.simulation.executors.base import (
    Answer,
    Call,
    Executor,
    answer,
    imported_torch,
    quick_manual_seed,
)
from fedstale.simulation.replayed import pack

_Packed = tuple[Call, dict[str, Any]]


class RayExecutor(Executor):
    """Runs clients in Ray actors."""

    def __init__(
        self,
        load: Callable[[], ClientApp],
        workers: int | None = None,
        address: str | None = None,
        *,
        gpus: float | None = None,
    ) -> None:
        """Join or start a cluster, and start the actors.

        Args:
            load: returns the ClientApp; pickled to the actors.
            workers: number of actors, of one core each; None takes all cores of the cluster, or as
                many as it has GPUs for.
            address: of a cluster; None takes what RAY_ADDRESS names, or starts one here.
            gpus: of each actor, such as 0.25 where four share one.

        Raises:
            ConfigError: Ray is not installed, or the cluster has not so many GPUs.
        """
        try:
            import ray  # noqa: PLC0415 - an extra
        except ImportError:
            raise ConfigError(
                "executor = 'ray': Ray is not installed; pip install 'fedstale[simulation]'"
            ) from None
        self._ray: Any = ray
        self._load = load
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            ray.init(address=address, log_to_driver=False, include_dashboard=False)
        self._workers = workers or self._n_workers(gpus)
        self.batch = self._workers
        try:
            self._check_gpus(gpus)
        except ConfigError:
            self._leave()
            raise
        remote = self._ray.remote(num_cpus=1, num_gpus=gpus or 0, max_restarts=0)
        self._remote = remote(_Actor)
        self._actors = [self._remote.remote(load) for _ in range(self._workers)]
        self._versions: dict[tuple[int, ...], tuple[Any, list[bytes]]] = {}

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """Return the answers in the order of the calls.

        The jobs of an actor that dies run once more, one at a time; one whose actor dies again is
        answered by an error reply.
        """
        self._forget_but({key for call in calls for key in _keys(call)})
        pack(call.context for call in calls)
        packed = [self._pack(call) for call in calls]
        shares = [packed[i :: self._workers] for i in range(self._workers)]
        pairs = zip(self._actors, shares, strict=True)
        sent = [actor.run.remote(*_flat(share)) if share else None for actor, share in pairs]
        answers: list[Answer | None] = [None] * len(calls)
        for i, (share, future) in enumerate(zip(shares, sent, strict=True)):
            if share:
                answers[i :: self._workers] = self._result(i, share, future)
        return [one for one in answers if one is not None]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Stop the actors, and the cluster if it was started here."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._leave()

    def _leave(self) -> None:
        if self._is_ours:
            self._ray.shutdown()

    def _n_workers(self, gpus: float | None) -> int:
        there = self._ray.cluster_resources()
        cores = int(there["CPU"])
        return min(cores, int(there.get("GPU", 0.0) / gpus)) or 1 if gpus else cores

    def _check_gpus(self, gpus: float | None) -> None:
        # An actor that asks for more than there is would be waited for without end.
        there, wanted = self._ray.cluster_resources().get("GPU", 0.0), (gpus or 0) * self._workers
        if wanted > there:
            raise ConfigError(
                f"gpus = {gpus} for each of {self._workers} Ray actors: the cluster has {there:g}; "
                "ask for a smaller share or for fewer workers"
            )

    @property
    def description(self) -> str:
        """What runs the clients, in words."""
        return f"{self._workers} Ray actors"

    def _result(self, i: int, share: list[_Packed], future: Any) -> list[Answer]:  # noqa: ANN401
        try:
            answers: list[Answer] = self._ray.get(future)
            return answers
        except self._ray.exceptions.RayActorError:
            self._actors[i] = self._remote.remote(self._load)
        return [self._second_try(i, one) for one in share]

    def _second_try(self, i: int, one: _Packed) -> Answer:
        try:
            first: Answer = self._ray.get(self._actors[i].run.remote(*_flat([one])))[0]
            return first
        except self._ray.exceptions.RayActorError:
            self._actors[i] = self._remote.remote(self._load)
        call, _ = one
        error = Error(ErrorCode.CLIENT_APP_CRASHED, "the worker process died twice")
        return Answer(Message(error, reply_to=call.message), call.context)

    def _pack(self, call: Call) -> _Packed:
        """Take the arrays out of a call and put them into the object store."""
        content = RecordDict(dict(call.message.content.items()))
        places = {}
        for name, record in call.message.content.array_records.items():
            key = _key(record)
            if key not in self._versions:
                # Holding the bytes keeps their identities from being given to others.
                owned = [array.data for array in record.values()]
                self._versions[key] = self._ray.put(record), owned
            places[name] = self._versions[key][0]
            content[name] = ArrayRecord()
        return Call(with_content(call.message, content), call.context, call.seed), places

    def _forget_but(self, used: set[tuple[int, ...]]) -> None:
        for key in [key for key in self._versions if key not in used]:
            del self._versions[key]


class _Actor:
    def __init__(self, load: Callable[[], ClientApp]) -> None:
        quick_arrays.install()
        self._app = load()
        torch = imported_torch()
        if torch is not None:
            torch.set_num_threads(1)

    def run(
        self, calls: list[Call], names: list[list[tuple[str, int]]], *records: ArrayRecord
    ) -> list[Answer]:
        """Answer some calls, whose arrays come as arguments so that Ray fetches each one once."""
        answers = []
        with quick_manual_seed():
            for call, places in zip(calls, names, strict=True):
                content = call.message.content
                for name, place in places:
                    content[name] = records[place]
                with identity(call.message.metadata.run_id):
                    message = with_content(call.message, own_copy(content))
                    answers.append(answer(self._app, Call(message, call.context, call.seed)))
        return answers


def _flat(share: list[_Packed]) -> tuple[Any, ...]:
    """Return the arguments of an actor's `run`: only top-level arguments are fetched by Ray."""
    places: dict[Any, int] = {}
    names = [
        [(name, places.setdefault(ref, len(places))) for name, ref in refs.items()]
        for _, refs in share
    ]
    return ([call for call, _ in share], names, *places)


def _key(record: ArrayRecord) -> tuple[int, ...]:
    return tuple(id(array.data) for array in record.values())


def _keys(call: Call) -> list[tuple[int, ...]]:
    return [_key(record) for record in call.message.content.array_records.values()]
