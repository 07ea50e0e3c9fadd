"""Puts the benchmarks within reach of the tests that measure on real processes as they do."""

import sys

from places import ROOT

sys.path.append(str(ROOT / "benchmarks"))
