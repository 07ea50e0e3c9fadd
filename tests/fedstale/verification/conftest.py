"""One recorded run that many tests read."""

import pytest
from made_record import run

from fedstale.strategies.selection import ExpectedUtility, Probing


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """Return a run whose selector is of two, and uses losses, examples and forecasts."""
    return run(tmp_path_factory.mktemp("record") / "run", Probing(ExpectedUtility(), 0.2))
