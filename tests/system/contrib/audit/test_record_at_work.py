"""A record of picks on real SuperNodes, through a run that is taken up in another folder."""

import json

import pytest

from fedstale.app_folder import BUILT_IN
from fedstale.contrib.audit import verify
from fedstale.contrib.audit.record import RECORD
from fedstale.deployment.local import LocalDeployment, run_app
from fedstale.reports.run import Run

pytestmark = [pytest.mark.deployment, pytest.mark.slow]


def test_the_record_of_a_deployed_run_goes_on_in_a_new_run_and_holds(tmp_path):
    kept, first, second = (tmp_path / name for name in ("kept", "first", "second"))
    common = (
        "strategy='FedBuff(2, 1, selector=Oort(), stages=[ForecastRequest(), AuditRecord()])' "
        f"forecasts=true checkpoints='{kept}'"
    )
    with LocalDeployment(tmp_path / "deployment", nodes=3, limit_s=300.0) as deployment:
        for rounds, folder in ((3, first), (6, second)):
            resume = f"resume='{kept}'" if folder == second else ""
            config = f"{common} num-server-rounds={rounds} run-folder='{folder}' {resume}"
            run_app(deployment, BUILT_IN / "digits", run_config=config, show=lambda line: None)
    for folder in (first, second):
        found = Run(folder)
        lines = (folder / RECORD).read_bytes().splitlines()
        assert found.summary["record"]["lines"] == json.loads(lines[-1])["n"]
        assert "heard" in {json.loads(line)["kind"] for line in lines}
    checked = verify(first)
    assert checked.holds, checked.faults
    assert verify(second).faults
    checked = verify([first, second])
    assert checked.holds, checked.faults
    assert checked.repeated == checked.picks >= 6
    assert checked.head == Run(second).summary["record"]["head"]
