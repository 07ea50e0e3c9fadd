import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from loopback import Loopback
from small_app import write_small_app
from tiny import COSTS, counting_app, fleet
from virtual_grid import VirtualGrid, adder, identity, record, weighed

from fedstale.config import SimulationConfig
from fedstale.deployment.run_folder import recorded
from fedstale.live import Board, observed
from fedstale.simulation.run import simulate
from fedstale.simulation.trace_grid import TraceGrid
from fedstale.strategies import FedAvg as StaleFedAvg
from fedstale.strategies import FedBuff
from fedstale.strategies.server.runtime import Callback
from fedstale.strategies.server.superlink import without_stalls
from fedstale.until import Until

WINDOWS = [[(0.0, 400.0)], [(100.0, 900.0)], [(0.0, 1000.0)], [(0.0, 15.0)]]


class Seen(Callback):
    """Notes what a display is told."""

    def __init__(self):
        self.moments, self.rows, self.merges, self.replies, self.rejections = [], [], [], [], []
        self.end = None

    def time_moved(self, run):
        self.moments.append((run.now(), run.n_online(), run.n_in_flight()))

    def metrics(self, run, version, source, values):
        self.rows += [(run.now(), version, source, *item) for item in values.items()]

    def new_version(self, run, version, arrays, updates):
        self.merges += [(one.message_id, one.staleness, one.weight) for one in updates]

    def reply(self, run, message_id, reply, status):
        self.replies.append((message_id, status))

    def rejected(self, run, message_id, *, reason):
        self.rejections.append((message_id, reason))

    def ended(self, run, status, reason):
        self.end = status, reason


@pytest.fixture
def run(tmp_path):
    app = write_small_app(tmp_path / "app")

    def run(name, *callbacks):
        config = SimulationConfig(app=str(app), traces="given", until="2 rounds")
        return simulate(config, tmp_path / name, traces=fleet(WINDOWS), callbacks=callbacks)

    return run


def test_watching_changes_no_byte_of_a_run(run, tmp_path):
    plain = run("plain").folder
    watched = run("watched", Board("small", every_s=0.0), Seen()).folder
    for name in ("events.parquet", "metrics.parquet", "model.safetensors"):
        assert (plain / name).read_bytes() == (watched / name).read_bytes(), name


def test_a_callback_sees_every_metric_once_and_every_failure_that_the_app_saw(run):
    seen, board = Seen(), Board("small", until=Until.parse("2 rounds"), every_s=0.0)
    folder = run("watched", seen, board).folder
    rows = pq.read_table(folder / "metrics.parquet").to_pylist()
    assert seen.rows == [tuple(row.values()) for row in rows]
    events = pq.read_table(folder / "events.parquet").to_pandas()
    delivered = events[np.isfinite(events["delivered_at"])]
    assert sorted(status for _, status in seen.replies) == sorted(delivered["status"])
    failed = delivered[delivered["status"] != "reported"]
    shown = board.snapshot()
    assert sorted(row[2] for row in shown["failures"]) == sorted(failed["status"])
    assert sorted(row[1] for row in shown["failures"]) == sorted(failed["device_id"])
    assert [now for now, *_ in seen.moments] == sorted(now for now, *_ in seen.moments)
    assert shown["share"] == 1.0
    assert seen.end[0] == "stopped"
    assert shown["ended"].startswith("stopped")


def test_a_callback_hears_of_merges_with_their_staleness():
    seen = Seen()
    grid = TraceGrid(fleet([[(0.0, 1000.0)]] * 3), counting_app(), costs=COSTS)
    grid.runtime.add(seen)
    with grid.running():
        strategy = FedBuff(concurrency=3, buffer_size=2)
        strategy.start(grid, ArrayRecord([np.zeros(3, np.float32)]), num_rounds=5)
    events = grid.events().to_pandas()
    merged = events[events["aggregated_version"] >= 0]
    assert sorted(m[1] for m in seen.merges) == sorted(merged["staleness"])
    assert len(seen.merges) == 10


def failing(message, grid):
    return 1.0, Error(code=7, reason="the battery is empty")


class Plain(Grid):
    """What a SuperLink's grid is to a ServerApp: no clock, no runtime."""

    def __init__(self, inner):
        self.inner = inner

    set_run = create_message = run = None

    def get_node_ids(self):
        return self.inner.get_node_ids()

    def push_messages(self, messages):
        return self.inner.push_messages(messages)

    def pull_messages(self, message_ids):
        self.inner.move(self.inner.time + 1.0)
        return self.inner.pull_messages(message_ids)

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError


