"""Whole runs in processes of their own are those of one process, to the last byte."""

from dataclasses import replace

import pytest
from compact_client import CLIENT, bits, calls
from interruptions import files
from server_fn_app import write_server_fn_app
from shared_fleets import synthetic
from small_app import write_small_app
from uneven_app import BUFFERED, UNEVEN

from fedstale.config import SimulationConfig
from fedstale.flower import identity
from fedstale.simulation import InlineExecutor
from fedstale.simulation.executors.workers import RayExecutor
from fedstale.simulation.flower_app import FlowerApp
from fedstale.simulation.run import simulate

DIGITS = {"num-server-rounds": 8, "forecasts": True}
RUNS = {
    "replies of all sizes": lambda path: (
        write_small_app(path, client=UNEVEN, server=BUFFERED),
        {},
    ),
    "the older API": lambda path: (write_server_fn_app(path), {"rounds": 5}),
    "formats": lambda path: (
        "digits",
        {**DIGITS, "strategy": "FedBuff(6, 3, stages=[Compression('int4', down='int8')])"},
    ),
    "shares of the work": lambda path: (
        "digits",
        {
            **DIGITS,
            "strategy": (
                "FedBuff(6, 3, stages=[Compression('int4'), LocalWork(within_s=120), "
                "ForecastRequest()])"
            ),
        },
    ),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.usefixtures("no_pages")
def test_a_run_is_the_same_in_one_process_and_in_two(tmp_path, name):
    app, run_config = RUNS[name](tmp_path / "app")
    config = SimulationConfig(app=str(app), traces="given", run_config=run_config)
    for kind, workers in (("inline", 1), ("processes", 2)):
        asked = replace(config, executor=kind, workers=workers)
        found = simulate(asked, tmp_path / kind, traces=synthetic(20))
        assert found.status == "finished", found.reason
    assert files(tmp_path / "inline") == files(tmp_path / "processes")


# Ray warns of what it will do, and leaves the ends of its processes to the collector.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_actors_of_ray_answer_in_formats_with_the_bits_of_one_process(tmp_path):
    pytest.importorskip("ray")
    app = FlowerApp.find(write_small_app(tmp_path, client=CLIENT))
    with app.importable(), identity(1):
        own = InlineExecutor(app.load_client()).run(list(calls()))
        with RayExecutor(app, 2) as pool:
            theirs = pool.run(list(calls()))
    assert {stype for stype, _ in bits(own)[0].values()} == {"fedstale.int4"}
    assert bits(own) == bits(theirs)
    assert [a.context.state for a in theirs] == [a.context.state for a in own]
