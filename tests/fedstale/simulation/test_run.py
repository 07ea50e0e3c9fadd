import hashlib
import json
import os
import platform
import sys
import types
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import tomli_w
from interruptions import files
from small_app import CLIENT, PYPROJECT, SERVER, write_small_app
from tiny import fleet

from fedstale.config import SimulationConfig
from fedstale.errors import ConfigError, TraceError
from fedstale.machine import release
from fedstale.simulation import nodes
from fedstale.simulation.run import simulate

STOCK = ["FedAvg", "FedAvgM", "FedAdam", "FedYogi", "FedAdagrad", "FedProx", "FedMedian", "Krum"]


def patchy(n, seed=0):
    """Return devices that are there about half of the time, of different speeds."""
    rng = np.random.default_rng(seed)
    windows = []
    for _ in range(n):
        edges = np.sort(rng.choice(np.arange(1, 400), size=8, replace=False)) * 10.0
        windows.append(edges.reshape(-1, 2))
    return fleet(windows, length=4000.0, compute=rng.lognormal(0, 1, n))


@pytest.fixture
def run(tmp_path):
    """Return a function that simulates the small app and returns the result and its folder."""
    count = 0

    def go(traces=None, *, app=None, **options):
        nonlocal count
        count += 1
        directory = app or write_small_app(tmp_path / f"app{count}")
        config = SimulationConfig(app=str(directory), traces="given", **options)
        return simulate(config, tmp_path / f"run{count}", traces=traces or patchy(12))

    return go


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def without(name, traces, devices):
    """Return traces in which some devices have nothing of a rate at any time."""
    factors = np.isin(np.arange(traces.n_devices), devices, invert=True).astype(float)
    return replace(traces, **{name: getattr(traces, name).scaled(factors)})


@pytest.mark.parametrize("name", ["compute", "downlink", "uplink"])
def test_devices_without_any_of_a_rate_are_named_before_the_run(run, name, caplog):
    first, second = patchy(4).device_ids[[1, 3]]
    with caplog.at_level("WARNING", "fedstale.simulation"):
        result = run(without(name, patchy(4), [1, 3]), run_config={"rounds": 1})
    said = f"{name} is 0 throughout for 2 of 4 ({first!r}, {second!r})"
    assert said in result.summary["hint"]
    assert [said in line for line in caplog.messages].count(True) == 1
    assert "is 0 throughout" not in run(run_config={"rounds": 1}).summary["hint"]
    with pytest.raises(TraceError, match=f"{name} is 0 throughout for all devices"):
        run(without(name, patchy(4), range(4)), run_config={"rounds": 1})


def test_where_no_message_has_work_no_device_needs_a_processor(run):
    given = {"run_config": {"rounds": 1}, "costs": {"work.train": 0, "work.evaluate": 0}}
    result = run(without("compute", patchy(4), range(4)), **given)
    assert result.summary["jobs"]["reported"] > 0
    assert "is 0 throughout" not in result.summary["hint"]


@pytest.mark.parametrize("strategy", STOCK)
@pytest.mark.usefixtures("no_pages")
def test_stock_strategies_run_on_patchy_devices(run, strategy):
    result = run(run_config={"strategy": strategy, "rounds": 3})
    assert result.status == "finished", result.reason
    metrics = pd.read_parquet(result.folder / "metrics.parquet")
    assert set(metrics["source"]) >= {"server", "train"}
    assert metrics["time_s"].is_monotonic_increasing
    assert result.summary["rounds"] == 3


@pytest.mark.usefixtures("no_pages")
def test_training_learns_and_the_model_is_kept(run):
    result = run(run_config={"rounds": 15})
    metrics = pd.read_parquet(result.folder / "metrics.parquet")
    loss = metrics[(metrics.source == "server") & (metrics.name == "loss")]["value"]
    assert loss.iloc[-1] < 0.2 * loss.iloc[0]
    from safetensors.numpy import load_file

    (w,) = load_file(result.folder / "model.safetensors").values()
    assert np.linalg.norm(w - [1.0, -2.0, 0.5]) == pytest.approx(loss.iloc[-1])


@pytest.mark.parametrize("on_interrupt", ["abort", "pause"])
@pytest.mark.usefixtures("no_pages")
def test_events_show_lost_work_and_the_ledger_closes(run, on_interrupt):
    result = run(run_config={"rounds": 12}, on_interrupt=on_interrupt)
    events = pd.read_parquet(result.folder / "events.parquet")
    if on_interrupt == "abort":
        assert "interrupted" in set(events["status"])
    summary = json.loads((result.folder / "summary.json").read_text())
    for account in ("device_s", "compute_s", "bytes"):
        parts = summary[account]
        assert parts["total"] > 0
        assert parts["total"] == pytest.approx(
            parts["used"] + parts["wasted"] + parts["in-flight"], rel=1e-12
        )
    assert summary["jobs"]["sent"] == len(events)
    assert sum(v for k, v in summary["jobs"].items() if k != "sent") == len(events)