def test_on_real_devices_a_strategy_is_watched_through_its_grid():
    seen, board = Seen(), Board("real", every_s=0.0)
    inner = VirtualGrid({1: adder(1.0), 2: adder(1.0), 3: failing})
    grid = observed(Plain(inner), seen, board)
    initial = record(w=np.zeros(2, np.float32))
    with identity():
        ids = list(grid.push_messages([message_to(node, initial) for node in (1, 2, 3)]))
        assert seen.moments[-1][2] == 3
        replies = list(grid.pull_messages(ids))
    assert len(replies) == 3
    assert seen.moments[-1][2] == 0
    assert [row[1:] for row in board.snapshot()["failures"]] == [
        ["node 3", "client-error", "the battery is empty"]
    ]
    assert list(grid.get_node_ids()) == [1, 2, 3]
    assert seen.moments[-1][1] == 3
    grid.runtime.new_version(2, {}, [weighed(ids[0], staleness=1)])
    grid.runtime.rejected(ids[1], reason="NaN")
    grid.runtime.rejected(ids[2], reason="error 7: the battery is empty")
    grid.runtime.metrics(1, "server", {"accuracy": 0.5})
    assert seen.merges == [(ids[0], 1, 0.5)]
    assert [row[2] for row in board.snapshot()["failures"]] == ["rejected", "client-error"]
    assert seen.rows[0][1:] == (1, "server", "accuracy", 0.5)


class OwnStart(FedAvg):
    """A stock strategy with a loop of its own, as Flower's examples have."""

    def start(self, grid, initial_arrays, num_rounds=3, timeout=3600, **others):
        arrays = initial_arrays
        for number in range(1, num_rounds + 1):
            messages = self.configure_train(number, arrays, ConfigRecord(), grid)
            replies = grid.send_and_receive(messages, timeout=timeout)
            arrays, _ = self.aggregate_train(number, replies)
        return arrays


@pytest.mark.parametrize(
    "strategy",
    [FedAvg(fraction_evaluate=0.0), OwnStart(), StaleFedAvg()],
    ids=["stock", "own", "ours"],
)
@pytest.mark.parametrize("order", ["page first", "folder first"])
def test_page_and_folder_see_the_same_run_in_any_order(strategy, order, tmp_path):
    seen, grid = Seen(), Plain(VirtualGrid({1: adder(1.0), 2: adder(3.0)}))
    if order == "page first":
        grid = observed(grid, seen)
    context = Context(1, 1, {}, RecordDict(), {})
    with identity(), recorded(grid, tmp_path / "run", context, app="adder") as own:
        if order == "folder first":
            assert observed(own, seen) is own
        with without_stalls(own) as again:
            assert again is own
            strategy.start(own, record(w=np.zeros(2, np.float32)), num_rounds=2)
    events = pq.read_table(tmp_path / "run" / "events.parquet").to_pandas()
    assert len(events) == len(seen.replies) == 4
    assert set(events["status"]) == {"reported"}
    rows = pq.read_table(tmp_path / "run" / "metrics.parquet").to_pylist()
    assert [(row["version"], row["source"]) for row in rows] == [r[1:3] for r in seen.rows]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["rounds"], summary["status"]) == (2, "finished")
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert seen.end == ("finished", "2 rounds of the app")


def message_to(node, arrays):
    config = ConfigRecord({"server-round": 1})
    return Message(RecordDict({"arrays": arrays, "config": config}), node, "train")


def test_a_simulation_is_watched_through_its_own_grid():
    grid = TraceGrid(fleet(WINDOWS), counting_app(), costs=COSTS)
    assert observed(grid, Seen()) is grid


def test_a_live_simulation_says_where_to_look(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from fedstale.cli.main import app

    monkeypatch.chdir(tmp_path)
    small = write_small_app(tmp_path / "app")
    command = ["simulate", str(small), "--traces", "synthetic:5", "--until", "600s", "--json"]
    with Loopback().installed():
        result = CliRunner().invoke(app, [*command, "--live", "0"])
    assert result.exit_code == 0, result.output
    assert "live page: http://127.0.0.1:" in result.stderr
    assert json.loads(result.stdout)["status"] in {"finished", "stopped"}
    result = CliRunner().invoke(app, [*command, "--live", "nowhere"])
    assert result.exit_code == 2
    assert "--live" in result.stderr
