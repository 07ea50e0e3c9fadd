"""One real device that sends far too much, or numbers that are far too large: the run goes on."""

import pytest
from small_deployment import CLIENT, PYPROJECT, SERVER, means, write_app

from fedstale.deployment.local import run_app

pytestmark = pytest.mark.deployment

BAD = {
    "list": "content['more'] = ConfigRecord({'list': [0.5] * 10**6})",
    "huge": "content['arrays'] = ArrayRecord({'w': Array(np.full_like(w, 3.4e38))})",
}


@pytest.mark.parametrize("way", BAD)
def test_a_hostile_device_is_named_and_the_others_make_every_version(way, deployment, tmp_path):
    reply = "    return Message(content, reply_to=message)"
    bad = f"    if context.node_config['partition-id'] == 0:\n        {BAD[way]}\n"
    client = CLIENT.replace(reply, bad + reply).replace(
        "ArrayRecord, M", "ArrayRecord, ConfigRecord, M"
    )
    app = write_app(
        tmp_path / "adder", PYPROJECT, SERVER.replace("timeout=200.0", "timeout=60.0"), client
    )
    config = "strategy='gap-aware' rounds=5"
    lines = []
    run_app(deployment, app, run_config=config, show=lines.append)
    found = means(lines)
    assert set(found) == set(range(6)), lines
    # The others add 2 and 3, less where they are stale; this one adds more than there are numbers.
    assert all(0.5 < found[k + 1] - found[k] <= 3.0 for k in range(5)), found
    node = deployment.node_ids[0]
    if way == "list":
        said = f"node {node}: refused: record-bytes = 1000000: got "
        assert said in deployment.log("superlink").read_text(errors="replace")
    else:
        assert any(f"node {node}: reply rejected: the norm" in line for line in lines), lines
    assert deployment.control.nodes()[node] == "online"
    if way == "huge":
        return
    # A SuperNode whose reply was refused goes on, and is honest in the next run.
    lines = []
    honest = write_app(tmp_path / "honest" / "adder")
    run_app(deployment, honest, run_config="strategy='fedavg' rounds=1", show=lines.append)
    assert means(lines)[1] == pytest.approx(2.0), lines
