"""Puts the benchmarks and the scripts of docs/ within reach of the tests of what they publish."""

import sys

from places import ROOT

pytest_plugins = ["suites"]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs")]
