"""The owner of a log of a fleet: traces of it, a forecaster, a simulation on it and its report."""

from datetime import datetime, timedelta

import numpy as np
import pytest

from fedstale.reports.run import Run
from fedstale.traces import TraceSet

MOST_STEPS = 12
DEVICES = [f"tablet-{i:02d}" for i in range(12)]


def write_log(path):
    """Write three weeks of tablets that charge at night, as somebody's program might keep them."""
    rng = np.random.default_rng(0)
    rows = []
    for device in DEVICES:
        for day in range(21):
            start = datetime(2024, 5, 6, 21) + timedelta(days=day, hours=rng.normal(0, 1.2))
            end = start + timedelta(hours=max(1.0, rng.normal(8, 1.5)))
            rows.append((start, end, device))
            if day % 5 == 0:
                # A second entry of the same charge.
                rows.append((start + timedelta(minutes=5), end, device))
    lines = [f"{who};{a:%Y-%m-%d %H:%M};{b:%Y-%m-%d %H:%M};ok" for a, b, who in sorted(rows)]
    path.write_text("\n".join(["who;from;to;remark", *lines, ""]), encoding="utf-8")


@pytest.mark.timeout(600)
def test_the_owner_of_a_log_simulates_on_it(journey):
    write_log(journey.folder / "log.csv")
    # The page shows the dialogue of another log: the reader types what the command says.
    said = journey.refused("fedstale traces convert log.csv --out own.parquet")
    journey.run(said.rpartition("type next: ")[2].strip())
    for block in journey.read("docs/traces.md", "A log of your own"):
        for command in block.commands if block.has_commands else ():
            journey.run(command)
    own, fleet = (TraceSet.read(journey.folder / f"{name}.parquet") for name in ("own", "fleet"))
    assert own.known == ("availability",)
    assert sorted(own.device_ids) == sorted(fleet.device_ids) == DEVICES
    assert dict(own.repairs)
    assert len(fleet.known) == 4
    run = Run(journey.folder / "runs" / "digits")
    assert set(run.jobs["device_id"]) <= set(DEVICES)
    assert run.last("server")["accuracy"] > 0.8
    assert "fleet.parquet" in (run.folder / "report.html").read_text(encoding="utf-8")

    journey.follow("docs/forecasting.md", "")
    assert (journey.folder / "backtests" / "mine" / "verdict.csv").is_file()
    journey.end(MOST_STEPS)
