"""The levels of a run on its page and in its summary, and nothing of them where it had none."""

import json

import pandas as pd
import pytest
from made_run import job, table_of
from made_run import write_run as made

from fedstale.config import SimulationConfig
from fedstale.reports import costs
from fedstale.reports.run import Run
from fedstale.simulation.run import simulate
from fedstale.strategies.server.runtime import REPORTED
from fedstale.traces import TraceSet

IDS = pd.Index(["a", "b"])


def jobs(*levels_of_each):
    """Return the events of jobs of 1 MB each way and 60 s of training, by device and level."""
    rows = [
        job(i, device=device, status=REPORTED, sent_at=100.0 * i, **level)
        for i, (device, level) in enumerate(levels_of_each)
    ]
    return table_of(rows, IDS)


def test_a_run_without_formats_and_shares_has_no_levels(tmp_path):
    assert costs.levels(jobs((0, {}), (1, {}))) == {}
    run = Run(made(tmp_path / "run"))
    assert costs.level_figures(run) == []
    page = run.report().read_text()
    assert "Bytes by format" not in page


def test_the_summary_counts_bytes_by_format_and_jobs_by_share():
    events = jobs(
        (0, {"format_up": "int4", "work_share": 0.5}),
        (0, {"format_up": "int4", "format_down": "int8", "work_share": 1.0}),
        (1, {"work_share": 0.5, "compute_s": float("nan")}),
        (1, {"kind": "evaluate", "format_up": "", "downloaded_bytes": 1e9}),
    )
    found = costs.levels(events)
    assert found == {
        "formats": {
            "down": {"in full": {"jobs": 2, "bytes": 2e6}, "int8": {"jobs": 1, "bytes": 1e6}},
            "up": {"in full": {"jobs": 1, "bytes": 1e6}, "int4": {"jobs": 2, "bytes": 2e6}},
        },
        "work_shares": {
            "0.5": {"jobs": 2, "compute_s": None},
            "1": {"jobs": 1, "compute_s": 60.0},
        },
    }
    assert list(found["formats"]["down"]) == ["in full", "int8"]
    json.dumps(found, allow_nan=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of digits with formats and shares by forecast."""
    config = SimulationConfig(
        app="digits",
        traces="synthetic:20",
        run_config={
            "strategy": (
                "FedBuff(6, 3, stages=[Compression('int4', down='int8'), LocalWork(within_s=120), "
                "ForecastRequest()])"
            ),
            "num-server-rounds": 6,
            "forecasts": True,
        },
    )
    traces = TraceSet.synthetic(20, days=7, seed=0)
    return simulate(config, tmp_path_factory.mktemp("levels") / "run", traces=traces)


def test_figures_hold_every_training_job_once(run):
    formats, shares = costs.level_figures(run)
    trainings = run.jobs[run.jobs["kind"].str.startswith("train")]
    n = sum(x or 0.0 for trace in shares.traces for x in trace["x"])
    assert n == len(trainings)
    assert shares.rows[-1][-1] == f"{len(trainings):,.4g}"
    moved = float(trainings["moved_bytes"].sum())
    assert formats.rows[-1][-1] == f"{moved / 1e6:,.4g}"
