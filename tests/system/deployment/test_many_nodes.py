"""Many light nodes at one SuperLink; the measurement is `benchmarks/deployment/many_nodes.py`."""

import pytest

from deployment.many_nodes import measured
from fedstale.deployment.local import has_nginx

pytestmark = [
    pytest.mark.deployment,
    pytest.mark.slow,
    pytest.mark.skipif(not has_nginx(), reason="nginx is not installed: apt-get install nginx"),
]


@pytest.mark.timeout(1200)
def test_every_reply_of_thirty_nodes_is_merged_once(tmp_path):
    *_, whole = measured(30, 1, tmp_path)
    assert whole["nodes_heard"] == 30
    assert whole["replies_merged"] >= 30
    assert (whole["lost"], whole["merged_twice"], whole["rejected"]) == (0, 0, 0)
