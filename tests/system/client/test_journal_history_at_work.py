"""A device that forecasts from the journal of a recorder that is a process of its own."""

import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from bench_device import Bench, context
from flwr.app import RecordDict

from fedstale.client import ForecastMod
from fedstale.client.device import MessageHistory

MIDNIGHT = 1_700_006_400.0  # 2023-11-15, a Wednesday, UTC


RECORDER = """
import sys, time
from pathlib import Path
from fedstale.traces.recording.journal import Journal, RecordingRun
from fedstale.traces.recording.monitor import Reading

about = RecordingRun(device_id="phone", interval_s=60.0, utc_offset_s=0.0)
with Journal(Path(sys.argv[1]), about, max_bytes=10**7) as journal:
    for k in range(10**6):
        reading = Reading(instant=float(sys.argv[2]) + 60.0 * k, online=True, processor_left=0.5)
        journal.append(reading, 60.0 * k)
        print(k, flush=True)
        time.sleep(0.001)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_a_device_forecasts_while_its_recorder_writes_and_after_that_was_killed(tmp_path, caplog):
    command = [sys.executable, "-W", "ignore", "-c", RECORDER, str(tmp_path / "j"), str(MIDNIGHT)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    bench, ages = Bench(ForecastMod(), node_config={"journal": str(tmp_path / "j")}), []
    here = context()
    here.node_config = bench.node_config
    journal = bench.mod._journal(here)
    try:
        for _ in range(10):
            k = [int(process.stdout.readline()) for _ in range(20)][-1]
            bench.wall = MIDNIGHT + 60.0 * k + 1.0
            assert "error" not in bench.ask()
            now = np.array([bench.wall])
            seen = journal.observation(MessageHistory(), now, 0.0, RecordDict())
            ages.append(seen.own.age_s[0])
            assert ages[-1] == pytest.approx(60.0 * k + 1.0)
    finally:
        process.send_signal(signal.SIGKILL)
        said, _ = process.communicate()
    last = int(re.findall(r"^\d+$", said, flags=re.MULTILINE)[-1]) if said else k
    bench.wall = MIDNIGHT + 60.0 * last + 1.0
    assert "error" not in bench.ask()
    seen = journal.observation(MessageHistory(), np.array([bench.wall]), 0.0, RecordDict())
    assert seen.own.age_s[0] == pytest.approx(60.0 * last + 1.0)
    assert caplog.text == ""
