"""Clients in the actors of a Ray cluster: the way beyond one machine.

Each set of arrays goes into Ray's object store once, and a message names it. An actor loads the app
once; app and fedstale must be installed, or be at the same path, on every machine of the cluster.
"""

from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp

from fedstale.errors import ConfigError
from fedstale.simulation.executors.base import (
    ClientCall,
    ClientReply,
    ClientWorker,
    Executor,
    died_twice,
    version_of,
    without_arrays,
)
from fedstale.simulation.replayed import pack

_Packed = tuple[ClientCall, dict[str, Any]]


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

    def run(self, calls: Sequence[ClientCall]) -> list[ClientReply]:
        """Return the replies in the order of the calls.

        The jobs of an actor that dies run once more, one at a time; one whose actor dies again gets
        an error reply.
        """
        records = [r for call in calls for r in call.message.content.array_records.values()]
        self._forget_but({version_of(record) for record in records})
        pack(call.context for call in calls)
        packed = [self._pack(call) for call in calls]
        shares = [packed[i :: self._workers] for i in range(self._workers)]
        pairs = zip(self._actors, shares, strict=True)
        sent = [actor.run.remote(*_flat(share)) if share else None for actor, share in pairs]
        replies: list[ClientReply | None] = [None] * len(calls)
        for i, (share, future) in enumerate(zip(shares, sent, strict=True)):
            if share:
                replies[i :: self._workers] = self._result(i, share, future)
        return [one for one in replies if one is not None]

    def __exit__(self, *problem: object) -> None:
        """Stop the actors, and the cluster if it was started here."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._leave()

    def _leave(self) -> None:
        if self._is_ours:
            self._ray.shutdown()

    def _n_workers(self, gpus: float | None) -> int:
        resources = self._ray.cluster_resources()
        cores = int(resources["CPU"])
        return min(cores, int(resources.get("GPU", 0.0) / gpus)) or 1 if gpus else cores

    def _check_gpus(self, gpus: float | None) -> None:
        # Ray waits without end for an actor that needs more than the cluster has.
        gpus_found = self._ray.cluster_resources().get("GPU", 0.0)
        if (gpus or 0) * self._workers > gpus_found:
            raise ConfigError(
                f"gpus = {gpus} for each of {self._workers} Ray actors: the cluster has "
                f"{gpus_found:g}; ask for a smaller share or for fewer workers"
            )

    @property
    def description(self) -> str:
        """What runs the clients, in words."""
        return f"{self._workers} Ray actors"

    def _result(self, i: int, share: list[_Packed], future: Any) -> list[ClientReply]:  # noqa: ANN401
        try:
            replies: list[ClientReply] = self._ray.get(future)
            return replies
        except self._ray.exceptions.RayActorError:
            self._actors[i] = self._remote.remote(self._load)
        return [self._second_try(i, one) for one in share]

    def _second_try(self, i: int, one: _Packed) -> ClientReply:
        try:
            first: ClientReply = self._ray.get(self._actors[i].run.remote(*_flat([one])))[0]
            return first
        except self._ray.exceptions.RayActorError:
            self._actors[i] = self._remote.remote(self._load)
        return died_twice(one[0])

    def _pack(self, call: ClientCall) -> _Packed:
        """Take the arrays out of a call and put them into the object store."""
        places = {}
        for name, record in call.message.content.array_records.items():
            key = version_of(record)
            if key not in self._versions:
                # Holding the bytes keeps their identities from being given to others.
                owned = [array.data for array in record.values()]
                self._versions[key] = self._ray.put(record), owned
            places[name] = self._versions[key][0]
        return without_arrays(call), places

    def _forget_but(self, used: set[tuple[int, ...]]) -> None:
        for key in [key for key in self._versions if key not in used]:
            del self._versions[key]


class _Actor:
    def __init__(self, load: Callable[[], ClientApp]) -> None:
        self._worker = ClientWorker(load)

    def run(
        self, calls: list[ClientCall], names: list[list[tuple[str, int]]], *records: ArrayRecord
    ) -> list[ClientReply]:
        """Run some calls, whose arrays come as arguments so that Ray fetches each one once."""
        arrays = [{name: records[place] for name, place in places} for places in names]
        return self._worker.run(calls, arrays)


def _flat(share: list[_Packed]) -> tuple[Any, ...]:
    """Return the arguments of an actor's `run`: only top-level arguments are fetched by Ray."""
    places: dict[Any, int] = {}
    names = [
        [(name, places.setdefault(ref, len(places))) for name, ref in refs.items()]
        for _, refs in share
    ]
    return ([call for call, _ in share], names, *places)
