"""A deployment that tests share which leave it as it is, except for nodes of their own."""

from contextlib import ExitStack

import pytest

from fedstale.deployment.local import LocalDeployment


def shares(item):
    return "deployment" in getattr(item, "fixturenames", ())


def pytest_collection_modifyitems(items):
    """Let the tests that share a deployment follow one another, before others of this folder."""
    places = [i for i, item in enumerate(items) if "/deployment/" in item.nodeid]
    ours = sorted((items[i] for i in places), key=lambda item: not shares(item))
    for i, item in zip(places, ours, strict=True):
        items[i] = item


@pytest.fixture(scope="session")
def started():
    """Return what holds the deployment once it is started."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def deployment(started, tmp_path_factory):
    """Start a SuperLink and three SuperNodes, for all tests of a process."""
    folder = tmp_path_factory.mktemp("flower") / "deployment"
    return started.enter_context(LocalDeployment(folder, nodes=3))


@pytest.fixture(autouse=True)
def _end_with_the_last(request):
    """End the deployment after the last test that shares it, since it takes time of a core."""
    items, item = request.session.items, request.node
    is_last = shares(item) and not any(map(shares, items[items.index(item) + 1 :]))
    stack = request.getfixturevalue("started") if is_last else ExitStack()
    yield
    stack.close()
