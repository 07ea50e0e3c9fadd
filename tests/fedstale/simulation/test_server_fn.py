import flwr.server.server as flower_server
import numpy as np
import pandas as pd
import pytest
import small_app
from safetensors.numpy import load_file
from server_fn_app import CLIENT, SERVER, write_server_fn_app
from test_run import digest, patchy
from tiny import fleet

from fedstale.config import SimulationConfig
from fedstale.errors import ConfigError
from fedstale.simulation.run import simulate
from fedstale.traces import TraceSet

DAY_S = 86_400.0


@pytest.fixture
def run(tmp_path):
    """Return a function that simulates the app on some devices, by default patchy ones."""
    count = 0

    def go(traces=None, *, client=CLIENT, server=SERVER, **options):
        nonlocal count
        count += 1
        app = write_server_fn_app(tmp_path / f"app{count}", client=client, server=server)
        config = SimulationConfig(app=str(app), traces="given", **options)
        return simulate(config, tmp_path / f"run{count}", traces=traces or patchy(12))

    return go


def events_of(result):
    return pd.read_parquet(result.folder / "events.parquet")


def metrics_of(result):
    return pd.read_parquet(result.folder / "metrics.parquet")


def model_of(result):
    return list(load_file(result.folder / "model.safetensors").values())


@pytest.mark.parametrize("strategy", ["FedAvg", "FedAvgM", "FedAdam", "FedMedian", "Krum"])
@pytest.mark.usefixtures("no_pages")
def test_strategies_of_the_older_api_run_on_patchy_devices(run, strategy):
    result = run(run_config={"strategy": strategy, "rounds": 4})
    assert result.status == "finished", result.reason
    assert result.summary["rounds"] == 4
    metrics = metrics_of(result)
    assert set(metrics["source"]) == {"server", "train", "evaluate"}
    assert metrics["time_s"].is_monotonic_increasing
    assert metrics["time_s"].iloc[-1] > 0
    (w,) = model_of(result)
    last = metrics[(metrics.source == "server") & (metrics.name == "loss")]["value"].iloc[-1]
    assert np.linalg.norm(w - [1.0, -2.0, 0.5]) == pytest.approx(last)


@pytest.mark.usefixtures("no_pages")
def test_interrupted_and_late_devices_are_failures_that_a_round_survives(run):
    result = run(run_config={"rounds": 12, "timeout": 60.0})
    assert result.status == "finished"
    events = events_of(result)
    assert {"reported", "interrupted", "late"} <= set(events["status"])
    # Nothing is waited for longer than the timeout of its round.
    ends = events.groupby(["round", "kind"])[["sent_at", "delivered_at"]].agg(["min", "max"])
    assert (ends["delivered_at"]["max"] - ends["sent_at"]["min"]).max() <= 60.0 + 1e-9


@pytest.mark.usefixtures("no_pages")
def test_a_round_asks_at_once_those_who_are_online_then(run):
    traces = patchy(12)
    events = events_of(run(traces, run_config={"rounds": 6}))
    assert (events.groupby(["round", "kind"])["sent_at"].nunique() == 1).all()
    assert sorted(set(events["round"])) == [1, 2, 3, 4, 5, 6]
    for job in events.itertuples():
        device = traces.device_ids.get_loc(job.device_id)
        assert traces.availability.is_available(np.array([device]), job.sent_at).all()
    train = events[events.kind == "train"].groupby("sent_at")["device_id"].nunique()
    for sent_at, n in train.items():
        # fraction_fit = 1: everybody who is there.
        assert n == traces.availability.is_available(np.arange(12), sent_at).sum()


@pytest.mark.usefixtures("local_workers", "no_pages")
def test_the_same_seed_gives_byte_identical_files_with_any_number_of_workers(run):
    config = {"rounds": 5, "fraction-evaluate": 0.5}
    first, second = run(seed=3, run_config=config), run(seed=3, run_config=config)
    workers = run(seed=3, run_config=config, workers=2)
    other = run(seed=4, run_config=config)
    for name in ("events.parquet", "metrics.parquet", "model.safetensors"):
        assert digest(first.folder / name) == digest(second.folder / name)
        assert digest(first.folder / name) == digest(workers.folder / name)
    assert digest(first.folder / "model.safetensors") != digest(other.folder / "model.safetensors")


def hand_computed(rounds, n):
    """Return the weighted average of everybody's full-batch descent, round after round."""
    w = np.zeros(3)
    for _ in range(rounds):
        total, weight = np.zeros(3), 0
        for partition in range(n):
            rng = np.random.default_rng(partition)
            x = rng.normal(size=(10 + partition % 5, 3))
            y = x @ np.array([1.0, -2.0, 0.5]) + 0.1 * rng.normal(size=len(x))
            local = w.copy()
            for _ in range(2):
                local = local - 0.1 * x.T @ (x @ local - y) / len(x)
            total, weight = total + len(x) * local, weight + len(x)
        w = total / weight
    return w


