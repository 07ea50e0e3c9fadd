"""A trace acted by nodes: the same jobs, instants and merges as in a simulation of it."""

import heapq
import json
import math
import re
import shutil

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from typer.testing import CliRunner

from fedstale.agents import AgentSelector
from fedstale.cli.main import app as fedstale
from fedstale.client import ForecastMod
from fedstale.config import Costs
from fedstale.contrib.replay.client import REALTIME_RECORD, RealtimeApp
from fedstale.contrib.replay.grid import ReplayGrid
from fedstale.deployment import run_folder
from fedstale.deployment.run_folder import JobLog, recorded
from fedstale.errors import ConfigError, ProtocolError
from fedstale.flower import identity
from fedstale.reports.run import Run
from fedstale.simulation import TraceGrid
from fedstale.simulation.devices import FIRST_NODE_ID
from fedstale.strategies import FedBuff, GapAware
from fedstale.strategies.server.runtime import REPORTED, Clock
from fedstale.strategies.server.superlink import SuperLinkGrid
from fedstale.traces import TraceSet

UNIX = 1.75e9
COSTS = Costs(work_per_example=30.0, epochs=1, examples=10, model_bytes=3_000_000)
N = 24


def trainer(said=None):
    app = ClientApp()

    @app.train()
    def train(message, context):
        assert set(message.content) == {"arrays", "config"}
        w = message.content["arrays"]["w"].numpy() + np.float32(1 + context.node_id % 7)
        metrics = MetricRecord({"num-examples": 5 + context.node_id % 3, "train_loss": 1.0})
        content = RecordDict({"arrays": ArrayRecord({"w": Array(w)}), "metrics": metrics})
        if said is not None:
            content["fedstale.forecast"] = ConfigRecord(said)
        return Message(content, reply_to=message)

    return app


class ActingGrid(Grid, Clock):
    """A SuperLink whose node 90 + i acts device i; its clock moves when somebody waits."""

    def __init__(self, n, app, *, overhead_s=0.0, first=90):
        self.time, self.replies, self.heap, self.n_sent = 5.0, {}, [], 0
        self.nodes = {first + i: 0.0 for i in range(n)}
        self.app, self.overhead_s = app, overhead_s

    def now(self):
        return self.time

    def unix(self):
        return UNIX + self.time

    def wait(self, until):
        target = min(until, self.heap[0][0] if self.heap else math.inf, self.time + 1.0)
        self.time = max(target, self.time)
        while self.heap and self.heap[0][0] <= self.time:
            _, _, reply = heapq.heappop(self.heap)
            self.replies[reply.metadata.reply_to_message_id] = reply
        return True

    def push_messages(self, messages):
        ids = []
        for message in messages:
            self.n_sent += 1
            message.metadata.__dict__["_message_id"] = f"m{self.n_sent}"
            node = message.metadata.dst_node_id
            clock = [max(self.time, self.nodes[node]) + self.overhead_s]

            def sleep(seconds, clock=clock):
                clock[0] += seconds

            app = RealtimeApp(self.app, now=lambda clock=clock: UNIX + clock[0], sleep=sleep)
            context = Context(1, 1000 + node % 90, {}, RecordDict(), {})
            reply = app(message, context)
            self.nodes[node] = clock[0]
            heapq.heappush(self.heap, (clock[0], self.n_sent, reply))
            ids.append(f"m{self.n_sent}")
        return ids

    def pull_messages(self, message_ids):
        return [self.replies.pop(i) for i in list(message_ids) if i in self.replies]

    def get_node_ids(self):
        return list(self.nodes)

    def set_run(self, run):
        raise NotImplementedError

    run = None

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError


def connected_to(acting):
    return SuperLinkGrid(acting, clock=acting)


def recording(acting):
    grid, log = connected_to(acting), JobLog()
    grid.runtime.add(log)
    return grid, log


def initial():
    return ArrayRecord({"w": Array(np.zeros(3, np.float32))})


STRATEGIES = {
    "fedbuff": lambda: FedBuff(concurrency=6, buffer_size=3, seed=4),
    "gap-aware": lambda: GapAware(concurrency=5, buffer_size=2, seed=5),
}


def simulated(traces, strategy, timeout, **options):
    grid = TraceGrid(traces, trainer(), costs=COSTS, **options)
    with grid.running():
        result = strategy.start(grid, initial(), num_rounds=15, timeout=timeout)
    return grid.events().to_pandas(), result


