"""A deployment that tests share which leave it as it is, except for nodes of their own."""

import pytest

from fedstale.deployment.local import local_deployment


@pytest.fixture(scope="session")
def deployment(tmp_path_factory):
    """Start a SuperLink and three SuperNodes once: the tests of this folder share a process."""
    folder = tmp_path_factory.mktemp("flower")
    with local_deployment(folder / "deployment", nodes=3) as deployment:
        yield deployment
