"""Flower's older API: `server_fn`, and the strategies and workflows of `flwr.server`.

It asks every client from a thread of its own, and keeps its list of clients in one more. Here are
its functions that a run on one thread takes over, and how its requests travel in messages. Each
function imports what it needs: an app of the message API never misses these names.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedstale.flower import features

CALLERS = ("flwr.server", "flwr.serverapp")
"""Packages whose modules call the functions of `stand_ins` by names that they have imported."""

_Function = Callable[..., Any]


class Request(NamedTuple):
    """A kind of request to clients, and how both sides travel in a message."""

    kind: str
    """Type of the message."""
    pack: Callable[[Any], RecordDict]
    """Makes the records of a request."""
    unpack: Callable[[RecordDict], Any]
    """Makes the answer of a reply's records."""


def is_older(server: ServerApp) -> bool:
    """Return whether a ServerApp is of the older API: nothing was put under `@app.main()`."""
    return server._main is None


def is_empty(server: ServerApp) -> bool:
    """Return whether a ServerApp holds nothing to run, by either API."""
    parts = (server._main, server._server_fn, server._server, server._config, server._strategy)
    return all(part is None for part in parts)


def is_older_client(client: ClientApp) -> bool:
    """Return whether a ClientApp is of the older API: it was made of a `client_fn`."""
    return client._call is not None


def home_of(server: ServerApp) -> str:
    """Return the name of the module that holds the function of a ServerApp."""
    function = server._main or server._server_fn
    return getattr(function, "__module__", None) or "__main__"


def stand_ins(
    *, run: _Function, update: _Function, ask: _Function
) -> Sequence[tuple[_Function, _Function]]:
    """Return the functions of Flower 1.34 to 1.43 that are taken over, each with its stand-in.

    Args:
        run: for `run_fl`, which lets a server run all its rounds; called with `run_fl` itself, the
            server and its config.
        update: for what starts the thread that updates the list of clients; called with the grid
            and the client manager, and returns a thread, the event that stops it and the event
            that it sets when the list is there.
        ask: for what asks the clients of a round; called with the `Request`, and then as Flower
            calls `fit_clients` and `evaluate_clients`.
    """
    from flwr.compat.common.recorddict_compat import (
        evaluateins_to_recorddict,
        fitins_to_recorddict,
        recorddict_to_evaluateres,
        recorddict_to_fitres,
    )
    from flwr.server.compat.app_utils import start_update_client_manager_thread
    from flwr.server.server import evaluate_clients, fit_clients, run_fl

    # Records share the bytes of the arrays, so keeping the input costs nothing.
    fit = Request(
        "train",
        partial(fitins_to_recorddict, keep_input=True),
        partial(recorddict_to_fitres, keep_input=True),
    )
    evaluate = Request(
        "evaluate", partial(evaluateins_to_recorddict, keep_input=True), recorddict_to_evaluateres
    )
    return (
        (run_fl, partial(run, run_fl)),
        (start_update_client_manager_thread, update),
        (fit_clients, partial(ask, fit)),
        (evaluate_clients, partial(ask, evaluate)),
    )


@contextmanager
def contexts_heard(listener: Callable[[Any], object]) -> Iterator[None]:
    """Pass the `LegacyContext` of every workflow that is made inside to a function."""
    if not features.resolves("flwr.server.compat:LegacyContext"):
        # Then no app has one either.
        yield
        return
    from flwr.server.compat import LegacyContext

    make = LegacyContext.__init__

    def made(self: LegacyContext, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        listener(self)

    LegacyContext.__init__ = made  # type: ignore[method-assign]
    try:
        yield
    finally:
        LegacyContext.__init__ = make  # type: ignore[method-assign]


def client_of(grid: Grid, node_id: int) -> Any:
    """Return a client of the older API that is a node; its calls are messages through the grid."""
    from flwr.server.compat.grid_client_proxy import GridClientProxy

    return GridClientProxy(node_id, grid, grid.run.run_id)


def initial_arrays(client: Any) -> ArrayRecord:
    """Return the arrays that a client of the older API begins with; empty if it has none."""
    from flwr.common import GetParametersIns, parameters_to_ndarrays

    answer = client.get_parameters(GetParametersIns(config={}), timeout=None, group_id=0)
    return ArrayRecord(parameters_to_ndarrays(answer.parameters))


def arrays_of(parameters: Any) -> ArrayRecord | None:
    """Return the arrays of a model; None if it has none: trees, for one, travel as text."""
    from flwr.compat.common.recorddict_compat import parameters_to_arrayrecord

    # Only this kind of tensor has a shape.
    if parameters is None or parameters.tensor_type != "numpy.ndarray":
        return None
    return parameters_to_arrayrecord(parameters, keep_input=True)