def replayed(traces, strategy, timeout, *, speed_up=40.0, overhead_s=0.0, **options):
    acting = ActingGrid(traces.n_devices, trainer(), overhead_s=overhead_s)
    nodes = [90 + i for i in range(traces.n_devices)]
    grid = ReplayGrid(
        SuperLinkGrid(acting, clock=acting),
        traces,
        nodes,
        costs=COSTS,
        speed_up=speed_up,
        lead_s=0.0,
        unix_now=acting.unix,
        **options,
    )
    with identity(1):
        result = strategy.start(grid, initial(), num_rounds=15, timeout=timeout)
    return grid.events().to_pandas(), result, grid


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_replay_on_ideal_nodes_is_the_simulation(name):
    traces = TraceSet.synthetic(N, days=1, seed=3)
    expected, model = simulated(traces, STRATEGIES[name](), 3000.0)
    seen, same_model, grid = replayed(traces, STRATEGIES[name](), 3000.0)
    assert expected.status.nunique() > 1, "nothing is lost: a poor trace for this test"
    exact = [
        "job_id",
        "node_id",
        "device_id",
        "kind",
        "round",
        "base_version",
        "aggregated_version",
    ]
    assert (seen[exact] == expected[exact]).all(axis=None)
    # A job that is out at the end has not ended in any of the two.
    assert (seen.status == expected.status).all(), (seen.status, expected.status)
    for column in ("sent_at", "reported_at", "delivered_at", "staleness", "weight"):
        np.testing.assert_allclose(seen[column], expected[column], atol=1e-2, err_msg=column)
    delivered = seen.status == REPORTED
    trained = expected.downloaded_at[delivered]
    np.testing.assert_allclose(seen.downloaded_at[delivered], trained, atol=1e-2)
    np.testing.assert_array_equal(model.arrays["w"].numpy(), same_model.arrays["w"].numpy())
    assert max(grid.late_s) == pytest.approx(0.0, abs=1e-3)


def test_without_a_filter_lost_jobs_and_replies_are_pulled_as_with_all_their_ids():
    traces = TraceSet.synthetic(N, days=1, seed=3)

    def pulled(**filtered):
        acting = ActingGrid(N, trainer())
        nodes = [90 + i for i in range(N)]
        grid = ReplayGrid(
            connected_to(acting), traces, nodes, costs=COSTS, speed_up=40.0, unix_now=acting.unix
        )
        with identity(1):
            records = RecordDict({"arrays": initial(), "config": ConfigRecord({})})
            ids = grid.push_messages(
                [Message(records, FIRST_NODE_ID + i, "train", ttl=3000.0) for i in range(N)]
            )
            found = []
            while grid.now() < 4000.0:
                grid.wait(grid.now() + 100.0)
                found += grid.pull_messages(**{name: ids for name in filtered})
        return [(reply.metadata.reply_to_message_id, reply.has_error()) for reply in found]

    unfiltered = pulled()
    assert len({failed for _, failed in unfiltered}) == 2
    assert pulled(message_ids=True) == pulled(reply_to_message_ids=True) == unfiltered


def test_overhead_within_a_job_does_not_show_and_beyond_it_is_told(caplog):
    traces = TraceSet.synthetic(N, days=1, seed=3)
    strategy = STRATEGIES["fedbuff"]
    _, _, grid = replayed(traces, strategy(), 3000.0, speed_up=40.0, overhead_s=0.5)
    assert max(grid.late_s) == pytest.approx(0.0, abs=1e-3)
    assert "after its reply was due" not in caplog.text
    _, _, grid = replayed(traces, strategy(), 3000.0, speed_up=200.0, overhead_s=5.0)
    assert max(grid.late_s) > 2.0
    assert caplog.text.count("after its reply was due") == 1


def test_a_recorded_grid_knows_what_a_server_knows():
    acting = ActingGrid(4, trainer(), first=2**64 - 20)
    grid, log = recording(acting)
    with identity(1):
        GapAware(concurrency=3, buffer_size=2, seed=1).start(grid, initial(), 4, timeout=60.0)
    events = log.events().to_pandas()
    assert set(events.aggregated_version) >= {1, 2, 3, 4}
    assert events.sent_at.iloc[0] == 0.0
    assert {int(node) for node in events.device_id} <= set(acting.nodes)
    assert [int(node) % 2**64 for node in events.node_id] == [int(n) for n in events.device_id]
    assert (events.downloaded_bytes > 0).all()
    assert events.compute_s.isna().all()
    done = events[events.aggregated_version > 0]
    assert (done.delivered_at >= done.sent_at).all()
    assert (done.status == REPORTED).all()


