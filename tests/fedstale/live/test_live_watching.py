import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.serverapp.strategy import FedAvg

sys.path += [str(Path(__file__).parents[1] / "simulation")]
sys.path += [str(Path(__file__).parents[2] / "strategies")]

from small_app import write_small_app
from tiny import COSTS, counting_app, fleet
from virtual_grid import VirtualGrid, adder, identity, record

from fedstale.config import SimulationConfig
from fedstale.errors import ConfigError
from fedstale.live import Board, LiveObserver, RunWatch, observed
from fedstale.simulation.run import simulate
from fedstale.simulation.trace_grid import TraceGrid
from fedstale.strategies import FedBuff

WINDOWS = [[(0.0, 400.0)], [(100.0, 900.0)], [(0.0, 1000.0)], [(0.0, 15.0)]]


class Notes:
    def __init__(self):
        self.moments, self.metrics, self.merges, self.failures = [], [], [], []

    def moved(self, moment):
        self.moments.append(moment)

    def measured(self, *row):
        self.metrics.append(row)

    def merged(self, *facts):
        self.merges.append(facts)

    def failed(self, *facts):
        self.failures.append(facts)


@pytest.fixture
def run(tmp_path):
    app = write_small_app(tmp_path / "app")

    def run(name, watch=None):
        config = SimulationConfig(app=str(app), traces="given", until="2 rounds")
        return simulate(config, tmp_path / name, traces=fleet(WINDOWS), watch=watch)

    return run


def test_watching_changes_no_byte_of_a_run(run):
    plain = run("plain").folder
    watch = RunWatch([Board("small")], every_s=0.0)
    watched = run("watched", watch).folder
    watch.close()
    for name in ("events.parquet", "metrics.parquet", "model.safetensors"):
        assert (plain / name).read_bytes() == (watched / name).read_bytes(), name


def test_a_watch_sees_every_metric_once_and_every_failure_that_the_app_saw(run):
    notes = Notes()
    watch = RunWatch([notes], every_s=0.0)
    folder = run("watched", watch).folder
    watch.close()
    rows = pq.read_table(folder / "metrics.parquet").to_pylist()
    assert notes.metrics == [tuple(row.values()) for row in rows]
    events = pq.read_table(folder / "events.parquet").to_pandas()
    delivered = events[np.isfinite(events["delivered_at"]) & (events["status"] != "reported")]
    assert sorted(f[2] for f in notes.failures) == sorted(delivered["status"])
    assert [m.now for m in notes.moments] == sorted(m.now for m in notes.moments)
    assert notes.moments[-1].share == 1.0


def test_a_watch_hears_of_merges_with_their_staleness():
    notes = Notes()
    watch = RunWatch([notes])
    grid = TraceGrid(fleet([[(0.0, 1000.0)]] * 3), counting_app(), costs=COSTS)
    grid.on_job = watch._job
    watch._grid = grid
    with grid.running():
        strategy = FedBuff(concurrency=3, buffer_size=2)
        strategy.start(grid, ArrayRecord([np.zeros(3, np.float32)]), num_rounds=5)
    events = grid.events().to_pandas()
    merged = events[events["aggregated_version"] >= 0]
    assert sorted(m[1] for m in notes.merges) == sorted(merged["staleness"])
    assert len(notes.merges) == 10


def failing(message, grid):
    return 1.0, Error(code=7, reason="the battery is empty")


