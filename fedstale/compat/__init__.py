"""What lets other people's server code run on a virtual clock, in this process.

A ServerApp reads the time, sleeps, and starts threads that wait for each other: all of that means
the virtual clock of its grid, for as long as the app runs. See docs/flower-apps.md for what holds.
"""

from fedstale.compat.callers import is_of_app
from fedstale.compat.replacing import replaced, wrapped
from fedstale.compat.start_date import free_start
from fedstale.compat.threads import ServerThreads
from fedstale.compat.virtual_time import VirtualTime, importing

__all__ = [
    "ServerThreads",
    "VirtualTime",
    "free_start",
    "importing",
    "is_of_app",
    "replaced",
    "wrapped",
]
