"""A trace acted by real processes, against the simulation of it."""

import numpy as np
import pandas as pd
import pytest

from fedstale.config import FLOWER_OVERHEAD
from fedstale.reports.run import Run
from fedstale.traces import TraceSet
from fidelity.run import compare, measure, order
from lab.results import read_result


def test_what_is_measured_is_within_a_twentieth_of_a_round_and_is_what_simulations_charge():
    (found,) = read_result("fidelity")["rows"]
    assert found["same_status"] == found["same_aggregated_version"] == 1.0
    for name in ("duration", "reported_at", "delivered_at", "downloaded_at"):
        assert found[name]["p90_rounds"] < 0.05, name
    measured = [found["overhead"][name] for name in ("median_there_s", "median_back_s")]
    assert [*FLOWER_OVERHEAD.values()] == [round(seconds, 1) for seconds in measured]


@pytest.mark.deployment
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_real_processes_follow_the_simulation(tmp_path):
    found = measure(tmp_path, nodes=3, speed_up=4.0, versions=3)
    # What Flower needs depends on the machine; that jobs take the trace's time does not.
    assert found["jobs"]["matched"] >= 6
    assert found["duration"]["median_rounds"] < 0.25, found
    assert found["merge_order"] > 0.8, found
    assert found["same_status"] > 0.7, found
    record = Run(tmp_path / "deployment" / "run")
    assert record.summary["status"] == "finished"
    assert record.summary["speed_up"] == 4.0
    assert record.summary["epoch"] == TraceSet.load("synthetic:3@desktops", seed=11).epoch
    assert (tmp_path / "deployment" / "run" / "report.html").is_file()


def timeline(late_s=0.0, merged=(1, 1, 2, 2), status="reported"):
    sent = np.array([0.0, 0.0, 100.0, 110.0])
    return pd.DataFrame(
        {
            "device_id": ["a", "b", "a", "b"],
            "sent_at": sent,
            "downloaded_at": sent + 1.0,
            "reported_at": sent + 50.0 + late_s,
            "delivered_at": sent + 50.0 + late_s,
            "aggregated_version": merged,
            "base_version": [0, 0, 1, 1],
            "staleness": [0.0, 0.0, 0.0, np.nan],
            "status": status,
        }
    )


def test_errors_are_counted_in_seconds_and_rounds_and_merges_in_pairs():
    other = timeline(late_s=11.0, merged=(2, 1, 1, 2))
    found = compare(timeline(), other)
    assert found["reported_at"] == {
        "n": 4,
        "median_s": 11.0,
        "p90_s": 11.0,
        "median_rounds": pytest.approx(0.1),
        "p90_rounds": pytest.approx(0.1),
    }
    assert found["sent_at"]["median_s"] == 0.0
    assert found["same_aggregated_version"] == 0.5
    # Of the pairs that both sides merged apart, b before its second job is right, a is not.
    assert found["merge_order"] == 0.5
    assert np.isnan(order(np.array([1.0, 1.0]), np.array([1.0, 2.0])))
