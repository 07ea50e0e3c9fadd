"""Variants of a simulation compared over seeds: planned, run, measured and judged."""

from typing import TYPE_CHECKING

from fedstale.comparison.analysis import Comparison, Variant, analyse, finished, grouped
from fedstale.comparison.page import PAGE, as_json, check_free, write
from fedstale.comparison.plan import (
    Plan,
    PlannedRun,
    RunJob,
    Watch,
    check_target,
    run_all,
    seeds_in,
    state_of,
)
from fedstale.comparison.statistics import LEAST, Estimate, difference
from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.comparison.cluster_pool import ClusterPool, bundles_of
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = [
    "LEAST",
    "PAGE",
    "ClusterPool",
    "Comparison",
    "Estimate",
    "Plan",
    "PlannedRun",
    "RunJob",
    "Variant",
    "Watch",
    "analyse",
    "as_json",
    "bundles_of",
    "check_free",
    "check_target",
    "difference",
    "finished",
    "grouped",
    "run_all",
    "seeds_in",
    "state_of",
    "write",
]