@pytest.mark.parametrize("on_interrupt", ["abort", "pause"])
@pytest.mark.usefixtures("no_pages")
def test_the_ledger_agrees_with_the_traces(run, on_interrupt):
    traces = patchy(12)
    result = run(traces, run_config={"rounds": 12}, on_interrupt=on_interrupt, until="9000s")
    events = pd.read_parquet(result.folder / "events.parquet")
    end = result.summary["virtual_s"]
    # Devices are there when they are asked, and begin at once.
    assert np.isfinite(events["started_at"]).all()
    for job in events.itertuples():
        # A device spends exactly the time in which it is available between start and end.
        device = [traces.device_ids.get_loc(job.device_id)]
        t, busy, stop = job.started_at, 0.0, min(job.ended_at, end)
        while t < stop:
            (begin,), (finish,) = traces.availability.window_at_or_after(device, [t])
            busy += max(min(finish, stop) - begin, 0.0)
            t = finish
        assert job.download_s + job.compute_s + job.upload_s == pytest.approx(busy, abs=1e-6)
        (speed,) = traces.compute.value_at(device, [0.0])
        assert job.work == pytest.approx(job.compute_s * speed, rel=1e-9)
        assert job.downloaded_bytes == pytest.approx(job.download_s * 1e6, rel=1e-9)


@pytest.mark.usefixtures("no_pages")
def test_the_same_seed_gives_byte_identical_files(run):
    first = run(seed=3, run_config={"rounds": 4})
    second = run(seed=3, run_config={"rounds": 4})
    other = run(seed=4, run_config={"rounds": 4})
    assert files(first.folder) == files(second.folder)
    assert digest(first.folder / "events.parquet") != digest(other.folder / "events.parquet")


# Every day once in real processes, which load the app and share memory with this one.
@pytest.mark.smoke
@pytest.mark.usefixtures("no_pages")
def test_two_processes_give_byte_identical_files(run):
    first = run(seed=3, run_config={"rounds": 4})
    second = run(seed=3, run_config={"rounds": 4}, executor="processes", workers=2)
    assert files(first.folder) == files(second.folder)
    assert second.summary["executor"] == "2 processes"


