"""The app of examples/pools on three real SuperNodes, each with the network of another pool."""

import re

import pytest
from places import ROOT

from fedstale.deployment.local import run_app

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(600)]


def test_pools_train_and_exchange_predictions_on_real_supernodes(deployment):
    lines = []
    config = "strategy='FedAvg(3)' exchange-every=1 num-server-rounds=3 pool-alpha=1.0"
    run_app(deployment, ROOT / "examples" / "pools", run_config=config, show=lines.append)
    text = "\n".join(lines)
    last = re.findall(r"version 3, server: (\{.*?\})", text)
    assert last, text[-3000:]
    for pool in ("small", "wide", "conv"):
        found = [float(x) for x in re.findall(rf"'accuracy_{pool}': ([\d.]+)", text)]
        assert len(found) >= 4, text[-3000:]
        assert found[-1] > found[0] + 0.1
    assert "not those of the server" not in text
