"""Nodes are chosen in the clean hours of their region, and not for ever held back."""

import logging

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from known_nodes import RNG

import fedstale
from fedstale.client import ForecastMod
from fedstale.contrib.energy import Fleet, Intensity, LowCarbon, with_carbon, with_energy
from fedstale.errors import ConfigError
from fedstale.strategies.selection import LeastRecent
from fedstale.strategies.types import Candidates
from fedstale.traces import TraceSet

HOUR_S = 3600.0
FOUR = Candidates.of(
    [7, 8, 9, 10], properties=[{"region": "eu"}, {"region": "us"}, {}, {"region": "mars"}]
)


def grid(tmp_path, *, days=2):
    """Write intensities of two regions, the first clean at 0 to 8 h, the second at 12 to 20 h."""
    lines = []
    for hour in range(24 * days):
        lines.append(f"{hour * 3600},eu,{100 if hour % 24 < 8 else 400}")
        lines.append(f"{hour * 3600},us,{200 if 12 <= hour % 24 < 20 else 800}")
    path = tmp_path / "grid.csv"
    path.write_text("time,region,g_per_kwh\n" + "\n".join(lines))
    return str(path)


def picks(selector, hours, nodes=FOUR):
    return [sorted(selector.select(nodes, 9, hour * HOUR_S, RNG())) for hour in hours]


def test_each_region_takes_part_at_its_own_clean_hours(tmp_path):
    # A third of a day's hours are the eight clean ones, though those of one are as dirty as ...
    found = picks(LowCarbon(grid(tmp_path), 0.3), (0, 7, 8, 11, 12, 19, 20, 24))
    eu, us, neither = [7, 9, 10], [8, 9, 10], [9, 10]
    # ... and who says nothing, or what the file has not, is not held back.
    assert found == [eu, eu, neither, neither, us, us, neither, eu]


def test_the_file_begins_with_the_first_choice(tmp_path):
    late = LowCarbon(grid(tmp_path), 0.3)
    assert picks(late, (1000, 1008, 1012)) == [[7, 9, 10], [9, 10], [8, 9, 10]]
    again = LowCarbon(grid(tmp_path), 0.3)
    again.load_state_dict(late.state_dict())
    assert picks(again, (1019, 1020)) == [[8, 9, 10], [9, 10]]


def test_nobody_waits_longer_than_patience(tmp_path):
    selector = LowCarbon(grid(tmp_path), 0.3, patience_s=2 * HOUR_S)
    known = FOUR.take(np.array([0, 1]))
    # Held back at 8 and 9 h; at 10 h all are asked once, and then again held back.
    assert picks(selector, (0, 8, 9, 10, 11), known) == [[7], [], [], [7, 8], []]


def test_the_other_selector_chooses_among_them(tmp_path):
    nodes = Candidates.of([7, 8], properties=[{"region": "eu"}] * 2, picked_at=[5.0, 1.0])
    selector = LowCarbon(grid(tmp_path), then=LeastRecent())
    assert selector.select(nodes, 1, 0.0, RNG()) == [8]


def test_at_the_end_of_the_file_nobody_is_held_back_and_it_is_said_once(tmp_path, caplog):
    selector = LowCarbon(grid(tmp_path, days=1), 0.3)
    with caplog.at_level(logging.WARNING):
        assert picks(selector, (10, 23, 24, 99))[2:] == [[7, 8, 9, 10]] * 2
    assert [m for m in caplog.messages if "has come to its end" in m] == caplog.messages
    assert len(caplog.messages) == 1


def test_of_one_region_no_statement_is_needed(tmp_path):
    path = tmp_path / "one.csv"
    path.write_text("time,g_per_kwh\n" + "\n".join(f"{3600 * h},{h}" for h in range(48)))
    selector = LowCarbon(str(path), 0.5, patience_s=1e9)
    # It gets dirtier all the time, so that each hour is the cleanest of the next day.
    assert picks(selector, (0, 13), Candidates.of([7])) == [[7], [7]]
    path.write_text("time,g_per_kwh\n" + "\n".join(f"{3600 * h},{48 - h}" for h in range(48)))
    selector = LowCarbon(str(path), 0.5, patience_s=1e9)
    assert picks(selector, (0, 13), Candidates.of([7])) == [[], []]


def test_a_file_that_is_none_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"LowCarbon.intensity = '/dev/zero': expected a file of"):
        LowCarbon("/dev/zero")
    path = tmp_path / "dates.csv"
    path.write_text("time,g_per_kwh\n2026-01-01,1\n2026-01-02,1\n")
    with pytest.raises(ConfigError, match="expected --epoch"):
        LowCarbon(str(path))
    LowCarbon(str(path), epoch="2026-01-01")


def test_a_run_takes_fewer_grams_than_one_that_does_not_look(tmp_path):
    app = ForecastMod(properties=["region"]).client_app()

    @app.train()
    def train(message, context):
        metrics = MetricRecord({"train_loss": 1.0, "num-examples": 20})
        content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
        return Message(content, reply_to=message)

    path, fleet = grid(tmp_path, days=3), tmp_path / "fleet.csv"
    regions = {f"device-{i:02}": {"region": "eu" if i % 2 else "us"} for i in range(12)}
    rows = [f"{name},phone,{of['region']}" for name, of in regions.items()]
    fleet.write_text("device_id,class,region\n" + "\n".join(rows))

    def mean_g(selector):
        once = "ForecastRequest(older_than_s=1e9)"
        run = fedstale.simulate(
            app,
            traces=TraceSet.constant(12, compute=1.0, downlink_bit_per_s=1e6, uplink_bit_per_s=1e6),
            node_config=regions,
            strategy=f"FedBuff(4, 2, selector={selector}, stages=[{once}])",
            initial_arrays={"w": np.zeros(2)},
            until="26h",
            out=tmp_path / selector[:3],
            **{"work_per_example": 180.0, "epochs": 1, "examples": 20},
        )
        jobs = with_energy(run.jobs, Fleet(fleet))
        grams = with_carbon(jobs, Fleet(fleet), Intensity.read(path), end_s=run.end_s)
        return grams["carbon_g"].sum() / (grams["energy_j"].sum() / 3.6e6)

    blind, seeing = mean_g("Random()"), mean_g(f"LowCarbon({path!r}, .3)")
    # A mean of all hours is 300 and 600 g/kWh, of the clean ones 100 and 200.
    assert 250.0 < blind < 600.0
    assert 100.0 < seeing < 220.0
