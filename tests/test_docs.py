"""Every docstring example runs and prints what it says."""

import doctest
import importlib
import pkgutil

import pytest

PACKAGES = ("fedstale", "fedstale.traces", "fedstale.strategies", "fedstale.agents")


def modules():
    for package in PACKAGES:
        root = importlib.import_module(package)
        yield package
        for found in pkgutil.walk_packages(root.__path__, package + "."):
            # The built-in apps are directories of Flower, not modules of this package.
            if not found.name.startswith("fedstale.apps.") and not found.name.endswith("__main__"):
                yield found.name


@pytest.mark.parametrize("name", sorted(set(modules())))
def test_the_examples_in_docstrings_hold(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
