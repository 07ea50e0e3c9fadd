"""Variants of a simulation compared over seeds: planned, run, measured and judged."""

from fedstale.comparison.analysis import Comparison, Variant, analyse, finished, grouped, printable
from fedstale.comparison.page import PAGE, as_json, check_free, write
from fedstale.comparison.plan import (
    Plan,
    PlannedRun,
    RunJob,
    TracesOf,
    Watch,
    check_target,
    run_all,
    run_pool,
    seeds_in,
    state_of,
)
from fedstale.comparison.statistics import LEAST, Estimate, difference

__all__ = [
    "LEAST",
    "PAGE",
    "Comparison",
    "Estimate",
    "Plan",
    "PlannedRun",
    "RunJob",
    "TracesOf",
    "Variant",
    "Watch",
    "analyse",
    "as_json",
    "check_free",
    "check_target",
    "difference",
    "finished",
    "grouped",
    "printable",
    "run_all",
    "run_pool",
    "seeds_in",
    "state_of",
    "write",
]
