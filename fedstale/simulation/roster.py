"""Keeps the ClientManager of Flower's older API in step with who is online.

Flower does this in a thread that looks every five wall seconds; here the list is brought up to date
whenever somebody reads it, and whoever waits for clients waits on the virtual clock.
"""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from flwr.server import ClientManager
from flwr.server.compat.grid_client_proxy import GridClientProxy

from fedstale.simulation.trace_grid import TraceGrid

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0  # as Flower's own thread does
_PATIENCE_S = 86_400  # of Flower's own wait_for


class Roster:
    """Keeps a ClientManager in step with who is online, whenever it is read."""

    def __init__(self, grid: TraceGrid, manager: ClientManager) -> None:
        """Take over the methods of one manager that need to know who is online.

        Args:
            grid: knows who is online, and the time.
            manager: where proxies of the online nodes are registered, in the order of their ids.
        """
        self._grid, self._manager = grid, manager
        self._count = manager.num_available
        self._registered: dict[int, GridClientProxy] = {}
        self.shortage = ""
        """The last wait that was in vain, in words."""
        for name in ("num_available", "all", "sample"):
            setattr(manager, name, self._updating(getattr(manager, name)))
        manager.wait_for = self._wait_for  # type: ignore[method-assign]

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
                proxy = GridClientProxy(node_id, self._grid, self._grid.run.run_id)
                self._manager.register(proxy)
                self._registered[node_id] = proxy

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
            self._grid.sleep(min(_LOOK_EVERY_S, begin + timeout - self._grid.now()))
        self.shortage = (
            f"waited {timeout:,.0f} s of virtual time for {num_clients} clients, but at most "
            f"{most} were online at once: let the strategy wait for fewer, or use more devices"
        )
        logger.warning("%s", self.shortage)
        return False
