"""Where client code really runs: one contract, and several executors that keep it."""

from fedstale.simulation.executors.base import ClientCall, ClientReply, Executor, InlineExecutor
from fedstale.simulation.executors.workers import ProcessExecutor

__all__ = ["ClientCall", "ClientReply", "Executor", "InlineExecutor", "ProcessExecutor"]