@pytest.mark.parametrize(
    ("said", "expected"), [({"p_finish": 0.75}, [0.75]), ({"p_finish": 1.5}, []), (None, [])]
)
def test_a_recorded_training_holds_the_chance_that_its_device_stated_before(said, expected):
    grid, log = recording(ActingGrid(1, trainer(said)))
    with identity(1):
        FedBuff(concurrency=1, buffer_size=1, seed=4).start(grid, initial(), 3, timeout=60.0)
    stated = log.events()["reported_p_finish"].to_pylist()
    assert math.isnan(stated[0])
    assert {p for p in stated[1:] if not math.isnan(p)} == set(expected)


def test_a_plan_is_kept_and_nonsense_is_rejected():
    plan, clock = {"train_at": 1.0, "reply_at": 2.0}, [0.5]

    def answered(plan):
        def sleep(seconds):
            clock[0] += seconds

        records = {"arrays": initial(), "config": ConfigRecord({})}
        content = RecordDict({**records, REALTIME_RECORD: ConfigRecord(plan)})
        app = RealtimeApp(trainer(), now=lambda: clock[0], sleep=sleep)
        return app(Message(content, 9, "train"), Context(1, 9, {}, RecordDict(), {}))

    with identity(1):
        assert dict(answered(plan).content[REALTIME_RECORD]) == {
            "taken_at": 0.5,
            "began_at": 1.0,
            "trained_at": 1.0,
            "left_at": 2.0,
        }
        for wrong in ({}, {**plan, "train_at": "soon"}, {**plan, "reply_at": math.inf}):
            with pytest.raises(ProtocolError, match=REALTIME_RECORD):
                answered(wrong)


def test_the_folder_of_a_real_run_is_one_of_a_run(tmp_path):
    acting = ActingGrid(4, trainer())
    context = Context(1, 1, {}, RecordDict(), {"seed": 3, "run-folder": str(tmp_path / "run")})
    with (
        identity(1),
        recorded(connected_to(acting), tmp_path / "run", context, app="adder") as grid,
    ):
        GapAware(concurrency=3, buffer_size=2, seed=1).start(
            grid, initial(), 4, timeout=60.0, evaluate_fn=lambda v, a: MetricRecord({"loss": v})
        )
    record = Run(tmp_path / "run")
    assert record.summary["status"] == "finished"
    assert (record.summary["rounds"], record.summary["seed"], record.summary["devices"]) == (
        4,
        3,
        4,
    )
    assert set(record.metrics[record.metrics.source == "server"].version) == {0, 1, 2, 3, 4}
    assert (tmp_path / "run" / "model.safetensors").is_file()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "nan" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL).lower()
    json.loads((tmp_path / "run" / "summary.json").read_text(), parse_constant=pytest.fail)


def served(place, *, resume=True, acting=None, evaluate_fn=None, kept="kept"):
    """Make six versions with checkpoints and a run folder, and return what came of it."""
    config = {"checkpoints": str(place / kept), "resume": str(place / kept) if resume else ""}
    context = Context(1, 1, {}, RecordDict(), {"seed": 3, **config})
    with (
        identity(1),
        recorded(
            connected_to(acting or ActingGrid(4, trainer(), overhead_s=2.0)),
            place / "run",
            context,
            app="adder",
        ) as grid,
    ):
        strategy = GapAware(
            concurrency=3,
            buffer_size=2,
            seed=1,
            checkpoints=config["checkpoints"],
            resume=config["resume"] or None,
        )
        strategy.start(grid, initial(), 6, timeout=60.0, evaluate_fn=evaluate_fn or evaluated)
    return Run(place / "run")


def evaluated(version, arrays):
    return MetricRecord({"loss": float(version)})


@pytest.mark.parametrize("killed_at", [0, 1, 4])
def test_a_killed_run_goes_on_in_its_folder(tmp_path, killed_at, monkeypatch):
    monkeypatch.setattr(run_folder, "_REST", 0.0)
    place, crashed = tmp_path / "place", tmp_path / "crashed"

    def evaluate(version, arrays):
        if version == killed_at:
            # As a kill -9 at this instant leaves it.
            shutil.copytree(place, crashed)
        return evaluated(version, arrays)

    served(place, evaluate_fn=evaluate)
    assert not (crashed / "run" / "summary.json").exists()
    shutil.rmtree(place)
    crashed.rename(place)
    acting = ActingGrid(4, trainer(), overhead_s=2.0)
    acting.n_sent = 1000  # ids of messages are not given twice
    record = served(place, acting=acting)
    assert (record.summary["status"], record.summary["rounds"]) == ("finished", 6)
    server = record.metrics[record.metrics.source == "server"]
    assert [*server.version] == [0, 1, 2, 3, 4, 5, 6]
    assert server.time_s.is_monotonic_increasing
    jobs = record.jobs
    merged = jobs.aggregated_version[jobs.aggregated_version > 0].value_counts()
    # A version whose checkpoint was written has its jobs; that of the kill is made again.
    assert merged.to_dict() == dict.fromkeys(range(1, 7), 2)


