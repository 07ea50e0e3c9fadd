"""Federated learning on Flower for devices that go offline, slow down and report late.

Nothing heavy is imported here: importing fedstale.traces runs this file, and a device that only
records and forecasts has neither flwr nor stable-baselines3.
"""

import logging
import sys
from typing import TYPE_CHECKING

from fedstale.lazy import names_of
from fedstale.version import __version__ as __version__

if TYPE_CHECKING:
    from fedstale import agents, client, errors, simulation, strategies, traces
    from fedstale.api import compare, read_run, simulate
    from fedstale.comparison import Comparison, Plan
    from fedstale.reports import Run
else:
    _imported, __dir__ = names_of(__name__)

    def __getattr__(name: str) -> object:
        # Flower sets the level of its logger when it is imported: one that was set before stays.
        flower, is_new = logging.getLogger("flwr"), "flwr" not in sys.modules
        level = flower.level
        value = _imported(name)
        if is_new and level:
            flower.setLevel(level)
        return value


__all__ = [
    "Comparison",
    "Plan",
    "Run",
    "agents",
    "client",
    "compare",
    "errors",
    "read_run",
    "simulate",
    "simulation",
    "strategies",
    "traces",
]
