"""Any Flower app, replayed on device traces with a virtual clock."""

from fedstale.simulation.clock import RunEnded
from fedstale.simulation.costs import Costs
from fedstale.simulation.executors import Executor, InlineExecutor, ProcessExecutor
from fedstale.simulation.trace_grid import TraceGrid

__all__ = ["Costs", "Executor", "InlineExecutor", "ProcessExecutor", "RunEnded", "TraceGrid"]