def test_a_failed_run_goes_on_and_another_one_does_not(tmp_path):
    def evaluate(version, arrays):
        if version == 3:
            raise RuntimeError("no such thing")
        return evaluated(version, arrays)

    with pytest.raises(RuntimeError):
        served(tmp_path, evaluate_fn=evaluate)
    assert Run(tmp_path / "run").summary["status"] == "failed"
    with pytest.raises(ConfigError, match=r"run-folder = .* expected a new folder, or resume"):
        served(tmp_path, resume=False)
    with pytest.raises(ConfigError, match=r"run-folder = .* expected a new folder, or resume"):
        served(tmp_path, kept="other")
    record = served(tmp_path)
    assert record.summary["status"] == "finished"
    assert set(record.metrics[record.metrics.source == "server"].version) == set(range(7))
    words = ["deploy", "model", str(tmp_path / "kept"), str(tmp_path / "now.safetensors")]
    assert CliRunner().invoke(fedstale, words).exit_code == 0
    model = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert (tmp_path / "now.safetensors").read_bytes() == model


def test_a_server_without_its_agent_and_forecasts_goes_on_and_says_so(tmp_path, caplog):
    mod, inner = ForecastMod(tmp_path / "no forecaster"), trainer()
    acting = ActingGrid(4, lambda message, context: mod(message, context, inner))
    selector, context = AgentSelector(tmp_path / "nowhere"), Context(1, 1, {}, RecordDict(), {})
    with (
        identity(1),
        caplog.at_level("WARNING"),
        recorded(connected_to(acting), tmp_path / "run", context, app="adder") as grid,
    ):
        FedBuff(3, 2, selector=selector).start(grid, initial(), 2, timeout=60.0)
    hint = Run(tmp_path / "run").summary["hint"]
    for words in ("no agent.toml there", "no device made a forecast"):
        assert words in hint
        assert words in caplog.text
        assert words in (tmp_path / "run" / "report.html").read_text()


def test_a_device_that_never_answers_is_named_after_its_timeout_and_the_run_goes_on(
    tmp_path, caplog
):
    class SilentNode(ActingGrid):
        def pull_messages(self, message_ids):
            found = super().pull_messages(message_ids)
            return [reply for reply in found if reply.metadata.src_node_id != 91]

    acting, context = SilentNode(4, trainer(), overhead_s=2.0), Context(1, 1, {}, RecordDict(), {})
    with (
        identity(1),
        caplog.at_level("INFO"),
        recorded(connected_to(acting), tmp_path / "run", context, app="adder") as grid,
    ):
        FedBuff(4, 2, seed=1).start(grid, initial(), 60, timeout=30.0)
    jobs = Run(tmp_path / "run").jobs
    silent = jobs[jobs.device_id == "91"]
    assert {*silent.status} <= {"late", "in-flight"}
    late = silent[silent.status == "late"]
    assert len(late) >= 2
    assert set(late.reason) == {"no reply within 30 s"}
    assert set(jobs[jobs.device_id != "91"].status) <= {"reported", "in-flight", "rejected"}
    assert jobs.aggregated_version.max() == 60
    assert f"node 91: job {late.job_id.iloc[0]} timed out: no reply within 30 s" in caplog.text
    assert "no reply within 30 s" in (tmp_path / "run" / "report.html").read_text()


def test_no_folder_and_grids_that_record_themselves_are_left_alone(tmp_path):
    context = Context(1, 1, {}, RecordDict(), {})
    acting = ActingGrid(1, trainer())
    with recorded(acting, "", context, app="x") as grid:
        assert grid is acting
    own = TraceGrid(TraceSet.synthetic(2, days=1, seed=3), trainer(), costs=COSTS)
    with recorded(own, tmp_path / "run", context, app="x") as grid:
        assert grid is own
    assert not (tmp_path / "run").exists()
