"""What is written for other platforms keeps what it says, and our readers give it back."""

import json
import pickle
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from fedstale.cli.main import app
from fedstale.contrib.formats import export
from fedstale.contrib.formats.exports import TARGETS
from fedstale.errors import TraceError
from fedstale.traces import Availability, Series, TraceSet

HOUR = 3600.0


def fleet(**channels):
    n = next(iter(channels.values())).n_devices
    return TraceSet(device_ids=pd.Index([f"d{k}" for k in range(n)], dtype="str"), **channels)


def some():
    """Return a device of two logged days, one that never comes, and one that goes on over night."""
    online = Availability.of(
        [[(HOUR, 2 * HOUR), (30 * HOUR, 31.5 * HOUR)], [], [(0.0, HOUR), (20 * HOUR, 24 * HOUR)]],
        [48 * HOUR, 24 * HOUR, 24 * HOUR],
        logs=(0.0, [48 * HOUR, 24 * HOUR, 24 * HOUR]),
    )
    return fleet(availability=online)


def rated():
    return replace(
        some(),
        compute=Series.constant([1.0, 2.0, 8.0]),
        downlink=Series.regular([[2e6, 4e6]], step_s=10.0).take([0, 0, 0]),
        uplink=Series.constant([1e6, 3e6, 6e6]),
    )


def lines(traces):
    """Return what availability says: windows and length of each device, and its log."""
    online = traces.availability
    logs = zip(online.log_starts[online.rows], online.logs_s[online.rows], strict=True)
    rows = (online.windows(k) for k in range(traces.n_devices))
    return [
        (name, np.round(windows).tolist(), length, *log)
        for name, (windows, length), log in zip(traces.device_ids, rows, logs, strict=True)
    ]


def test_flash_gives_back_windows_and_logs(tmp_path):
    traces = replace(some(), epoch="2020-01-02T00:00:00")
    kept, lost = export(traces, "flash", tmp_path / "flash.json")
    assert (kept, lost) == (TARGETS["flash"]["kept"], TARGETS["flash"]["lost"])
    again = TraceSet.read(tmp_path / "flash.json")
    assert lines(again) == lines(traces)
    assert again.epoch == traces.epoch
    said = json.loads((tmp_path / "flash.json").read_text())
    assert said["d1"] == {"ready_time": [], "trace_start": 0, "trace_end": 86400, "isSuccess": True}


def test_flash_keeps_hour_and_weekday_of_a_log_that_begins_elsewhere(tmp_path):
    # A Monday's log from 22 h to 10 h of the next day, over the end of its record.
    online = Availability.of(
        [[(0.0, 2 * HOUR), (23 * HOUR, 24 * HOUR)]], 24 * HOUR, logs=(22 * HOUR, 12 * HOUR)
    )
    traces = replace(fleet(availability=online), epoch="2024-05-06T00:00:00")
    export(traces, "flash", tmp_path / "flash.json")
    (said,) = json.loads((tmp_path / "flash.json").read_text()).values()
    # FLASH's instant 0 is a Thursday; the next Monday begins four days later.
    assert said["trace_start"] == (4 * 24 + 22) * HOUR
    assert said["trace_end"] == (4 * 24 + 34) * HOUR
    assert said["ready_time"] == [[(4 * 24 + 23) * HOUR, (4 * 24 + 26) * HOUR]]
    again = TraceSet.read(tmp_path / "flash.json")
    assert lines(again) == lines(traces)


@pytest.mark.parametrize("to", ["flash", "fedscale-behaviour"])
def test_generated_phones_come_back_at_every_second(tmp_path, to):
    phones = TraceSet.synthetic(30, seed=4, days=3)
    export(phones, to, tmp_path / "file")
    again = TraceSet.read(tmp_path / "file", {"flash": "flash_days"}.get(to, "fedscale_behaviour"))
    everyone = np.arange(30)
    # FLASH's instant 0 is a Thursday.
    late = (phones.monday_s - 3 * 86400) % (7 * 86400) if to == "flash" else 0.0
    assert phones.monday_s == 0.0
    for t in np.random.default_rng(0).uniform(0, 6 * 86400, 500):
        before = phones.availability.is_available(everyone, t)
        assert (again.availability.is_available(everyone, t + late) == before).mean() > 0.99
    # FLASH's reader joins what is a second apart.
    lasts = [
        np.diff(each.availability.windows_before(everyone, 3 * 86400.0)[1:], axis=0).sum()
        for each in (phones, again)
    ]
    assert lasts[1] == pytest.approx(lasts[0], rel=1e-3)


def test_fedscale_gives_back_windows(tmp_path):
    traces = some()
    export(traces, "fedscale-behaviour", tmp_path / "behave")
    again = TraceSet.read(tmp_path / "behave", "fedscale_behaviour")
    assert [row[1:3] for row in lines(again)] == [row[1:3] for row in lines(traces)]
    said = pickle.loads((tmp_path / "behave").read_bytes())
    assert said[0] == {
        "active": [HOUR, 30 * HOUR],
        "inactive": [2 * HOUR, 31.5 * HOUR],
        "finish_time": 48 * HOUR,
        "duration": 48 * HOUR,
        "model": "d0",
    }
    # As FedScale's ClientMetadata asks: both lists have a first entry, at no time of the record.
    assert said[1]["active"] == said[1]["inactive"] == [24 * HOUR]