def test_on_real_devices_a_strategy_is_watched_through_its_grid():
    notes = Notes()
    inner = VirtualGrid({1: adder(1.0), 2: adder(1.0), 3: failing})
    # Not a Clock, as a SuperLink's grid is none.
    grid = LiveObserver(inner, notes)
    initial = record(w=np.zeros(2, np.float32))
    inner.wait, inner.now = None, None
    inner.time = 0.0
    with identity():
        ids = list(grid.push_messages([message_to(node, initial) for node in (1, 2, 3)]))
        assert notes.moments[-1].n_in_flight == 3
        inner.move(2.0)
        replies = list(grid.pull_messages(ids))
    assert len(replies) == 3
    assert notes.moments[-1].n_in_flight == 0
    assert [facts[1:] for facts in notes.failures] == [
        ("node 3", "error", "7: the battery is empty")
    ]
    assert list(grid.get_node_ids()) == [1, 2, 3]
    assert notes.moments[-1].online == 3
    grid.job_aggregated(ids[0], base_version=0, version=2, staleness=1, weight=0.5)
    grid.job_rejected(ids[1], reason="NaN")
    grid.job_rejected(ids[2], reason="error 7: the battery is empty")
    grid.measured(version=1, source="server", metrics={"accuracy": 0.5})
    assert notes.merges[0][1:] == (1.0, 0.5)
    assert [facts[2] for facts in notes.failures] == ["error", "rejected"]
    assert notes.metrics[0][1:] == (1, "server", "accuracy", 0.5)
    # What the inner grid would have heard without, it hears.
    assert [m[0] for m in inner.merged] == [ids[0]]
    assert len(inner.refused) == 2


def message_to(node, arrays):
    config = ConfigRecord({"server-round": 1})
    return Message(RecordDict({"arrays": arrays, "config": config}), node, "train")


def test_send_and_receive_is_watched_too():
    notes = Notes()
    inner = VirtualGrid({1: adder(1.0), 2: failing})
    grid = LiveObserver(inner, notes)
    with identity():
        messages = [message_to(node, record(w=np.zeros(2, np.float32))) for node in (1, 2)]
        replies = list(grid.send_and_receive(messages, timeout=5.0))
    assert len(replies) == 2
    assert max(m.n_in_flight for m in notes.moments) == 2
    assert notes.moments[-1].n_in_flight == 0
    assert [f[2] for f in notes.failures] == ["error"]


def test_a_simulated_grid_is_left_as_it_is():
    grid = TraceGrid(fleet(WINDOWS), counting_app(), costs=COSTS)
    assert observed(grid, Notes()) is grid


def test_a_stock_strategy_runs_through_a_watched_grid():
    notes = Notes()
    inner = VirtualGrid({1: adder(1.0), 2: adder(3.0)})
    grid = LiveObserver(inner, notes)
    with identity():
        result = FedAvg(fraction_evaluate=0.0).start(
            grid=grid, initial_arrays=record(w=np.zeros(2, np.float32)), num_rounds=2
        )
    assert result.arrays.to_numpy_ndarrays()[0].tolist() == [4.0, 4.0]
    assert notes.moments[-1].online == 2


def test_without_tensorboard_a_sentence_says_how_to_get_it(monkeypatch, tmp_path):
    from fedstale.live.scalars import Scalars

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedstale\[tensorboard\]'"):
        Scalars(tmp_path)


def test_scalars_go_to_event_files(run, tmp_path):
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from fedstale.live.scalars import Scalars

    scalars = Scalars(tmp_path / "board")
    watch = RunWatch([scalars], every_s=0.0)
    folder = run("watched", watch).folder
    watch.close()
    scalars.close()
    written = EventAccumulator(str(tmp_path / "board")).Reload()
    rows = pq.read_table(folder / "metrics.parquet").to_pylist()
    for source, name in {(row["source"], row["name"]) for row in rows}:
        own = [r for r in rows if (r["source"], r["name"]) == (source, name)]
        events = written.Scalars(f"{source}/{name}")
        assert [e.step for e in events] == [r["version"] for r in own]
        assert [e.wall_time for e in events] == [r["time_s"] for r in own]
    assert written.Scalars("devices/online")


def test_a_live_simulation_says_where_to_look(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from fedstale.cli.main import app

    monkeypatch.chdir(tmp_path)
    small = write_small_app(tmp_path / "app")
    command = ["simulate", str(small), "--traces", "synthetic:5", "--until", "600s", "--json"]
    result = CliRunner().invoke(app, [*command, "--live-at", "0"])
    assert result.exit_code == 0, result.output
    assert "live page: http://127.0.0.1:" in result.stderr
    assert json.loads(result.stdout)["status"] in {"finished", "stopped"}
    result = CliRunner().invoke(app, [*command, "--live-at", "nowhere"])
    assert result.exit_code == 2
    assert "expected a port" in result.stderr
