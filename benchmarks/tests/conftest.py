"""Puts the benchmarks and the scripts of docs/ within reach of the tests of what they publish."""

import sys

from places import ROOT
from small_scenarios import busy, scenario

__all__ = ["busy", "scenario"]
pytest_plugins = ["suites"]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs")]
