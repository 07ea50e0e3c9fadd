"""A SuperLink's process: its app, what it has read of a request, its clock and database.

Flower's middleware parses a request once and leaves it in the scope, so whatever stands behind it
reads the same message as Flower's handlers do. All of this was read in Flower 1.41 to 1.43.
"""

import datetime
import logging
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware

from fedstale.flower.features import require

TIMESTAMP, SIGNATURE, PUBLIC_KEY = "flwr-timestamp", "flwr-signature", "flwr-public-key"
"""Headers of a SuperNode's request. What it signs is the time stamp, and nothing else."""


def app_of(arguments: Sequence[str]) -> tuple[FastAPI, Any]:
    """Return the app that flower-superlink serves with some arguments, and what it made of these.

    Args:
        arguments: of flower-superlink, which reads them from `sys.argv`.
    """
    from flwr.superlink.cli.flower_superlink import (
        SuperLinkLifespan,
        _parse_superlink_lifespan_config,
    )
    from flwr.superlink.main import create_app

    sys.argv = ["flower-superlink", *arguments]
    config = _parse_superlink_lifespan_config()
    return create_app(config, SuperLinkLifespan), config


def log_config() -> dict[str, Any]:
    """Return how uvicorn logs, as flower-superlink tells it: no good requests of routine."""
    from flwr.supercore.http_logging import get_uvicorn_log_config

    # Flower's first handler is the console's.
    shown = (handler.level for handler in logging.getLogger("flwr").handlers)
    return get_uvicorn_log_config(next(shown, logging.INFO))


def place(
    app: FastAPI,
    *,
    outside: Sequence[Middleware] = (),
    inside: Sequence[Middleware] = (),
) -> None:
    """Put middleware into a SuperLink's app.

    Args:
        app: whose own two outermost ones hide answers, and make answers of errors.
        outside: directly behind those two.
        inside: behind everything of Flower's.
    """
    ours = app.user_middleware
    kinds: list[object] = [one.cls for one in ours]
    errors = kinds.index(BaseHTTPMiddleware)
    ours[errors + 1 : errors + 1] = outside
    ours += inside


def calls() -> list[tuple[str, str]]:
    """Return method and path of each request that is one message of protobuf, sorted.

    Raises:
        ConfigError: this Flower does not say.
    """
    require("table of calls")
    from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

    return sorted(PROTOBUF_REQUEST_TYPES)


def request_of(scope: MutableMapping[str, Any]) -> tuple[str, Any]:
    r"""Return the name of a request's type, and the request as Flower has parsed it.

    The path does not tell the type: the routes of `/v1/fleet/push-messages` are also those of that
    path with a line break behind it.

    Returns:
        The two; "" and None of a request that is no protobuf.
    """
    request = scope.get("state", {}).get("protobuf_request")
    return "" if request is None else str(request.DESCRIPTOR.name), request


def response_of(scope: MutableMapping[str, Any]) -> Any:
    """Return Flower's last answer, before it is made bytes; None if there is none."""
    return scope.get("state", {}).get("protobuf_response")


def store_of(app: FastAPI) -> tuple[list[int], Callable[[str], bytes]]:
    """Return the ids of all runs in a SuperLink's database, and a reader of its objects by id."""
    state = app.state.linkstate_factory.state()
    return [
        run.run_id for run in state.get_run_info()
    ], lambda object_id: state.object_store.get(object_id) or b""


def object_ids(tree: Any) -> list[str]:
    """Return the ids of the objects that a message consists of, without recursion.

    Example:
        >>> from types import SimpleNamespace
        >>> leaf = SimpleNamespace(object_id="b", children=[])
        >>> object_ids(SimpleNamespace(object_id="a", children=[leaf, leaf]))
        ['a', 'b', 'b']
    """
    found = [tree]
    # The list grows while it is walked.
    for each in found:
        found.extend(each.children)
    return [each.object_id for each in found]


def stamp_window_s() -> tuple[float, float]:
    """Return the limits of a time stamp in s: early, and late in any case.

    It takes one that is late by the first more than that, too.
    """
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

    return SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE


def now() -> datetime.datetime:
    """Return the time that Flower reckons by."""
    from flwr.supercore.date import now as flowers

    return flowers()


def take_turns() -> None:
    """Make the threads of this process use a SuperLink's database one at a time.

    Threads that write at once wait for SQLite's lock, 5 s at most and in no order, and an object
    that is not stored by then Flower answers as one whose upload has lapsed, on which a ServerApp
    ends. In turn they wait for one another as long as it takes; and what cannot be stored all the
    same, since the disk is full, is an error, as anywhere else.
    """
    from flwr.supercore.corestate.sql_corestate import SqlCoreState
    from flwr.supercore.sql_mixin import SqlMixin
    from sqlalchemy.exc import OperationalError

    turn, thread = threading.RLock(), threading.local()
    session, store = SqlMixin.session, SqlCoreState.store_object

    @contextmanager
    @wraps(session)
    def in_turn(state: SqlMixin) -> Iterator[object]:
        with turn:
            try:
                with session(state) as found:
                    yield found
            except OperationalError as problem:
                thread.problem = problem
                raise

    @wraps(store)
    def stored(state: SqlCoreState, *given: Any, **named: Any) -> bool:
        thread.problem = None
        if store(state, *given, **named):
            return True
        if thread.problem is not None:
            raise thread.problem
        return False

    # The first is also that of the database's objects, which no SqlCoreState holds.
    for owner, name, new in (
        (SqlMixin, "session", in_turn),
        (SqlCoreState, "store_object", stored),
    ):
        setattr(owner, name, new)
