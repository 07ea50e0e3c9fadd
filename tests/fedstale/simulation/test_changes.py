"""A run whose settings change at instants: one run, whatever interrupts it or forks it."""

import shutil
from dataclasses import replace

import pandas as pd
import pytest
from interruptions import files, power_cut
from shared_fleets import synthetic

import fedstale
from fedstale.comparison.plan import Plan
from fedstale.config import SimulationConfig
from fedstale.errors import ConfigError
from fedstale.simulation.flower_app import FlowerApp
from fedstale.simulation.run import simulate

pytestmark = pytest.mark.usefixtures("every_version_kept", "no_pages")

DIGITS = SimulationConfig(app="digits", traces="synthetic:30", until="40m")
"""Settings of runs that are not begun."""


@pytest.fixture(scope="module")
def traces():
    return synthetic(30)


def at(instant, **run_config):
    values = {key.replace("_", "-"): value for key, value in run_config.items()}
    return {"at": instant, "run-config": values}


@pytest.fixture(scope="module")
def with_changes(buffered):
    """Return a function that returns settings which change."""

    def asked(*changes, until="40m", **run_config):
        own = {"strategy": "fedbuff", **run_config}
        return replace(buffered, changes=changes, until=until, run_config=own)

    return asked


@pytest.fixture(scope="module")
def plain(with_changes, traces, tmp_path_factory):
    """Return the run whose settings do not change."""
    return simulate(with_changes(), tmp_path_factory.mktemp("plain") / "run", traces=traces)


def in_flight(events, instant):
    return ((events["sent_at"] <= instant) & (events["ended_at"] > instant)).sum()


def test_a_change_holds_from_the_first_version_at_or_after_its_instant(
    tmp_path, traces, with_changes, plain, caplog
):
    changed = simulate(with_changes(at("15m", concurrency=2)), tmp_path / "run", traces=traces)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [text for text in warnings if "is above concurrency = 2" not in text] == []
    before, after = (each.jobs for each in (plain, changed))
    versions = plain.metrics.drop_duplicates("version").set_index("version")["time_s"]
    turn = versions[versions >= 900.0].min()
    assert turn > 900.0
    # Nothing else until then, and no longer eight at a time once the last eight are back.
    pd.testing.assert_frame_equal(
        before[before["ended_at"] < turn].reset_index(drop=True)[["job_id", "ended_at"]],
        after[after["ended_at"] < turn].reset_index(drop=True)[["job_id", "ended_at"]],
    )
    late = range(1800, 2400, 60)
    assert max(in_flight(before, instant) for instant in late) > 2
    assert max(in_flight(after, instant) for instant in late) == 2


def test_a_change_of_epochs_changes_what_jobs_cost(tmp_path, traces, with_changes):
    changes = at("10m", local_epochs=1), at("20m", local_epochs=10)
    events = simulate(with_changes(*changes), tmp_path, traces=traces).jobs
    done = events[events["status"] == "reported"]
    parts = [
        done[(done["sent_at"] > a) & (done["sent_at"] < b)] for a, b in ((700, 1200), (1300, 2400))
    ]
    few, many = (part["compute_s"].mean() for part in parts)
    assert many > 5 * few


def test_a_fork_is_the_run_that_had_the_change_from_the_beginning(
    tmp_path, traces, with_changes, plain
):
    change = at("20m", learning_rate=0.01, buffer_size=5)
    whole = simulate(with_changes(change), tmp_path / "whole", traces=traces)
    simulate(with_changes(), tmp_path / "run", traces=traces, pause_at=1200.0)
    shutil.copytree(tmp_path / "run", tmp_path / "fork")
    simulate(with_changes(change), tmp_path / "fork", traces=traces, resume=True)
    assert files(tmp_path / "fork") == files(tmp_path / "whole")
    # What it was forked from goes its own way.
    simulate(with_changes(), tmp_path / "run", traces=traces, resume=True)
    assert files(tmp_path / "run") == files(plain.folder) != files(tmp_path / "whole")
    again = fedstale.read_run(tmp_path / "fork")
    assert again.status == whole.status == "stopped"


