"""Puts the benchmarks within reach of tests that measure as they do; begins with deployments."""

import sys

from places import ROOT

sys.path.append(str(ROOT / "benchmarks"))


def pytest_collection_modifyitems(items):
    """Begin with what takes longest: deployments follow one another in one process."""
    items.sort(key=lambda item: "/system/deployment/" not in item.nodeid)
