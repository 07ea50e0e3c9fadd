"""Where client code really runs: one contract, and several executors that keep it."""

from fedstale.simulation.executors.base import Answer, Call, Executor
from fedstale.simulation.executors.declaration import Declaration
from fedstale.simulation.executors.inline import InlineExecutor
from fedstale.simulation.executors.processes import ProcessExecutor

__all__ = ["Answer", "Call", "Declaration", "Executor", "InlineExecutor", "ProcessExecutor"]
