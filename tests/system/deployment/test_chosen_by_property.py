"""Real nodes are chosen by what their node config says, and a name that none states is found."""

import pytest
from small_deployment import CLIENT, SERVER, means, write_app

from fedstale.deployment.check import check_app
from fedstale.deployment.local import LocalDeployment, run_app
from fedstale.simulation import FlowerApp

CHOOSING = SERVER.replace(
    "strategy = GapAware(1, schedule=replace(schedule, recheck_s=1.0), seed=1)",
    """strategy = FedBuff(
            1,
            1,
            selector=Filtered("region == 'eu' and ram >= 4"),
            stages=[ForecastRequest()],
        )""",
).replace(
    "from fedstale.strategies import GapAware",
    "from fedstale.contrib.selectors import Filtered\n"
    "from fedstale.strategies import FedBuff, ForecastRequest",
)
STATING = CLIENT.replace(
    "app = ClientApp()",
    "from fedstale.client import ForecastMod\n"
    "app = ForecastMod(properties=['region', 'ram']).client_app()",
)


@pytest.mark.deployment
@pytest.mark.slow
def test_the_one_node_that_fits_makes_every_version(tmp_path):
    app, lines = write_app(tmp_path / "app", server=CHOOSING, client=STATING), []
    assert not [found for found in check_app(FlowerApp.find(app)) if found.is_fault]
    with LocalDeployment(tmp_path / "up", nodes=1, has_proxy=False) as deployment:
        # The first node says nothing.
        deployment.add_node(1, region="us", ram=8)
        deployment.add_node(2, region="eu", ram=8)
        deployment.add_node(3, region="eu", ram=2)
        deployment.wait_online()
        run_app(deployment, app, run_config="strategy='chosen' rounds=3", show=lines.append)
    # Node 2 adds 3 to each version.
    assert means(lines) == {0: 0.0, 1: 3.0, 2: 6.0, 3: 9.0}


def test_a_wrong_name_is_found_before_anything_is_deployed(tmp_path):
    wrong = CHOOSING.replace("region ==", "regoin ==")
    app = write_app(tmp_path / "app", server=wrong, client=STATING)
    (fault,) = [found.text for found in check_app(FlowerApp.find(app)) if found.is_fault]
    assert "chooses devices by 'regoin', which none of them states; stated: ram, region," in fault
