"""Recorded runs that many tests read."""

import pytest
from buffered_app import buffered
from interruptions import every_version_kept, no_pages
from made_record import run

from fedstale.contrib.audit import Probing
from fedstale.strategies.selection import ExpectedUtility

__all__ = ["buffered", "every_version_kept", "no_pages"]


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """Return a run whose selector is of two, and uses losses, examples and forecasts."""
    return run(tmp_path_factory.mktemp("record") / "run", Probing(ExpectedUtility(), 0.2))


@pytest.fixture(scope="session")
def shortly_recorded(tmp_path_factory):
    """Return the beginning of it, as a run of its own."""
    selector = Probing(ExpectedUtility(), 0.2)
    return run(tmp_path_factory.mktemp("record") / "short", selector, until="6 rounds")
