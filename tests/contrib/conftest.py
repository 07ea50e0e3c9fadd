"""What the tests of the shelf share with those of the core."""

import pytest
from quick_files import tmp_path
from shared_fleets import devices_made_once
from virtual_grid import identity

__all__ = ["devices_made_once", "tmp_path"]


@pytest.fixture
def _identity():
    """Let the test create messages."""
    with identity():
        yield
