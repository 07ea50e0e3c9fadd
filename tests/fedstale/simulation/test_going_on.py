"""A run that stopped at its limit goes on to a later one, as if the limit had been that one."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from interruptions import files, power_cut, versions_counted
from shared_fleets import synthetic

import fedstale
from fedstale.config import SimulationConfig
from fedstale.errors import ConfigError
from fedstale.runs import RunFolder
from fedstale.simulation.run import simulate
from fedstale.until import Until

pytestmark = pytest.mark.usefixtures("every_version_kept", "no_pages")

DIGITS = SimulationConfig(app="digits", traces="synthetic:30")
"""Settings of runs that are not begun."""
BEGINS_ANEW = "there is no checkpoint of this run: it begins anew"


@pytest.fixture(scope="module")
def traces():
    return synthetic(30)


@pytest.fixture(scope="module")
def whole(buffered, traces, tmp_path_factory):
    """Return a function that runs to a limit, and returns the files and the number of versions."""
    found = {}

    def go(until):
        if until not in found:
            folder = tmp_path_factory.mktemp("whole") / "run"
            with versions_counted() as versions:
                simulate(replace(buffered, until=until), folder, traces=traces)
            found[until] = files(folder), len(versions)
        return found[until]

    return go


@pytest.fixture
def to(buffered):
    return lambda until: replace(buffered, until=until)


@pytest.mark.parametrize(
    "limits",
    [("20m", "40m"), ("10 rounds", "30 rounds"), ("accuracy 0.4", "accuracy 0.6")],
    ids=" to ".join,
)
def test_a_run_that_stopped_goes_on_byte_for_byte(tmp_path, traces, to, whole, limits):
    first, then = limits
    expected, n_whole = whole(then)
    with versions_counted() as versions:
        stopped = simulate(to(first), tmp_path / "run", traces=traces)
        n_first = len(versions)
        assert stopped.status == "stopped"
        assert files(tmp_path / "run") != expected
        result = simulate(to(then), tmp_path / "run", traces=traces, resume=True)
    assert result.status == "stopped"
    assert SimulationConfig.read(tmp_path / "run" / "config.toml").until == then
    assert files(tmp_path / "run") == expected
    # What was done is not done again.
    assert 3 < n_first < n_whole
    assert len(versions) <= n_whole + 1


def test_a_run_that_is_killed_while_it_goes_on_is_one_that_was_killed(tmp_path, traces, to, whole):
    n = simulate(to("20m"), tmp_path / "run", traces=traces).summary["rounds"]
    with power_cut(lambda version, now: version == n + 2):
        simulate(to("40m"), tmp_path / "run", traces=traces, resume=True)
    # No summary says that it has come to an end, and its new limit stands.
    assert not (tmp_path / "run" / "summary.json").exists()
    simulate(to("40m"), tmp_path / "run", traces=traces, resume=True)
    assert files(tmp_path / "run") == whole("40m")[0]


def test_a_paused_run_is_an_interrupted_one_that_goes_on(tmp_path, traces, to, whole):
    expected, n_whole = whole("40m")
    with versions_counted() as versions:
        paused = simulate(to("40m"), tmp_path / "run", traces=traces, pause_at=600.0)
        assert (paused.status, paused.reason) == ("interrupted", "paused at 600 s of virtual time")
        assert paused.end_s == 600.0
        assert paused.metrics["time_s"].max() <= 600.0
        again = simulate(to("40m"), tmp_path / "run", traces=traces, resume=True, pause_at=1200.0)
        assert (again.status, again.end_s) == ("interrupted", 1200.0)
        last = simulate(to("40m"), tmp_path / "run", traces=traces, resume=True)
    assert (last.status, last.reason) == ("stopped", "reached 2,400 s of virtual time")
    assert files(tmp_path / "run") == expected
    # Each pause costs the version that was under way.
    assert len(versions) <= n_whole + 2


def test_a_pause_behind_the_limit_is_none(tmp_path, traces, to):
    result = simulate(to("5m"), tmp_path / "run", traces=traces, pause_at=301.0)
    assert (result.status, result.end_s) == ("stopped", 300.0)


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        ("20m", "10m", "ends at 20m; expected a later limit of the same kind"),
        ("20m", "30 rounds", "expected a later limit of the same kind"),
        ("20m", "accuracy 0.9", "expected a later limit of the same kind"),
        ("20m", None, "expected a later limit of the same kind"),
        ("20m", "20m", "has stopped at its limit; expected a later until"),
        ("20m", "1200s", "has stopped at its limit; expected a later until"),
    ],
)
def test_what_is_no_later_limit_is_refused_and_changes_nothing(tmp_path, first, then, words):
    with RunFolder.create(tmp_path / "run") as folder:
        folder.write_config(replace(DIGITS, until=first))
        folder.write_summary({"status": "stopped"})
    before = (tmp_path / "run" / "config.toml").read_bytes()
    with pytest.raises(ConfigError, match=words):
        RunFolder.resume(tmp_path / "run", replace(DIGITS, until=then))
    assert (tmp_path / "run" / "config.toml").read_bytes() == before
    assert (tmp_path / "run" / "summary.json").exists()
    # Nothing holds the folder.
    RunFolder(tmp_path / "run").__exit__()


def test_a_limit_for_a_run_that_had_none_is_refused(tmp_path):
    with RunFolder.create(tmp_path / "run") as folder:
        folder.write_config(replace(DIGITS, until=None))
    with pytest.raises(ConfigError, match="ends at no limit; expected a later limit"):
        RunFolder.resume(tmp_path / "run", replace(DIGITS, until="20m"))


def test_a_run_that_came_to_its_end_does_not_go_on(tmp_path):
    with RunFolder.create(tmp_path / "run") as folder:
        folder.write_config(replace(DIGITS, until="20m"))
        folder.write_summary({"status": "finished"})
    with pytest.raises(ConfigError, match=r"has come to its end \(finished\)"):
        RunFolder.resume(tmp_path / "run", replace(DIGITS, until="40m"))


def test_other_settings_are_refused_by_name(tmp_path, traces, to):
    simulate(to("5m"), tmp_path / "run", traces=traces)
    other = replace(to("10m"), seed=3, run_config={"concurrency": 9})
    with pytest.raises(ConfigError) as refused:
        simulate(other, tmp_path / "run", traces=traces, resume=True)
    assert "seed = 0 instead of 3" in str(refused.value)
    assert "run-config.concurrency = 8 instead of 9" in str(refused.value)
    # The run is what it was.
    assert fedstale.read_run(tmp_path / "run").status == "stopped"


@pytest.mark.parametrize(
    ("before", "after", "beyond"),
    [
        ("1h", "61m", True),
        ("1h", "60m", False),
        ("3 rounds", "4 rounds", True),
        ("4 rounds", "3 rounds", False),
        ("accuracy 0.5", "accuracy 0.51", True),
        ("accuracy 0.5", "accuracy 0.5", False),
        ("loss 0.5", "loss 0.4", True),
        ("loss 0.4", "loss 0.5", False),
        ("loss 0.4", "accuracy 0.5", False),
        (None, "1h", False),
        ("1h", None, False),
    ],
)
def test_a_later_limit_is_one_that_is_reached_after_the_other(before, after, beyond):
    assert Until.parse(after).goes_beyond(Until.parse(before)) == beyond


# Flower's strategies keep their state on Python's stack.


@pytest.fixture
def client():
    app = ClientApp()

    @app.train()
    def train(message, context):
        draw = np.random.random(3).astype(np.float32)
        model = message.content["arrays"].to_numpy_ndarrays()[0] * 0.5 + draw
        metrics = MetricRecord({"num-examples": 10})
        content = RecordDict({"arrays": ArrayRecord([model]), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


@pytest.mark.parametrize("pause_at", [None, "3m"])
def test_a_strategy_of_flower_begins_anew_says_so_and_comes_to_the_same(
    tmp_path, client, traces, caplog, pause_at
):
    def go(out, until, **how):
        return fedstale.simulate(
            client,
            strategy=FedAvg(fraction_evaluate=0.0),
            initial_arrays={"weights": np.zeros(3, np.float32)},
            traces=traces,
            until=until,
            out=tmp_path / out,
            work_per_example=0.5,
            epochs=1,
            examples=10,
            **how,
        )

    go("whole", "8m")
    assert go("run", "8m" if pause_at else "3m", pause_at=pause_at).summary["rounds"] > 1
    assert BEGINS_ANEW not in caplog.text
    with caplog.at_level(logging.WARNING):
        result = go("run", "8m", resume=True)
    assert BEGINS_ANEW in caplog.text
    assert result.status == "stopped"
    assert files(tmp_path / "run") == files(tmp_path / "whole")


def test_of_python_a_run_goes_on_only_in_a_folder_of_its_own():
    for how in ({"resume": True}, {"pause_at": "5m"}):
        with pytest.raises(ConfigError, match="expected out, the folder of the run"):
            fedstale.simulate("digits", traces="synthetic:5", until="10m", **how)
    with pytest.raises(ConfigError, match="expected a time such as 30m"):
        fedstale.simulate("digits", traces="synthetic:5", pause_at="3 rounds", out="never")
