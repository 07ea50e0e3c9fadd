"""The shakespeare app learns from the text that it is made for."""

import pytest
from places import APPS, PLAY

import fedstale


def test_shakespeare_learns_from_its_roles(tmp_path):
    if not PLAY.is_file():
        pytest.skip(f"needs the text {PLAY.name} in ../shared/data")
    run = fedstale.simulate(
        APPS["shakespeare"],
        traces="ideal:100",
        run_config={
            "text": str(PLAY),
            "num-server-rounds": 4,
            "strategy": "flower.FedAvg(fraction_train=0.05, fraction_evaluate=0.0)",
        },
        out=tmp_path / "run",
    )
    seen = run.curve("accuracy", "server")[1]
    assert seen[0] < 0.05
    assert seen[-1] > 0.15
