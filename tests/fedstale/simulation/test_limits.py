"""What a cap on examples did to a run: said once where a user looks, and counted in its folder."""

import json
import logging

import pandas as pd
import pytest
from interruptions import power_cut
from invoked_command import invoked
from small_app import CLIENT, PYPROJECT, SERVER, write_small_app

from fedstale.config import SimulationConfig
from fedstale.simulation.run import simulate
from fedstale.traces import TraceSet

LIAR, CLAIM = 4, 10**6
OVER_REPORTING = CLIENT.replace(
    '"num-examples": len(x)}',
    f'"num-examples": {CLAIM} if context.node_config["partition-id"] == {LIAR} else len(x)}}',
    1,
)
OWN_SERVER = SERVER.replace(
    "from flwr.serverapp import strategy as strategies",
    "from fedstale import strategies\nfrom fedstale.strategies import Validation",
).replace(
    """(
        fraction_evaluate=config["fraction-evaluate"],
        min_available_nodes=config["min-available"],
        **options,
""",
    """(
        *([4, 4] if config["strategy"] == "FedBuff" else []),
        validation=Validation(
            examples_cap=config["cap"] or None, norm_cap=config["norm-cap"] or None
        ),
        seed=1,
        **options,
""",
)
CAPPED_PYPROJECT = PYPROJECT.replace("rounds = 3", "rounds = 4\ncap = 0.0\nnorm-cap = 0.0")


@pytest.fixture
def app(tmp_path):
    return write_small_app(
        tmp_path / "app", client=OVER_REPORTING, server=OWN_SERVER, pyproject=CAPPED_PYPROJECT
    )


def counted(folder):
    """How often the over-reporting client's training counted, by the table of jobs."""
    events = pd.read_parquet(folder / "events.parquet")
    used = events[(events.kind == "train") & (events.aggregated_version >= 0)]
    return used.groupby("device_id").size()


def test_a_cap_is_seen_without_v_once_and_stands_in_the_summary_and_the_report(
    app, tmp_path, capsys
):
    TraceSet.ideal(8).write(tmp_path / "ideal.parquet")
    words = ["simulate", app, "--traces", tmp_path / "ideal.parquet", "--out"]

    def simulated(name, *options):
        code, _, err = invoked([*words, tmp_path / name, *options], capsys)
        assert code == 0, err
        return err

    assert simulated("plain") == ""
    ended = simulated("run", "-c", "cap=1.5")
    assert ended.count("num-examples counts as") == 1
    assert "Validation(examples_cap=1.5)" in ended
    assert len(ended.splitlines()) == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    (n_used,) = {n for n in counted(tmp_path / "run") if n}
    assert n_used >= 4
    assert summary["capped"] == {"replies": n_used, "nodes": 1}
    assert summary["clipped"] == {"replies": 0, "nodes": 0}
    page = (tmp_path / "run" / "report.html").read_text()
    assert "examples capped" in page
    assert f"{n_used}, of 1 devices" in page
    assert "examples capped" not in (tmp_path / "plain" / "report.html").read_text()
    none = json.loads((tmp_path / "plain" / "summary.json").read_text())["capped"]
    assert none == {"replies": 0, "nodes": 0}


@pytest.mark.parametrize(
    ("options", "n_warnings"),
    [
        ({"strategy": "FedAvg", "cap": 0.0}, 0),
        ({"strategy": "FedAvg", "cap": 1.5}, 1),
        ({"strategy": "FedBuff", "cap": 0.0}, 0),
        ({"strategy": "FedBuff", "cap": 1.5}, 0),
    ],
)
@pytest.mark.usefixtures("no_pages")
def test_only_a_strategy_that_weighs_by_examples_warns_of_their_cap(
    app, tmp_path, caplog, options, n_warnings
):
    result = simulated(app, tmp_path / "run", **options)
    warned = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert sum("num-examples counts as" in r.getMessage() for r in warned) == n_warnings
    assert bool(result.summary["capped"]["replies"]) == bool(options["cap"])


@pytest.mark.usefixtures("no_pages")
def test_clipped_norms_are_counted_too(app, tmp_path):
    result = simulated(app, tmp_path / "run", **{"norm-cap": 1.0})
    n_used = counted(result.folder)
    clipped = result.summary["clipped"]
    # Half of the updates, or nearly, are beyond the median; no node is always.
    assert 0 < clipped["replies"] < n_used.sum()
    assert 0 < clipped["nodes"] <= len(n_used)


@pytest.mark.usefixtures("every_version_kept", "no_pages")
def test_a_run_that_was_cut_off_and_resumed_counts_what_a_whole_one_counts(app, tmp_path):
    whole = simulated(app, tmp_path / "whole", cap=1.5, rounds=6).summary
    with power_cut(lambda version, now: version == 3):
        simulated(app, tmp_path / "cut", cap=1.5, rounds=6)
    again = simulate(
        SimulationConfig.read(tmp_path / "cut" / "config.toml"),
        tmp_path / "cut",
        traces=TraceSet.ideal(8),
        resume=True,
    )
    assert again.summary["capped"] == whole["capped"]
    assert whole["capped"]["replies"] >= 6


def simulated(app, folder, **run_config):
    config = SimulationConfig(app=str(app), traces="given", run_config=run_config)
    return simulate(config, folder, traces=TraceSet.ideal(8))