@pytest.mark.usefixtures("no_pages")
def test_three_rounds_on_ideal_devices_equal_the_average_computed_by_hand(run):
    result = run(TraceSet.ideal(6), run_config={"rounds": 3})
    (w,) = model_of(result)
    np.testing.assert_allclose(w, hand_computed(3, 6), rtol=1e-13)
    assert set(result.summary["jobs"]) == {"sent", "reported"}


@pytest.mark.usefixtures("no_pages")
def test_metrics_carry_the_virtual_time_of_their_round(run):
    result = run(run_config={"rounds": 3})
    metrics, events = metrics_of(result), events_of(result)
    server = metrics[metrics.source == "server"]
    assert server["version"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert set(server["name"]) == {"loss", "accuracy"}
    for kind, source in (("train", "server"), ("train", "train"), ("evaluate", "evaluate")):
        ended = events[events.kind == kind].groupby("round")["delivered_at"].max()
        rows = metrics[(metrics.source == source) & (metrics.version > 0)]
        assert (rows["time_s"].to_numpy() == ended[rows["version"]].to_numpy()).all()
    rounds = metrics[(metrics.source == "evaluate") & (metrics.name == "round")]
    assert (rounds["value"] == rounds["version"]).all()


def test_a_round_waits_on_the_virtual_clock_until_enough_are_online(run):
    # Both are there from 3,000 s on; two units of work for each of 20 examples take 40 s.
    windows = [[(0.0, 100.0), (3000.0, 4000.0)], [(2000.0, 4000.0)]]
    result = run(fleet(windows, length=4000.0), run_config={"rounds": 1})
    assert result.status == "finished"
    (sent,) = set(events_of(result).query("kind == 'train'")["sent_at"])
    assert 3000.0 <= sent <= 3000.0 + 600.0


def test_too_few_clients_for_every_round_end_the_run_with_the_reason(run):
    result = run(run_config={"min-available": 50, "min-fit": 50, "fraction-evaluate": 0.0})
    assert result.status == "stuck"
    assert "for 50 clients" in result.reason
    assert len(events_of(result)) == 0


def test_a_run_that_only_ever_evaluated_for_want_of_clients_says_so(run):
    result = run(run_config={"min-available": 50, "min-fit": 50, "rounds": 2})
    assert (result.status, result.summary["rounds"]) == ("stuck", 0)
    assert "for 50 clients" in result.reason
    assert set(events_of(result)["kind"]) == {"evaluate"}


def test_a_strategy_that_waits_in_vain_round_after_round_is_stuck(run):
    config = {"min-available": 50, "min-fit": 50, "rounds": 1000, "fraction-evaluate": 0.0}
    result = run(run_config=config)
    assert result.status == "stuck"
    assert "of 12 devices were seen online at once" in result.reason


def test_like_flowers_own_a_wait_gives_up_after_a_day_and_takes_whom_it_finds(run):
    result = run(run_config={"min-available": 50, "rounds": 2, "fraction-evaluate": 0.0})
    assert result.status == "finished"
    first, second = sorted(set(events_of(result)["sent_at"]))
    assert DAY_S <= first <= DAY_S + 600.0
    assert second >= first + DAY_S


def test_a_client_that_answers_with_a_bad_status_is_rejected_with_its_words(run):
    client = CLIENT.replace(
        ".to_client()\n\n\napp",
        ".to_client()\n\n\n"
        "from flwr.client import Client\n"
        "from flwr.common import Code, FitRes, Parameters, Status\n\n\n"
        "class Unwilling(Client):\n"
        "    def fit(self, ins):\n"
        "        status = Status(Code.FIT_NOT_IMPLEMENTED, 'not today')\n"
        "        return FitRes(status, Parameters([], ''), 0, {})\n\n\n"
        "willing = client_fn\n\n\n"
        "def client_fn(context):\n"
        "    odd = context.node_config['partition-id'] % 2\n"
        "    return Unwilling() if odd else willing(context)\n\n\n"
        "app",
    )
    result = run(TraceSet.ideal(6), client=client, run_config={"fraction-evaluate": 0.0})
    assert result.status == "finished"
    events = events_of(result)
    refused = events[events.status == "rejected"]
    assert set(refused["device_id"]) == set(TraceSet.ideal(6).device_ids[1::2])
    assert set(refused["reason"]) == {"FIT_NOT_IMPLEMENTED: not today"}


@pytest.mark.usefixtures("no_pages")
def test_the_first_model_may_come_from_a_client(run):
    plain = run(run_config={"initial": False})
    assert plain.status == "finished"
    # Three numbers of 8 bytes, NumPy's header, and what goes around them.
    assert 3 * 8 + 128 < events_of(plain)["uploaded_bytes"].iloc[0] < 1_000
    result = run(run_config={"initial": False}, costs={"model-bytes": 2_000_000})
    assert result.status == "finished"
    events = events_of(result)
    assert events["kind"].iloc[0] == "get_parameters"
    assert events["work"].iloc[0] == 0
    assert events["uploaded_bytes"].iloc[0] == pytest.approx(2_000_000, rel=1e-3)
    loss = metrics_of(result).query("source == 'server' and name == 'loss'")["value"]
    assert loss.iloc[0] == pytest.approx(np.linalg.norm(0.25 - np.array([1.0, -2.0, 0.5])))


def test_flowers_own_functions_are_back_after_a_run(run):
    before = dict(vars(flower_server))
    run(run_config={"rounds": 1})
    assert dict(vars(flower_server)) == before


WORKFLOW = SERVER.replace(
    "app = ServerApp(server_fn=server_fn)",
    """app = ServerApp()


@app.main()
def main(grid, context):
    from flwr.server.compat import LegacyContext
    from flwr.server.workflow import DefaultWorkflow

    parts = server_fn(context)
    legacy = LegacyContext(context=context, config=parts.config, strategy=parts.strategy)
    DefaultWorkflow()(grid, legacy)
""",
)


@pytest.mark.usefixtures("no_pages")
def test_a_workflow_of_the_older_api_runs_without_a_thread_of_its_own(run):
    first = run(server=WORKFLOW, run_config={"rounds": 3})
    second = run(server=WORKFLOW, run_config={"rounds": 3})
    assert first.status == "finished", first.reason
    assert sorted(set(events_of(first)["round"])) == [1, 2, 3]
    assert first.summary["rounds"] == 3
    assert set(metrics_of(first)["source"]) == {"server", "train", "evaluate"}
    for name in ("events.parquet", "metrics.parquet", "model.safetensors"):
        assert digest(first.folder / name) == digest(second.folder / name)


def test_a_strategy_may_ask_clients_for_their_properties_first(run):
    server = SERVER.replace(
        "def server_fn(context):",
        "from flwr.common import GetPropertiesIns\n\n\n"
        "class Curious(strategies.FedAvg):\n"
        "    def configure_fit(self, server_round, parameters, client_manager):\n"
        "        asked = super().configure_fit(server_round, parameters, client_manager)\n"
        "        ins = GetPropertiesIns({})\n"
        "        found = [c.get_properties(ins, None, server_round).properties for c, _ in asked]\n"
        "        return [a for a, p in zip(asked, found) if p['odd']]\n\n\n"
        "strategies.Curious = Curious\n\n\n"
        "def server_fn(context):",
    )
    client = CLIENT.replace(
        "    def get_parameters(",
        "    def get_properties(self, config):\n"
        "        return {'odd': self.partition % 2}\n\n"
        "    def get_parameters(",
    )
    config = {"strategy": "Curious", "rounds": 2, "fraction-evaluate": 0.0}
    result = run(TraceSet.ideal(6), server=server, client=client, run_config=config)
    assert result.status == "finished", result.reason
    events = events_of(result)
    assert events["kind"].tolist() == 2 * (6 * ["get_properties"] + 3 * ["train"])
    assert (events.loc[events.kind == "get_properties", "work"] == 0).all()


@pytest.mark.usefixtures("no_pages")
def test_without_flowers_names_only_apps_of_the_older_api_end_and_with_one_sentence(run, without):
    without("flwr.server.server:run_fl")
    with pytest.raises(ConfigError, match=r"older API: .* has no flwr\.server\.server:run_fl: "):
        run(run_config={"rounds": 1})
    # A workflow of it is in a function of the message API, and would ask from threads.
    workflow = run(server=WORKFLOW, run_config={"rounds": 1})
    assert workflow.status == "failed"
    assert "older API: " in workflow.reason


@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize(
    "name",
    [
        "flwr.server.server:run_fl",
        "flwr.server.compat:LegacyContext",
        "flwr.serverapp:ServerApp._main",
        "flwr.common.serde:message_to_proto",
        "flwr.app:Array.numpy",
    ],
)
def test_an_app_of_the_message_api_does_not_miss_names_that_it_does_not_need(run, without, name):
    app = {"client": small_app.CLIENT, "server": small_app.SERVER, "run_config": {"rounds": 2}}
    whole = run(**app)
    without(name)
    result = run(**app)
    assert result.status == "finished", result.reason
    for file in ("events.parquet", "metrics.parquet", "model.safetensors"):
        assert digest(result.folder / file) == digest(whole.folder / file)


def test_a_flower_without_what_every_simulation_needs_ends_it_with_one_sentence(run, without):
    without("flwr.supercore.run:Run")
    with pytest.raises(ConfigError, match=r"simulation: .* no flwr\.supercore\.run:Run.* tested$"):
        run()


def test_without_flowers_format_of_messages_a_run_writes_no_checkpoint_and_cannot_go_on(
    run, without, tmp_path
):
    without("flwr.common.serde:message_to_proto")
    assert run(run_config={"rounds": 1}, traces=TraceSet.ideal(3)).status == "finished"
    app = str(write_server_fn_app(tmp_path / "app"))
    config = SimulationConfig(app=app, traces="given")
    with pytest.raises(ConfigError, match="simulations on disk: "):
        simulate(config, tmp_path / "run", traces=patchy(2), resume=True)
