"""Stock strategies on devices composed from published recordings."""

import time

import pandas as pd
import pytest
from places import RECORDINGS
from published_phones import phones_of
from small_app import write_small_app

from fedstale.config import SimulationConfig
from fedstale.simulation.run import simulate

pytestmark = pytest.mark.skipif(
    not RECORDINGS.is_dir(), reason="the published recordings are not in ../shared/traces"
)


@pytest.fixture(scope="module")
def phones():
    return phones_of(200, seed=1)


@pytest.mark.parametrize("strategy", ["FedAvg", "FedAdam", "FedProx", "FedMedian", "Krum"])
def test_stock_strategies_run_on_real_phones_and_show_who_was_late_or_lost(
    phones, tmp_path, strategy
):
    config = SimulationConfig(
        app=str(write_small_app(tmp_path / "app")),
        traces="composed",
        until="2d",
        run_config={"strategy": strategy, "rounds": 40, "min-available": 5},
        # Two minutes of work and a model of 20 MB.
        costs={"work-per-example": 5.0, "model-bytes": 20_000_000},
    )
    started = time.perf_counter()
    result = simulate(config, tmp_path / "run", traces=phones)
    wall_s = time.perf_counter() - started
    assert result.status in ("finished", "stopped"), result.reason
    assert result.summary["virtual_s"] / wall_s > 1000
    events = pd.read_parquet(result.folder / "events.parquet")
    counts = events["status"].value_counts()
    assert counts["interrupted"] > 0
    assert counts["reported"] > 50
    assert events["reason"].str.contains("went offline while training").any()
    metrics = pd.read_parquet(result.folder / "metrics.parquet")
    loss = metrics.query("source == 'server' and name == 'loss'")["value"]
    assert loss.iloc[-1] < loss.iloc[0]
    assert metrics["time_s"].is_monotonic_increasing
