"""What lets other people's server code run on a virtual clock, in this process.

A ServerApp reads the time, sleeps, and starts threads that wait for each other: all of that means
the virtual clock of its grid, for as long as the app runs. Flower's strategies are heard, and apps
of its older API run on one thread. See docs/flower-apps.md for what holds.
"""

from typing import TYPE_CHECKING

from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.compat.callers import is_of_app, wrapped
    from fedstale.compat.older_api import server_fn_on
    from fedstale.compat.replacement import Replacement
    from fedstale.compat.stock_strategies import (
        report_stock_strategies,
        stock_strategies_reporting,
    )
    from fedstale.compat.threads import ServerThreads
    from fedstale.compat.virtual_time import VirtualTime, free_start, importing
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = [
    "Replacement",
    "ServerThreads",
    "VirtualTime",
    "free_start",
    "importing",
    "is_of_app",
    "report_stock_strategies",
    "server_fn_on",
    "stock_strategies_reporting",
    "wrapped",
]
