"""What fedstale check finds in the apps that come with fedstale, as they run."""

import pytest
from loopback import Loopback

from fedstale.deployment.check import check_messages
from fedstale.simulation.flower_app import FlowerApp


@pytest.fixture(autouse=True)
def _alone():
    """Connect within this process, where nobody answers."""
    with Loopback().installed():
        yield


@pytest.mark.parametrize("name", ["digits"])
def test_the_built_in_apps_read_their_share(name):
    found = check_messages(FlowerApp.find(name), "strategy='fedbuff' work=0.5 normalise='steps'")
    assert [finding.text for finding in found if "share" in finding.text] == []