@pytest.mark.usefixtures("no_pages")
def test_a_summary_says_with_what_and_on_what_it_was_made(run):
    summary = run(run_config={"rounds": 2}).summary
    for package in ("flwr", "numpy"):
        assert summary["versions"][package] == release(package)
    assert summary["versions"]["python"] == platform.python_version()
    assert summary["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert summary["machine"]["system"].startswith(platform.system())
    assert platform.node() not in str(summary["machine"])


@pytest.mark.parametrize(
    ("until", "reason"),
    [("40m", "2,400 s"), ("2 rounds", "2 rounds"), ("accuracy 0.3", "accuracy 0.3")],
)
def test_a_run_ends_where_it_was_asked_to(run, until, reason):
    result = run(until=until, run_config={"rounds": 1000})
    assert result.status == "stopped"
    assert reason in result.reason
    assert (result.folder / "events.parquet").is_file()


@pytest.mark.usefixtures("no_pages")
def test_the_resolved_config_reads_back_and_repeats_the_run(run, tmp_path):
    first = run(seed=5, run_config={"rounds": 2})
    config = SimulationConfig.read(first.folder / "config.toml")
    assert config.costs == {
        "work-per-example": 1.0,
        "evaluate-work-per-example": 0.3,
        "epochs": 2,
        "examples": 20,
        "constant-replies": False,
    }
    again = simulate(config, tmp_path / "again", traces=patchy(12))
    assert digest(again.folder / "events.parquet") == digest(first.folder / "events.parquet")
    (tmp_path / "copy.toml").write_text(tomli_w.dumps(config.table()))
    assert SimulationConfig.read(tmp_path / "copy.toml") == config


@pytest.mark.usefixtures("no_pages")
def test_a_part_of_the_devices_can_be_enrolled(run):
    result = run(devices=5, run_config={"rounds": 2})
    assert result.summary["devices"] == 5


def test_an_app_whose_clients_always_fail_fails_with_their_reason(run, tmp_path):
    client = CLIENT.replace("    x, y = data(", "    raise ValueError('no data')\n    x, y = data(")
    result = run(app=write_small_app(tmp_path / "broken", client=client))
    assert result.status == "failed"
    assert "ValueError: no data (client.py:" in result.reason


def test_a_server_that_raises_fails_with_the_place(run, tmp_path):
    server = SERVER.replace("    config = context", "    1 / 0\n    config = context")
    result = run(app=write_small_app(tmp_path / "broken", server=server))
    assert result.status == "failed"
    assert "ZeroDivisionError" in result.reason
    assert "server.py:" in result.reason


def test_ctrl_c_keeps_what_was_done(run, tmp_path):
    server = SERVER.replace(
        "    error = float",
        "    if server_round == 2:\n        raise KeyboardInterrupt\n    error = float",
    )
    result = run(app=write_small_app(tmp_path / "stopped", server=server))
    assert result.status == "interrupted"
    assert result.summary["rounds"] == 2
    assert len(pd.read_parquet(result.folder / "events.parquet")) > 0


def test_apps_neither_leave_modules_behind_nor_see_those_of_others(run, monkeypatch):
    stranger = types.ModuleType("small_app_under_test")
    monkeypatch.setitem(sys.modules, "small_app_under_test", stranger)

    def of_apps():
        return {k: v for k, v in sys.modules.items() if k.startswith("small_app_under_test")}

    before = of_apps()
    assert run(run_config={"rounds": 1}).status == "finished"
    assert of_apps() == before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"pyproject": "not toml ["}, "no Flower app"),
        ({"pyproject": PYPROJECT.replace("small_app_under_test.client", "missing")}, "cannot be"),
        ({"pyproject": PYPROJECT.replace("client:app", "client:nothing")}, "no such attribute"),
        ({"pyproject": PYPROJECT.replace("client:app", "client:data")}, "expected a flwr Client"),
        ({"pyproject": PYPROJECT.replace("work-per", "wrok-per")}, "unknown key"),
        ({"pyproject": PYPROJECT.replace('"local-epochs"', '"local"')}, "costs.epochs = 'local'"),
        ({"client": "import nothing_like_this"}, "cannot be imported: ModuleNotFoundError"),
        (
            {"client": "from flwr.client.client import Client"},
            "cannot be imported: ModuleNotFoundError: No module named 'flwr.client.client'",
        ),
        ({"server": "from flwr.serverapp import ServerApp\napp = ServerApp()"}, "@app.main"),
    ],
)
def test_an_app_that_cannot_run_is_refused_before_anything_is_written(
    run, tmp_path, change, sentence
):
    with pytest.raises(ConfigError, match=sentence):
        run(app=write_small_app(tmp_path / "broken", **change))
    assert not (tmp_path / "run1").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"run_config": {"round": 3}}, "expected 'rounds'"),
        ({"devices": 50}, "at most 12"),
        ({"devices": 0}, "devices = 0"),
        ({"until": "soon"}, "until = 'soon'"),
        ({"costs": {"work-per-example": -1.0}}, "work_per_example = -1"),
        ({"workers": 0}, "workers = 0"),
    ],
)
def test_settings_out_of_range_are_one_sentence(run, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        run(**options)


def test_a_trace_shorter_than_one_round_gets_stuck_with_a_reason(run):
    short = fleet([[(0.0, 3.0)]] * 3, length=10.0, repeat=False)
    result = run(short, after_end="stop")
    assert result.status in ("stuck", "failed")
    assert result.reason
    assert result.summary["jobs"]["interrupted"] == 3


@pytest.mark.usefixtures("no_pages")
def test_an_earlier_run_is_replaced_only_on_request(tmp_path):
    config = SimulationConfig(app=str(write_small_app(tmp_path / "app")), traces="given")
    simulate(config, tmp_path / "out", traces=patchy(4))
    with pytest.raises(ConfigError, match="not empty"):
        simulate(config, tmp_path / "out", traces=patchy(4))
    simulate(config, tmp_path / "out", traces=patchy(4), overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="not empty"):
        simulate(config, tmp_path / "mine", traces=patchy(4), overwrite=True)


STALE_SERVER = SERVER.replace(
    "from flwr.serverapp import strategy as strategies",
    "from fedstale import strategies",
).replace(
    """        fraction_evaluate=config["fraction-evaluate"],
        min_available_nodes=config["min-available"],
        **options,
""",
    "        4, 2, seed=1, **options\n",
)


@pytest.mark.parametrize("strategy", ["FedBuff", "GapAware", "DirectionAware"])
@pytest.mark.usefixtures("no_pages")
def test_strategies_that_merge_replies_as_they_come_fill_the_run_folder(run, tmp_path, strategy):
    app = write_small_app(tmp_path / "stale", server=STALE_SERVER)
    result = run(app=app, run_config={"strategy": strategy, "rounds": 25})
    assert result.status == "finished", result.reason
    assert result.summary["rounds"] == 25
    events = pd.read_parquet(result.folder / "events.parquet")
    merged = events[events.aggregated_version >= 0]
    assert (merged["staleness"] == merged["aggregated_version"] - 1 - merged["base_version"]).all()
    assert merged["staleness"].max() >= 1
    assert (merged.loc[merged.staleness == 0, "weight"] == 1.0).all()
    assert merged["weight"].between(0, 1).all()
    assert (result.folder / "model.safetensors").is_file()


BY_ITSELF = """
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    content = RecordDict({"arrays": ArrayRecord([np.zeros(3)]), "config": ConfigRecord()})
    grid.send_and_receive([Message(content, next(iter(grid.get_node_ids())), "train")])
"""
OWN = SERVER.replace(
    "app = ServerApp()", "class Own(strategies.FedAvg):\n    pass\n\n\napp = ServerApp()"
).replace('getattr(strategies, config["strategy"])', "Own")


@pytest.mark.parametrize(
    ("server", "strategy", "selector"),
    [
        (SERVER, "FedAvg", None),
        (OWN, "Own", None),
        (STALE_SERVER, "FedBuff(concurrency=4, buffer_size=2", "Random()"),
        (BY_ITSELF, None, None),
    ],
    ids=["stock", "own", "stale", "none"],
)
@pytest.mark.usefixtures("no_pages")
def test_the_summary_has_the_strategy_that_ran_and_its_selector(
    run, tmp_path, server, strategy, selector
):
    app = write_small_app(tmp_path / "app", server=server)
    named = "FedBuff" if server == STALE_SERVER else "FedAvg"
    always = fleet([[(0.0, 1000.0)]] * 4)
    summary = run(always, app=app, run_config={"rounds": 1, "strategy": named}).summary
    assert summary["status"] == "finished", summary["reason"]
    assert summary["selector"] == selector
    told = summary["strategy"]
    assert told == strategy or told.startswith(f"{strategy}, ")


def test_a_stale_strategy_that_is_stopped_leaves_its_last_model(run, tmp_path):
    app = write_small_app(tmp_path / "stale", server=STALE_SERVER)
    result = run(app=app, until="8 rounds", run_config={"strategy": "GapAware", "rounds": 1000})
    assert result.status == "stopped"
    assert (result.folder / "model.safetensors").is_file()


@pytest.mark.parametrize("strategy", ["FedBuff", "GapAware", "CA2FL", "FADAS"])
@pytest.mark.usefixtures("no_pages")
def test_a_model_in_half_precision_is_simulated_like_one_in_double(run, tmp_path, strategy):
    client = CLIENT.replace("ArrayRecord([w])", "ArrayRecord([w.astype(sent)])")
    client = client.replace(
        "    for _ in range(", "    w, sent = w.astype(float), w.dtype\n    for _ in range("
    )
    half = STALE_SERVER.replace("np.zeros(3)", "np.zeros(3, np.float16)")
    found = []
    for name, server in (("half", half), ("double", STALE_SERVER)):
        app = write_small_app(tmp_path / name, client=client, server=server)
        found.append(run(app=app, run_config={"strategy": strategy, "rounds": 15}))
    ours, other = found
    assert ours.status == "finished", ours.reason
    (w,), (expected,) = ours.model.values(), other.model.values()
    assert (w.dtype, expected.dtype) == (np.float16, np.float64)
    np.testing.assert_allclose(w, expected, atol=0.05)
    assert np.abs(expected).max() > 0.5
    assert not (ours.jobs["status"] == "rejected").any()


@pytest.mark.usefixtures("no_pages")
def test_a_run_tells_when_its_devices_were_online(tmp_path):
    windows = [[(0.0, 400.0), (700.0, 900.0)], [], [(0.0, 1000.0)]]
    config = SimulationConfig(app=str(write_small_app(tmp_path / "app")), traces="given")
    run = simulate(config, tmp_path / "run", traces=fleet(windows, repeat=False))
    told = run.online.groupby("device_id")
    names = sorted(told.groups)
    expected = [
        [(a, min(b, run.end_s)) for a, b in of_one if a < run.end_s] or [(0.0, 0.0)]
        for of_one in windows
    ]
    for name, of_one in zip(names, expected, strict=True):
        own = told.get_group(name)
        assert list(zip(own["start_s"], own["end_s"], strict=True)) == of_one
    assert run.online["is_drawn"].all()


@pytest.mark.usefixtures("no_pages")
def test_of_many_devices_some_are_drawn_and_those_with_jobs_are_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "_ONLINE", 10)
    config = SimulationConfig(app=str(write_small_app(tmp_path / "app")), traces="given")
    run = simulate(config, tmp_path / "run", traces=fleet([[(0.0, 1000.0)]] * 200))
    drawn = run.online[run.online["is_drawn"]]
    assert drawn["device_id"].nunique() == 10
    others = set(run.online["device_id"]) - set(drawn["device_id"])
    assert 0 < len(others) <= 10
    assert others <= set(run.jobs["device_id"])
