"""What executors with worker processes share: how calls are sent, and what happens if one dies.

A model version travels to the workers once, and not once a job: messages of a round hold the same
arrays, so each distinct set of arrays is put where workers find it, and a call names the place.
"""

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.app.error import Error
from flwr.clientapp import ClientApp

from fedstale.simulation import quick_arrays
from fedstale.simulation.compat import ErrorCode, identity, own_copy, with_content
from fedstale.simulation.executors.base import (
    ClientCall,
    ClientReply,
    Executor,
    imported_torch,
    quick_manual_seed,
    run_client,
    version_of,
)
from fedstale.simulation.replayed import pack

Place = TypeVar("Place")
"""Names arrays that workers can fetch."""

VERSIONS_KEPT = 8


class WorkerExecutor(Executor, Generic[Place]):
    """Runs clients in worker processes.

    The calls of a worker that dies run once more, one at a time; one whose worker dies again gets
    an error reply.
    """

    def __init__(self, workers: int, *, parts_per_worker: int) -> None:
        """Start without any arrays put.

        Args:
            workers: number of processes, >= 1.
            parts_per_worker: parts that a worker gets in one run: fewer cost less to send, more
                are shared out more evenly.
        """
        self._workers, self._n_parts = workers, workers * parts_per_worker
        self.batch = workers
        self._places: OrderedDict[tuple[int, ...], tuple[Place, list[bytes]]] = OrderedDict()

    def run(self, calls: Sequence[ClientCall]) -> list[ClientReply]:
        """Return the replies in the order of the calls."""
        self._drop_all_but(VERSIONS_KEPT)
        pack(call.context for call in calls)
        packed = [self._packed(call) for call in calls]
        size = -(-len(calls) // self._n_parts) or 1
        parts = [packed[i : i + size] for i in range(0, len(packed), size)]
        replies: list[ClientReply] = []
        for part, theirs in zip(parts, self._run_parts(parts), strict=True):
            replies += [self._run_again(one) for one in part] if theirs is None else theirs
        return replies

    @abstractmethod
    def _run_parts(
        self, parts: Sequence[list[tuple[ClientCall, dict[str, Place]]]]
    ) -> list[list[ClientReply] | None]:
        """Return the replies of each part; None where a worker died, which has been replaced."""

    @abstractmethod
    def _put(self, record: ArrayRecord) -> Place:
        """Put arrays where workers find them."""

    @abstractmethod
    def _drop(self, place: Place) -> None:
        """Free arrays that were put; no worker is at work."""

    def _run_again(self, one: tuple[ClientCall, dict[str, Place]]) -> ClientReply:
        (replies,) = self._run_parts([[one]])
        if replies is not None:
            return replies[0]
        call, _ = one
        error = Error(ErrorCode.CLIENT_APP_CRASHED, "the worker process died twice")
        return ClientReply(Message(error, reply_to=call.message), call.context)

    def _packed(self, call: ClientCall) -> tuple[ClientCall, dict[str, Place]]:
        """Return a call with empty array records, and the place of each record's arrays."""
        content, places = RecordDict(dict(call.message.content.items())), {}
        for name, record in call.message.content.array_records.items():
            places[name] = self._place_of(record)
            content[name] = ArrayRecord()
        return ClientCall(with_content(call.message, content), call.context, call.seed), places

    def _place_of(self, record: ArrayRecord) -> Place:
        key = version_of(record)
        if key not in self._places:
            # Holding the bytes keeps their identities from being given to others.
            self._places[key] = self._put(record), [array.data for array in record.values()]
        self._places.move_to_end(key)
        return self._places[key][0]

    def _drop_all_but(self, n: int) -> None:
        while len(self._places) > n:
            _, (place, _) = self._places.popitem(last=False)
            self._drop(place)


class ClientWorker:
    """A ClientApp that is loaded once in a process of its own, for the calls that are sent."""

    def __init__(self, load: Callable[[], ClientApp]) -> None:
        quick_arrays.install()
        self._client_app = load()
        torch = imported_torch()
        if torch is not None:
            torch.set_num_threads(1)

    def run(
        self, calls: Sequence[ClientCall], arrays: Sequence[Mapping[str, ArrayRecord]]
    ) -> list[ClientReply]:
        """Return the replies in the order of the calls.

        Args:
            calls: with empty array records.
            arrays: the array records of each call, by name.
        """
        replies = []
        with quick_manual_seed():
            for call, records in zip(calls, arrays, strict=True):
                content = call.message.content
                for name, record in records.items():
                    content[name] = record
                with identity(call.message.metadata.run_id):
                    message = with_content(call.message, own_copy(content))
                    own = ClientCall(message, call.context, call.seed)
                    replies.append(run_client(self._client_app, own))
        return replies