def test_a_run_with_changes_that_is_killed_goes_on_byte_for_byte(tmp_path, traces, with_changes):
    asked = with_changes(
        at("5m", concurrency=3), at("10m", buffer_size=6, concurrency=9), until="20m"
    )
    simulate(asked, tmp_path / "whole", traces=traces)
    # Between the two changes.
    with power_cut(lambda version, now: now > 350.0):
        simulate(asked, tmp_path / "run", traces=traces)
    simulate(asked, tmp_path / "run", traces=traces, resume=True)
    assert files(tmp_path / "run") == files(tmp_path / "whole")


def test_a_config_with_changes_reads_back_and_runs_from_its_file(tmp_path, traces, with_changes):
    asked = with_changes(at("5m", learning_rate=0.03), until="7m")
    simulate(asked, tmp_path / "run", traces=traces)
    back = SimulationConfig.read(tmp_path / "run" / "config.toml")
    assert not back.differing(FlowerApp.find(asked.app).resolved(asked))
    assert back.differing(replace(back, changes=()))


def test_from_python_and_in_a_plan(tmp_path, traces, with_changes):
    plain, change = with_changes(), at("4m", buffer_size=1)
    options = {"until": "8m", "run_config": plain.run_config, "changes": [change]}
    found = fedstale.simulate(plain.app, traces=traces, **options, out=tmp_path / "one")
    assert found.status == "stopped"
    table = {
        "app": plain.app,
        "traces": "synthetic:30",
        "until": "8m",
        "seeds": [0],
        "seed-key": "",
        "run-config": dict(plain.run_config),
        "variants": {"changed": {"changes": [change]}, "plain": {}},
    }
    plan = Plan.from_table(table, where="plan")
    again = Plan.from_table(plan.table(), where="again")
    for name in ("changed", "plain"):
        simulate(again.config(name, 0), tmp_path / name, traces=traces)
    assert files(tmp_path / "changed") == files(tmp_path / "one")
    assert files(tmp_path / "plain") != files(tmp_path / "changed")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([{"at": "10m"}], "expected { at = '30m', run-config"),
        ([at("10 rounds", concurrency=2)], "expected a time such as 30m"),
        ([at("0s", concurrency=2)], "expected a time such as 30m"),
        ([at("20m", concurrency=2), at("10m", concurrency=3)], "expected rising instants"),
        ("10m", "expected a list of tables"),
        ([{"at": "10m", "run-config": {"concurrency": [1]}}], "run-config = "),
    ],
)
def test_what_is_no_change_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        replace(DIGITS, changes=changes)


def test_changes_need_checkpoints():
    with pytest.raises(ConfigError, match="changes need checkpoints"):
        replace(DIGITS, changes=[at("10m", concurrency=2)], checkpoint_every=0)


def test_a_key_that_the_app_has_not_is_refused_before_anything_runs(tmp_path, traces, with_changes):
    with pytest.raises(ConfigError, match="concurrencys"):
        simulate(with_changes(at("10m", concurrencys=2)), tmp_path / "run", traces=traces)
    assert not (tmp_path / "run").exists()


def test_another_kind_of_strategy_cannot_go_on(tmp_path, traces, with_changes):
    asked = with_changes(at("10m", strategy="fedavg"))
    found = simulate(asked, tmp_path, traces=traces)
    assert found.status == "failed"
    assert "written with strategy FedBuff, and this run has FedAvg" in found.reason


def test_flowers_strategies_keep_nothing_to_go_on_from_and_say_so(tmp_path, traces, with_changes):
    change = at("5m", learning_rate=0.01)
    asked = with_changes(change, until="7m", strategy="flower-fedavg")
    found = simulate(asked, tmp_path, traces=traces)
    assert found.status == "failed"
    assert "expected an app that starts one strategy of fedstale" in found.reason


def test_a_run_keeps_its_changes_and_takes_no_others_for_what_is_done(
    tmp_path, traces, with_changes
):
    simulate(with_changes(at("5m", concurrency=3)), tmp_path, traces=traces, pause_at=1200.0)
    for others in (
        [],
        [at("5m", concurrency=4)],
        [at("5m", concurrency=3), at("19m", concurrency=4)],
    ):
        with pytest.raises(ConfigError, match="it keeps them, and takes others at or after"):
            simulate(with_changes(*others), tmp_path, traces=traces, resume=True)
    later = [at("5m", concurrency=3), at("20m", concurrency=4)]
    assert simulate(with_changes(*later), tmp_path, traces=traces, resume=True).status == "stopped"
