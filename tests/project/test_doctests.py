"""Every example in a docstring runs, and prints what it says."""

import doctest
import importlib
import pkgutil
from importlib.util import find_spec
from pathlib import Path

import pytest

import fedstale


def modules_with_examples():
    """Names of the modules that show examples; those of others are not imported."""
    for found in pkgutil.walk_packages(fedstale.__path__, "fedstale."):
        if ">>>" in Path(find_spec(found.name).origin).read_text(encoding="utf-8"):
            yield found.name


@pytest.mark.parametrize("name", list(modules_with_examples()))
def test_the_examples_in_docstrings_hold(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_there_are_examples_in_all_four_packages():
    found = list(modules_with_examples())
    assert len(found) > 60
    assert {"fedstale.traces", "fedstale.strategies", "fedstale.agents"} <= {
        ".".join(name.split(".")[:2]) for name in found
    }
