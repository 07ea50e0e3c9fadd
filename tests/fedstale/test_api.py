"""What `fedstale` offers in Python: runs, comparisons, and errors in one sentence."""

import gc
import logging
import re
import signal
import warnings

import numpy as np
import plotly.graph_objects as go
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from shared_fleets import named
from thread_processes import threads_for_processes

import fedstale
from fedstale import api
from fedstale.errors import ConfigError, FedstaleError
from fedstale.flower import command_line
from fedstale.strategies import Callback, FedBuff

__all__ = ["threads_for_processes"]

COSTS = {"work_per_example": 0.5, "epochs": 1, "examples": 20}


@pytest.fixture
def client():
    """Return a ClientApp that moves the model towards the number of its device."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        own = context.node_config["partition-id"]
        weights = message.content["arrays"]["weights"].numpy()
        arrays = ArrayRecord({"weights": Array(weights + 0.1 * (own - weights))})
        metrics = MetricRecord({"train_loss": float(own), "num-examples": 20})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def evaluate(version, arrays):
    return MetricRecord({"accuracy": min(1.0, version / 10)})


def given(**changes):
    common = {"initial_arrays": {"weights": np.zeros(2)}, "traces": named("synthetic:20")}
    return {**common, "until": "20m", **COSTS, **changes}


def test_a_run_in_python_shows_how_far_it_is(client, monkeypatch, capsys):
    monkeypatch.setattr(api, "_LINE_EVERY_S", 0.0)
    for progress, shown in ((None, False), (True, True)):
        fedstale.simulate(client, strategy=FedBuff(5, 2), **given(), progress=progress)
        assert (
            bool(re.search(r"% done, round 3, [\d.]+ (s|min), ", capsys.readouterr().err)) == shown
        )


@pytest.mark.parametrize(
    ("level", "shown"), [(logging.DEBUG, logging.WARNING), (logging.INFO, logging.INFO)]
)
def test_flowers_log_is_shown_only_where_a_level_was_set(client, level, shown):
    flower, console, seen = logging.getLogger("flwr"), command_line.console(), []
    before = flower.level, console.level

    class Looking(Callback):
        def ended(self, run, status, reason):
            seen.append(console.level)

    # As Flower sets them when it is imported.
    flower.setLevel(level)
    console.setLevel(logging.INFO)
    try:
        fedstale.simulate(client, strategy=FedBuff(5, 2), **given(), callbacks=[Looking()])
        assert (seen, console.level) == ([shown], logging.INFO)
    finally:
        flower.setLevel(before[0])
        console.setLevel(before[1])


@pytest.mark.parametrize(
    "strategy", [FedBuff(5, 2), FedAvg(fraction_evaluate=0.0)], ids=["fedstale", "flower"]
)
def test_a_model_comes_in_the_order_of_the_apps_record(strategy, tmp_path):
    dtypes = [np.float64 if i in (0, 5) else np.int64 if i == 7 else np.float32 for i in range(13)]
    names = [f"{i}" for i in range(12)] + ["weights"]
    model = {n: np.zeros(2, dtype) for n, dtype in zip(names, dtypes, strict=True)}

    app = ClientApp()

    @app.train()
    def train(message, context):
        metrics = MetricRecord({"train_loss": 1.0, "num-examples": 20})
        content = {"arrays": message.content["arrays"], "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    settings = given(initial_arrays=model, until="3 rounds")
    run = fedstale.simulate(app, strategy=strategy, **settings, out=tmp_path / "run")
    assert list(run.model) == names
    if isinstance(strategy, FedBuff):  # Flower makes floats of all
        assert [run.model[name].dtype for name in names] == dtypes
    assert list(fedstale.read_run(tmp_path / "run").model) == names


def test_a_strategy_and_a_client_in_python_run_and_can_be_looked_at(client):
    run = fedstale.simulate(client, strategy=FedBuff(5, 2), evaluate=evaluate, **given())
    assert (run.status, run.end_s) == ("stopped", 1200.0)
    assert set(run.jobs["kind"]) == {"train"}
    assert run.last("server") == {"accuracy": 1.0}
    assert run.model["weights"].shape == (2,)
    assert (run.model["weights"] > 0).all()
    assert run.costs["jobs"] == len(run.jobs) == run.summary["jobs"]["sent"]
    figure = run.plot("accuracy")
    assert isinstance(figure, go.Figure)
    assert list(figure.data[0].y[:2]) == [0.0, 0.1]
    assert run.plot("accuracy", against="bytes").layout.xaxis.title.text.startswith("traffic")
    assert run.report() == run.folder / "report.html"
    assert "accuracy 100.0%" in run._repr_html_()
    with pytest.raises(ConfigError, match=r"metric = 'acuracy': expected one of \['accuracy'"):
        run.plot("acuracy")


def test_a_temporary_folder_goes_with_its_run_and_a_named_one_stays(client, tmp_path):
    run = fedstale.simulate(client, strategy=FedBuff(5, 2), **given(until="2m"))
    folder = run.folder
    assert folder.is_dir()
    del run
    gc.collect()
    assert not folder.exists()
    kept = fedstale.simulate(
        client, strategy=FedBuff(5, 2), out=tmp_path / "run", **given(until="2m")
    )
    del kept
    gc.collect()
    assert fedstale.read_run(tmp_path / "run").status == "stopped"


def test_the_same_call_gives_the_same_bytes_and_a_trace_set_is_what_its_name_means(client):
    runs = [
        fedstale.simulate(
            client, strategy=FedBuff(5, 2, seed=1), **given(seed=3, traces=traces, until="2m")
        )
        for traces in ("synthetic:20", named("synthetic:20", seed=3))
    ]
    for name in ("events.parquet", "metrics.parquet"):
        assert len({(run.folder / name).read_bytes() for run in runs}) == 1


def test_a_stock_strategy_ends_after_the_rounds_that_were_asked_for(client):
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    run = fedstale.simulate(client, strategy=strategy, **given(until="2 rounds"))
    assert run.summary["rounds"] == 2
    assert set(run.metrics["source"]) == {"train"}


def test_a_server_app_and_a_client_app_run_as_a_pair(client):
    server = ServerApp()

    @server.main()
    def main(grid, context):
        first = ArrayRecord({"weights": Array(np.zeros(2))})
        rounds = context.run_config["rounds"]
        FedBuff(5, 2).start(grid=grid, initial_arrays=first, num_rounds=rounds)

    run_config = {"rounds": 3}
    run = fedstale.simulate(
        (server, client), traces=named("synthetic:20"), run_config=run_config, **COSTS
    )
    assert (run.status, run.summary["rounds"]) == ("finished", 3)


def test_an_app_in_a_folder_runs_by_its_path(tmp_path):
    from small_app import write_small_app

    app = write_small_app(tmp_path / "app")
    run = fedstale.simulate(app, traces=named("synthetic:6"), until="2m", seed=2)
    assert run.summary["seed"] == 2
    again = fedstale.simulate(str(app), traces=named("synthetic:6"), until="2m", seed=2)
    assert run.jobs.equals(again.jobs)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"strategy": None}, "strategy missing: a ClientApp is run by a strategy"),
        ({"initial_arrays": None}, "initial_arrays missing: a ClientApp"),
        ({"until": None}, "until missing: a ClientApp"),
        ({"until": "soon"}, "until = 'soon': expected"),
        ({"epochs": None, "examples": None}, "is not declared: epochs, examples missing in"),
        ({"work_per_example": -1.0}, "costs.work_per_example = -1.0"),
        (
            {"work_per_exmple": 1.0},
            "simulate has no option 'work_per_exmple': expected 'work_per_ex",
        ),
        ({"trces": "x"}, "simulate has no option 'trces': expected 'traces'"),
        ({"executor": "processes"}, "executor = 'processes', workers = None: a ClientApp that is"),
        ({"traces": "nowhere.parquet"}, "traces = 'nowhere.parquet': no such file"),
    ],
)
def test_what_is_missing_is_one_sentence_that_names_it(client, tmp_path, changes, sentence):
    settings = given(strategy=FedBuff(5, 2), out=tmp_path / "run") | changes
    with pytest.raises(FedstaleError) as caught:
        fedstale.simulate(client, **settings)
    assert sentence in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_model_for_an_app_that_starts_its_own_is_one_sentence():
    with pytest.raises(ConfigError, match="initial_arrays and evaluate: expected together with a"):
        fedstale.simulate("digits", traces="synthetic:5", initial_arrays={"w": np.zeros(2)})


def test_finished_runs_are_compared_from_python(tmp_path):
    from compared_runs import write_finished

    folders = [
        write_finished(
            tmp_path / f"{strategy}-{seed}",
            seed=seed,
            run_config={"strategy": strategy},
            accuracies=[(0.0, 0.1), (600.0 * seed, last)],
        )
        for strategy, last in (("fedavg", 0.8), ("fedbuff", 0.9))
        for seed in (1, 2)
    ]
    found = fedstale.compare([fedstale.read_run(folder) for folder in folders])
    table = found.table.set_index(["variant", "measure"])
    assert table.loc[("strategy=fedbuff", "server accuracy"), "difference"] == pytest.approx(0.1)
    assert table.loc[("strategy=fedbuff", "server accuracy"), "pairs"] == 2
    assert table["difference"].loc["strategy=fedavg"].isna().all()
    assert "<td>strategy=fedbuff</td>" in found._repr_html_()
    assert "paired by seed with strategy=fedavg" in found._repr_html_()
    assert fedstale.compare(folders, reference="strategy=fedbuff").reference == "strategy=fedbuff"
    with pytest.raises(ConfigError, match="reference = 'x': expected one of"):
        fedstale.compare(folders, reference="x")
    with pytest.raises(ConfigError, match="expected at least one finished run"):
        fedstale.compare([])
    # Names that are given say more than settings, and strategies that were objects have none.
    named = fedstale.compare({"mine": folders[2:], "theirs": folders[:2]}, reference="theirs")
    table = named.table.set_index(["variant", "measure"])
    assert table.loc[("mine", "server accuracy"), "difference"] == pytest.approx(0.1)
    for runs in ([folders[0], folders[0]], []):
        with pytest.raises(ConfigError, match="runs of 'mine': expected one or more, each with"):
            fedstale.compare({"mine": runs, "theirs": folders[:2]})


@pytest.fixture
def plans_in_threads(threads_for_processes):
    """Run plans in this process, and close what the end of another would close."""
    yield
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()


@pytest.mark.usefixtures("plans_in_threads")
def test_a_plan_in_python_runs_and_writes_its_files(tmp_path, capfd):
    from small_app import write_small_app

    plan = {
        "app": str(write_small_app(tmp_path / "app")),
        "traces": "synthetic:6",
        "seeds": [1],
        "variants": {"one": {"run-config": {"rounds": 1}}, "two": {"run-config": {"rounds": 2}}},
    }
    shares = []
    out = tmp_path / "out"
    found = fedstale.compare(plan, out=out, workers=1, watch=lambda s: shares.append(dict(s)))
    assert [one.runs[0].summary["rounds"] for one in found.variants] == [1, 2]
    assert set(shares[-1].values()) == {1.0}
    assert (out / "comparison.html").is_file()
    with pytest.raises(ConfigError, match="workers = 0"):
        fedstale.compare(plan, workers=0)
    assert "runs are over" not in capfd.readouterr().err
    again = fedstale.compare(fedstale.Plan.from_table(plan, where="plan"), out=out, progress=True)
    assert again.table.equals(found.table)
    assert "2.0 of 2 runs are over" in capfd.readouterr().err


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        fedstale.simulat  # noqa: B018 - looked up on purpose


# Signals.


def stopped_at(version, number):
    def evaluates(at, arrays):
        if at == version:
            signal.raise_signal(number)
        return evaluate(at, arrays)

    return evaluates


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_process_once_the_run_is_written_and_it_goes_on_later(
    client, tmp_path, number, code
):
    settings = given(until="6 rounds", seed=1)

    def simulated(version, **more):
        evaluates = stopped_at(version, number)
        strategy = FedBuff(3, 2, seed=1)
        return fedstale.simulate(client, strategy=strategy, evaluate=evaluates, **settings, **more)

    # Whoever runs the tests behind nohup ignores SIGHUP, and so would the run.
    ours = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as caught:
            simulated(3, out=tmp_path / "run")
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, ours)
    assert caught.value.code == code
    run = fedstale.read_run(tmp_path / "run")
    assert (run.status, run.reason) == ("interrupted", signal.Signals(number).name)
    if number == signal.SIGHUP:
        return
    again = simulated(-1, out=tmp_path / "run", resume=True)
    assert again.jobs.equals(simulated(-1).jobs)


@pytest.mark.parametrize("handler", [lambda number, frame: None, signal.SIG_IGN])
def test_a_handler_of_the_users_own_stays(client, handler):
    before = signal.signal(signal.SIGTERM, handler)
    try:
        run = fedstale.simulate(
            client,
            strategy=FedBuff(3, 2, seed=1),
            evaluate=stopped_at(1, signal.SIGTERM),
            **given(until="3 rounds"),
        )
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert run.status == "stopped"
