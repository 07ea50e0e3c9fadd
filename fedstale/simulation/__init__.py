"""Any Flower app, replayed on device traces with a virtual clock."""

from typing import TYPE_CHECKING

from fedstale.config import Costs
from fedstale.errors import RunEnded
from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.simulation.costs import (
        CostModel,
        WorkHook,
        missing_costs,
        missing_text,
    )
    from fedstale.simulation.devices import FIRST_NODE_ID, Devices
    from fedstale.simulation.dry_runs import dry_run
    from fedstale.simulation.executors import (
        ClientReply,
        Executor,
        InlineExecutor,
        ProcessExecutor,
    )
    from fedstale.simulation.flower_app import FlowerApp, changed, overrides_in
    from fedstale.simulation.jobs import Columns, JobRow, JobTable, RunsAfter
    from fedstale.simulation.measuring import measure, pasted
    from fedstale.simulation.metrics import MessageRounds, RunMetrics, end_of_app, ending, write_run
    from fedstale.simulation.nodes import enrolled, node_configs
    from fedstale.simulation.run import simulate
    from fedstale.simulation.trace_grid import TraceGrid
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = [
    "FIRST_NODE_ID",
    "ClientReply",
    "Columns",
    "CostModel",
    "Costs",
    "Devices",
    "Executor",
    "FlowerApp",
    "InlineExecutor",
    "JobRow",
    "JobTable",
    "MessageRounds",
    "ProcessExecutor",
    "RunEnded",
    "RunMetrics",
    "RunsAfter",
    "TraceGrid",
    "WorkHook",
    "changed",
    "dry_run",
    "end_of_app",
    "ending",
    "enrolled",
    "measure",
    "missing_costs",
    "missing_text",
    "node_configs",
    "overrides_in",
    "pasted",
    "simulate",
    "write_run",
]
