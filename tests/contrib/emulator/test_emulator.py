"""An estimate holds what follows by hand, follows physics, and says what it was not told of."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedstale.cli.main import app
from fedstale.contrib.emulator import emulator, estimate
from fedstale.contrib.emulator.measures import OUTPUTS, Sample, Setting
from fedstale.errors import ConfigError, ProtocolError, TraceError
from fedstale.strategies import FedAvg, FedBuff, StaleStrategy
from fedstale.strategies.pace import Ramp
from fedstale.strategies.schedule import semi_synchronous
from fedstale.strategies.selection import BALANCED, Enough, ExpectedUtility, Oort
from fedstale.traces import TraceSet

FOLDER = Path(emulator.__file__).parent
JOB = {"rounds": 20, "work": 100.0, "message_bytes": 5e6, "timeout_s": 1200.0, "skew": 1.0}
# 5 MB at 40 Mbit/s are a second each way: a job takes 102 s.
EQUAL = TraceSet.constant(20, compute=1.0, downlink_bit_per_s=4e7, uplink_bit_per_s=4e7)
PHONES = TraceSet.synthetic(80, seed=3)


def setting(**changes):
    known = {"concurrency": 10, "buffer_size": 10, "keeps": False, "balanced": False, "rate": 1.0}
    return Setting(**(JOB | known | changes))


def holds(span, value):
    return span[0] <= value <= span[2]


def test_rounds_of_equal_devices_take_what_follows_by_hand():
    hours = 20 * 102.0 / 3600.0
    found = estimate(EQUAL, "FedAvg(10)", **JOB).spans
    assert holds(found["hours"], hours)
    assert holds(found["device-hours"], 10 * hours)
    assert holds(found["wasted share"], 0.0)
    assert found["staleness"] == found["high staleness"] == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "hours", "device_hours"),
    [
        ({}, 20 * 102 / 3600, 200 * 102 / 3600),
        # A step when the first of ten is there: the others end at the same instant.
        ({"buffer_size": 1}, 20 * 102 / 3600, 200 * 102 / 3600),
        # Twenty jobs in flight on ten devices are ten.
        ({"concurrency": 40, "buffer_size": 40}, 20 * 102 / 3600, 400 * 102 / 3600),
    ],
)
def test_rounds_that_are_played_on_equal_devices_are_exact(changes, hours, device_hours):
    of = setting(**changes)
    measures = Sample(EQUAL, of).measures(of)
    assert np.exp(measures["hours"]) == pytest.approx(hours, rel=1e-6)
    assert np.exp(measures["device-hours"]) == pytest.approx(device_hours, rel=1e-6)
    assert measures["staleness"] == 0.0


def test_slots_that_are_played_on_equal_devices_count_updates_and_their_staleness():
    of = setting(buffer_size=5, keeps=True)
    measures = Sample(EQUAL, of).measures(of)
    # Ten at a time are two steps of five every 102 s: half of the updates miss one of them.
    assert np.exp(measures["high staleness"]) - 1 == 1.0
    weight = np.exp(measures["weight of an update"])
    assert 2**-0.5 < weight < 1.0
    # As many steps more as stale updates weigh less.
    assert np.exp(measures["hours"]) == pytest.approx(20 / weight * 51 / 3600, rel=0.1)


@pytest.mark.parametrize("strategy", ["FedAvg(10)", "FedBuff(10, 5)", "FedBuff(8, 2)"])
@pytest.mark.parametrize("traces", [EQUAL, PHONES], ids=["equal", "phones"])
def test_more_work_more_bytes_and_more_rounds_take_longer(strategy, traces):
    once = estimate(traces, strategy, **JOB).spans
    for more in ({"work": 200.0}, {"message_bytes": 5e7}, {"rounds": 40}):
        found = estimate(traces, strategy, **(JOB | more)).spans
        assert found["hours"][1] > once["hours"][1]
        assert found["device-hours"][1] > once["device-hours"][1]


def test_an_estimate_is_the_same_each_time_and_its_ends_are_in_order():
    found = estimate(PHONES, FedBuff(10, 5), **JOB)
    assert found == estimate(PHONES, "FedBuff(10, 5)", **JOB)
    assert tuple(found.spans) == OUTPUTS
    for low, middle, high in found.spans.values():
        assert 0 <= low <= middle <= high
    assert found.outside == ()


def test_what_lies_beyond_the_runs_that_were_learnt_from_is_said():
    many = TraceSet.constant(3000, compute=1.0, downlink_bit_per_s=4e7, uplink_bit_per_s=4e7)
    said = estimate(many, "FedBuff(10, 5)", **JOB).outside
    assert any(each.startswith("devices online: 3e+03, learnt from ") for each in said)
    found = estimate(EQUAL, "FedBuff(10, 5)", **(JOB | {"rounds": 5000})).outside
    assert any(each.startswith("rounds: 5e+03, learnt from ") for each in found)


@pytest.mark.parametrize(
    "strategy",
    [
        "flower.FedAvg()",
        FedBuff(10, 5, pace=Ramp(20)),
        FedAvg(10, selector=Oort()),
        StaleStrategy(schedule=semi_synchronous(10, 60.0)),
    ],
)
def test_a_strategy_that_was_not_learnt_from_is_refused(strategy):
    with pytest.raises(ConfigError, match="not learnt from"):
        estimate(EQUAL, strategy, **JOB)


def test_the_balanced_rule_is_known():
    rule = Enough(ExpectedUtility(BALANCED))
    found = estimate(PHONES, FedAvg(10, selector=rule), **JOB)
    assert found != estimate(PHONES, FedAvg(10), **JOB)


def test_traces_that_lack_a_channel_and_jobs_that_nobody_can_do_are_refused():
    with pytest.raises(TraceError, match="compute"):
        estimate(replace(EQUAL, compute=None), "FedAvg(10)", **JOB)
    with pytest.raises(ConfigError, match="time-out"):
        estimate(EQUAL, "FedAvg(10)", **(JOB | {"timeout_s": 50.0}))


def test_arrays_that_were_damaged_or_are_missing_are_refused_and_none_is_pickled(tmp_path):
    for name in (emulator.FILES.toml, emulator.FILES.safetensors):
        shutil.copy(FOLDER / name, tmp_path)
    load = emulator.Emulator.load.__wrapped__
    load(emulator.Emulator, tmp_path)
    file = tmp_path / emulator.FILES.safetensors
    data = bytearray(file.read_bytes())
    assert len(data) < 1_000_000
    # Its head is a length and JSON, where pickles have an instruction.
    assert data[8:9] == b"{"
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(ProtocolError, match="altered"):
        load(emulator.Emulator, tmp_path)
    file.unlink()
    with pytest.raises(ProtocolError, match="cannot be read"):
        load(emulator.Emulator, tmp_path)


def test_an_emulator_of_other_measures_is_refused():
    other = emulator.Emulator(emulator.Emulator.load()._arrays, ["something else"])
    with pytest.raises(ProtocolError, match="other measures"):
        other.estimate(Sample(EQUAL, setting()).measures(setting()), keeps=False)


def called(*words):
    return CliRunner().invoke(app, ["estimate", *words])


def test_the_command_says_what_the_function_says():
    result = called("digits", "--strategy", "FedBuff(10, 5)", "--rounds", "20")
    assert result.exit_code == 0, result.output
    # 18 examples, 5 epochs, 0.9 work units: what the app declares.
    wanted = estimate(
        TraceSet.synthetic(100, seed=0),
        "FedBuff(10, 5)",
        rounds=20,
        work=18 * 5 * 0.9,
        message_bytes=14e6,
        timeout_s=300.0,
        skew=0.5,
    )
    for name, (low, middle, high) in wanted.spans.items():
        assert f"{name}: {middle:.3g}, from {low:.3g} to {high:.3g}\n" in result.output
    told = json.loads(
        called("digits", "--strategy", "FedBuff(10, 5)", "--rounds", "20", "--json").stdout
    )
    assert told["spans"] == {name: list(ends) for name, ends in wanted.spans.items()}
    assert told["outside"] == list(wanted.outside)


def test_the_command_names_what_is_not_known(tmp_path):
    own = tmp_path / "own"
    shutil.copytree(Path(emulator.__file__).parents[2] / "apps/digits", own)
    project = own / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    lacking = text.replace("work-per-example = 0.9", "").replace("model-bytes = 14_000_000", "")
    project.write_text(lacking.replace("alpha = 0.5", ""), encoding="utf-8")
    words = (str(own), "--strategy", "FedBuff(10, 5)", "--rounds", "20")
    result = called(*words)
    assert result.exit_code == 2
    for name in ("work-per-example", "model-bytes", "alpha"):
        assert name in result.output
    project.write_text(text.replace("alpha = 0.5", ""), encoding="utf-8")
    assert called(*words).exit_code == 2
    assert called(*words, "-c", "alpha=0.5").exit_code == 0
