"""A simulation that is killed at any moment goes on, and ends as if it had never been."""

from dataclasses import replace

import pytest
from interruptions import files, power_cut
from shared_fleets import synthetic
from small_app import CLIENT, write_small_app
from tiny import fleet

from fedstale.config import SimulationConfig
from fedstale.errors import ConfigError
from fedstale.runs import RunFolder
from fedstale.simulation import jobs
from fedstale.simulation.flower_app import FlowerApp
from fedstale.simulation.run import simulate
from fedstale.traces import TraceSet

pytestmark = pytest.mark.usefixtures("every_version_kept", "no_pages")


@pytest.fixture(scope="module")
def traces():
    return synthetic(30)


@pytest.fixture(scope="module")
def config(buffered):
    return replace(buffered, run_config={"rounds": 12})


@pytest.fixture(scope="module")
def whole(config, traces, tmp_path_factory):
    """Return the files of a run that was not cut off."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    simulate(config, folder, traces=traces)
    return files(folder)


# With little growth, the file of the jobs has been mapped many times when the run is cut off.
@pytest.mark.parametrize("cut", [(1, 4096), (8, 2)])
def test_a_run_that_was_cut_off_ends_byte_for_byte_as_one_that_was_not(
    tmp_path, config, whole, cut, monkeypatch
):
    (at, growth), traces = cut, synthetic(30)
    monkeypatch.setattr(jobs, "_GROWTH", growth)
    with power_cut(lambda version, now: version == at):
        simulate(config, tmp_path / "run", traces=traces)
    assert not (tmp_path / "run" / "summary.json").exists()
    result = simulate(
        SimulationConfig.read(tmp_path / "run" / "config.toml"),
        tmp_path / "run",
        traces=traces,
        resume=True,
    )
    assert result.status == "finished"
    assert files(tmp_path / "run") == whole
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_run_that_trains_with_torch_goes_on_too(tmp_path, traces):
    short = {"strategy": "FedBuff(10, 2)", "num-server-rounds": 4, "local-epochs": 1}
    config = SimulationConfig(app="digits", traces="given", run_config=short)
    simulate(config, tmp_path / "whole", traces=traces)
    with power_cut(lambda version, now: version == 2):
        simulate(config, tmp_path / "run", traces=traces)
    simulate(config, tmp_path / "run", traces=traces, resume=True)
    assert files(tmp_path / "run") == files(tmp_path / "whole")


def test_a_run_on_ideal_devices_goes_on_too(tmp_path, buffered):
    config = replace(buffered, run_config={"rounds": 5})
    ideal = TraceSet.ideal(30)
    simulate(config, tmp_path / "whole", traces=ideal)
    # All replies come at one instant, so several versions are made between two checkpoints.
    with power_cut(lambda version, now: version >= 2):
        simulate(config, tmp_path / "run", traces=ideal)
    simulate(config, tmp_path / "run", traces=ideal, resume=True)
    assert files(tmp_path / "run") == files(tmp_path / "whole")


SCREENING = """
from fedstale.contrib.peers import ScreenMod
from fedstale.strategies.robust import Median
from fedstale.strategies.weighting import polynomial

app = ClientApp(mods=[ScreenMod(Median(f=1), staleness=polynomial(0.5))])
"""


@pytest.mark.parametrize("at", [1, 12])
def test_a_run_of_sites_behind_a_relay_goes_on_too(tmp_path, at):
    app = tmp_path / "app"
    write_small_app(app, client=CLIENT.replace("app = ClientApp()", SCREENING))
    config = SimulationConfig(
        app=str(app),
        traces="given",
        strategy="FedBuff(4, 1, stages=[Relay('complete', 4, Median(f=1))], fraction_evaluate=0.5)",
        run_config={"rounds": 20},
    )
    windows = [[(0, 300)], [(0, 4), (45, 90), (92, 300)], [(0, 8), (10, 300)], [(0, 300)]]
    devices = fleet(windows, compute=10.0, length=300.0)
    simulate(config, tmp_path / "whole", traces=devices)
    with power_cut(lambda version, now: version >= at):
        simulate(config, tmp_path / "run", traces=devices)
    simulate(config, tmp_path / "run", traces=devices, resume=True)
    assert files(tmp_path / "run") == files(tmp_path / "whole")


def test_a_run_without_a_checkpoint_begins_anew(tmp_path, config, traces, whole):
    with RunFolder.create(tmp_path / "run") as folder:
        folder.write_config(FlowerApp.find(config.app).resolved(config))
    simulate(config, tmp_path / "run", traces=traces, resume=True)
    assert (tmp_path / "run" / "events.parquet").read_bytes() == whole["events.parquet"]


def test_what_cannot_be_resumed_is_refused(tmp_path, config, traces):
    with pytest.raises(ConfigError, match=r"has no config\.toml"):
        simulate(config, tmp_path / "none", traces=traces, resume=True)
    with RunFolder.create(tmp_path / "run") as folder:
        folder.write_config(config)
        with pytest.raises(ConfigError, match="in use by a run that goes on"):
            RunFolder.resume(tmp_path / "run", config)
        with pytest.raises(ConfigError, match="in use by a run that goes on"):
            RunFolder.create(tmp_path / "run", overwrite=True)
        folder.write_summary({"status": "finished"})
    with pytest.raises(ConfigError, match="has come to its end"):
        RunFolder.resume(tmp_path / "run", config)
