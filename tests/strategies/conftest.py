"""What the tests of strategies share: `virtual_grid` is importable from the folders below."""

import pytest
from virtual_grid import identity


@pytest.fixture
def _identity():
    """Let the test create messages."""
    with identity():
        yield
