"""Any Flower app, replayed on device traces with a virtual clock."""

from fedstale.config import Costs
from fedstale.errors import RunEnded
from fedstale.simulation.executors import Executor, InlineExecutor, ProcessExecutor
from fedstale.simulation.trace_grid import TraceGrid

__all__ = ["Costs", "Executor", "InlineExecutor", "ProcessExecutor", "RunEnded", "TraceGrid"]