def test_fedscale_gives_back_speeds_and_links(tmp_path):
    export(rated(), "fedscale-capacity", tmp_path / "capacity")
    again = TraceSet.read(tmp_path / "capacity", "fedscale_capacity")
    assert again.compute.value_at([0, 1, 2], 0.0).tolist() == [0.5, 1.0, 4.0]
    # As long as both ways take: 3 and 1, 3 and 3, 3 and 6 Mbit/s.
    assert again.downlink.value_at([0, 1, 2], 0.0) == pytest.approx([1.5e6, 3e6, 4e6])
    assert pickle.loads((tmp_path / "capacity").read_bytes())[0]["computation"] == 1000.0


def test_appfl_has_a_profile_for_each(tmp_path):
    export(rated(), "appfl", tmp_path / "profiles.json")
    said = json.loads((tmp_path / "profiles.json").read_text())
    # appfl.vsim.ClientProfile(compute_factor, bandwidth), in Mbit/s of both ways.
    assert list(said) == ["d0", "d1", "d2"]
    assert [one["compute_factor"] for one in said.values()] == [2.0, 1.0, 0.25]
    assert [one["bandwidth"] for one in said.values()] == pytest.approx([1.5, 3.0, 4.0])


@pytest.fixture
def flgo(monkeypatch):
    """Stand in for flgo.simulator.base, by what its BasicSimulator of 0.4.4 has."""

    class BasicSimulator:
        def __init__(self, clients):
            self.all_clients, self.flushing_time = clients, 1
            self.variables = {one: {"working_amount": 5} for one in clients}
            self.states = dict.fromkeys(clients, "idle")

        def set_variable(self, ids, name, values):
            assert len(ids) == len(values)
            for one, value in zip(ids, values, strict=True):
                self.variables[one][name] = value

        def set_client_state(self, ids, state):
            self.states |= dict.fromkeys(ids, state)

    for name in ("flgo", "flgo.simulator", "flgo.simulator.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flgo.simulator.base"].BasicSimulator = BasicSimulator


@pytest.mark.usefixtures("flgo")
def test_flgo_asks_when_devices_are_online_and_how_long_they_take(tmp_path):
    export(rated(), "flgo", tmp_path / "devices.py")
    made = {}
    exec(compile((tmp_path / "devices.py").read_text(), "devices.py", "exec"), made)
    simulator = made["Simulator"]([10, 11, 12, 13])
    simulator.gv = SimpleNamespace(clock=SimpleNamespace(current_time=0))
    simulator.initialize()
    # Client 13 is device 0 again.
    assert simulator.states == {10: "offline", 11: "offline", 12: "idle", 13: "offline"}
    for now in (0, HOUR - 1, HOUR, 2 * HOUR - 1, 2 * HOUR, 49 * HOUR, 47 * HOUR):
        simulator.gv.clock.current_time = now - 7
        simulator.flushing_time = 7
        simulator.update_client_availability()
        online = rated().availability.is_available([0, 1, 2, 0], now)
        for one, is_online in zip((10, 11, 12, 13), online, strict=True):
            known = simulator.variables[one]
            assert (known["prob_available"], known["prob_unavailable"]) == (
                (1.0, -1.0) if is_online else (-1.0, 1.0)
            )
    simulator.variables[11]["__model_size"] = 750_000
    simulator.update_client_responsiveness([11])
    # 5 steps of a unit at 2 a second, and 24 Mbit at 3 Mbit/s each way.
    assert simulator.variables[11]["latency"] == np.ceil(2.5 + 8 + 8)


def test_a_record_that_stops_is_cut_there(tmp_path):
    online = some().availability.between(1.5 * HOUR, 31 * HOUR)
    export(fleet(availability=online), "fedscale-behaviour", tmp_path / "behave")
    said = pickle.loads((tmp_path / "behave").read_bytes())
    assert said[0]["finish_time"] == 29.5 * HOUR
    assert said[0]["active"] == [0.0, 28.5 * HOUR]
    assert said[0]["inactive"] == [0.5 * HOUR, 29.5 * HOUR]


def test_a_record_that_does_not_repeat_ends_earlier_for_who_begins_late(tmp_path):
    online = replace(some().availability.shifted(HOUR), repeat=False)
    export(fleet(availability=online), "fedscale-behaviour", tmp_path / "behave")
    said = pickle.loads((tmp_path / "behave").read_bytes())
    assert [said[k]["finish_time"] for k in range(3)] == [47 * HOUR, 23 * HOUR, 23 * HOUR]
    assert said[0]["active"] == [0.0, 29 * HOUR]


@pytest.mark.parametrize("to", TARGETS)
def test_the_command_says_what_is_lost(tmp_path, to):
    rated().write(tmp_path / "devices.parquet")
    words = ["traces", "export", str(tmp_path / "devices.parquet"), "--to", to]
    words += ["--out", str(tmp_path / "file"), "--json"]
    run = CliRunner().invoke(app, words)
    assert run.exit_code == 0, run.output
    assert f"lost: {TARGETS[to]['lost']}\n" in run.stderr
    said = json.loads(run.stdout)
    assert (said["out"], said["kept"]) == (str(tmp_path / "file"), TARGETS[to]["kept"])
    assert CliRunner().invoke(app, words).exit_code == 2  # the file is there


def test_what_cannot_be_written_is_refused(tmp_path):
    for traces, to, why in (
        (some(), "leaf", "to = 'leaf': expected one of appfl, "),
        (some(), "appfl", "not downlink"),
        (TraceSet.ideal(2), "fedscale-capacity", "above 0, finite"),
        (replace(rated(), availability=None), "flash", "not availability"),
    ):
        with pytest.raises(TraceError, match=why):
            export(traces, to, tmp_path / "file")
    assert not list(tmp_path.iterdir())
