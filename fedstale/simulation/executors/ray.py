"""Clients in the actors of a Ray cluster: the way beyond one machine.

Each set of arrays goes into Ray's object store once, and a message names it. An actor loads the app
once; app and fedstale must be installed, or be at the same path, on every machine of the cluster.
"""

from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp

from fedstale.errors import ConfigError
from fedstale.simulation.executors.base import ClientCall, ClientReply
from fedstale.simulation.executors.workers import ClientWorker, WorkerExecutor

_Reference = Any  # Ray is an extra, whose types may be missing
_Part = list[tuple[ClientCall, dict[str, _Reference]]]


class RayExecutor(WorkerExecutor[_Reference]):
    """Runs clients in Ray actors; the place of arrays is a reference to Ray's object store."""

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
        super().__init__(workers or self._n_workers(gpus), parts_per_worker=1)
        try:
            self._check_gpus(gpus)
        except ConfigError:
            self._leave()
            raise
        remote = self._ray.remote(num_cpus=1, num_gpus=gpus or 0, max_restarts=0)
        self._remote = remote(_Actor)
        self._actors = [self._remote.remote(load) for _ in range(self._workers)]

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

    def _run_parts(self, parts: Sequence[_Part]) -> list[list[ClientReply] | None]:
        actors = self._actors[: len(parts)]
        sent = [a.run.remote(*_flat(part)) for a, part in zip(actors, parts, strict=True)]
        replies: list[list[ClientReply] | None] = []
        for i, future in enumerate(sent):
            try:
                replies.append(self._ray.get(future))
            except self._ray.exceptions.RayActorError:
                self._actors[i] = self._remote.remote(self._load)
                replies.append(None)
        return replies

    def _put(self, record: ArrayRecord) -> _Reference:
        return self._ray.put(record)

    def _drop(self, place: _Reference) -> None:
        """Let Ray free the arrays, which it does when the last reference is gone."""


class _Actor:
    def __init__(self, load: Callable[[], ClientApp]) -> None:
        self._worker = ClientWorker(load)

    def run(
        self, calls: list[ClientCall], names: list[list[tuple[str, int]]], *records: ArrayRecord
    ) -> list[ClientReply]:
        """Run some calls, whose arrays come as arguments so that Ray fetches each one once."""
        arrays = [{name: records[place] for name, place in places} for places in names]
        return self._worker.run(calls, arrays)


def _flat(part: _Part) -> tuple[Any, ...]:
    """Return the arguments of an actor's `run`: only top-level arguments are fetched by Ray."""
    places: dict[Any, int] = {}
    names = [
        [(name, places.setdefault(ref, len(places))) for name, ref in refs.items()]
        for _, refs in part
    ]
    return ([call for call, _ in part], names, *places)
