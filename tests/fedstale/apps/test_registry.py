"""What a run config can name: all there is, each name runs, and the docs list the same names."""

import json
import re
from inspect import isroutine

import numpy as np
import pandas as pd
import pytest
import tomli_w
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from named_parts import VARIANTS, table_of
from places import ROOT
from tiny import COSTS
from typer.testing import CliRunner

import fedstale
from fedstale import agents, strategies
from fedstale.apps import registry
from fedstale.cli.main import app as command
from fedstale.comparison.plan import Plan
from fedstale.errors import ConfigError
from fedstale.simulation import TraceGrid
from fedstale.simulation.executors import InlineExecutor
from fedstale.simulation.flower_app import FlowerApp, overrides_in
from fedstale.simulation.stock_strategies import stock_strategies_reporting
from fedstale.strategies import robust, selection, weighting
from fedstale.strategies.server.runtime import Callback
from fedstale.traces import TraceSet

PAGE = ROOT / "docs" / "strategies.md"
EVERY = [(key, name) for key, names in registry.NAMES.items() for name in names]


def classes(module, base):
    """Public classes of a module that are of a kind, without the kind itself."""
    found = {name: getattr(module, name) for name in module.__all__}
    return {
        kind
        for kind in found.values()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base
    }


def made(key):
    """Classes of the parts that can be named."""
    options = {"f": 1} if key == "robust" else {}
    return {type(make(**options)) for make in registry.NAMES[key].values()}


def test_every_strategy_can_be_named():
    named = set(registry.NAMES["strategy"].values())
    assert named - {flower.FedAvg} == classes(strategies, strategies.StaleStrategy)
    assert len(named) == 18


def test_every_selector_that_needs_no_other_part_can_be_named():
    public = classes(selection, selection.Selector) | classes(agents, selection.Selector)
    assert made("selector") == public - {selection.Credits, selection.Filtered, agents.Shadow}


def test_every_weighting_and_every_curve_of_ages_can_be_named():
    assert made("weighting") == classes(weighting, weighting.Weighting)
    curves = {
        repr(make().curve)
        for make in registry.NAMES["weighting"].values()
        if isinstance(make(), weighting.ByAge)
    }
    functions = [f for name in weighting.__all__ if isroutine(f := getattr(weighting, name))]
    assert curves == {repr(f()) for f in functions}


def test_every_robust_rule_can_be_named():
    assert made("robust") == classes(robust, robust.Rule)


def test_the_page_lists_the_names_and_no_others():
    text = PAGE.read_text(encoding="utf-8")
    section = re.search(r"^## By name\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)[1]
    listed = {
        (row[1], name)
        for row in re.finditer(r"^\| `(\w+)` \| (.*?) \|$", section, re.MULTILINE)
        if row[1] in registry.NAMES
        for name in re.findall(r"`([\w-]+)`", row[2])
    }
    assert listed == set(EVERY)
    rows = re.findall(r"^\| (`[a-z].*?) \|", section, re.MULTILINE)
    keys = [key for row in rows for key in re.findall(r"`([\w.-]+)`", row)]
    assert keys == [*registry.NAMES, *registry.SETTINGS]


@pytest.mark.parametrize("app", ["digits", "fashion", "shakespeare"])
def test_every_built_in_app_has_the_keys_and_a_default_that_is_a_name(app):
    defaults = FlowerApp.find(app).defaults
    assert {*registry.NAMES, *registry.SETTINGS} <= set(defaults)
    assert all(defaults[key] == "" for key in registry.SETTINGS)
    assert registry.named("strategy", defaults["strategy"]) is flower.FedAvg


def loss_of(arrays, place):
    return float(sum(((w - place) ** 2).sum() for w in arrays))


def client():
    """Return a client whose devices pull the model to places of their own."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        place = 1.0 + context.node_config["partition-id"] / 12
        arrays = message.content["arrays"].to_numpy_ndarrays()
        loss = loss_of(arrays, place)
        metrics = {"train_loss": loss, "square_loss": loss**2, "num-examples": 10}
        moved = ArrayRecord([w + 0.5 * (place - w) for w in arrays])
        content = {"arrays": moved, "metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)

    return app


class Seen(Callback):
    """What a server measured of its models, and how jobs ended."""

    def __init__(self):
        self.losses, self.endings = [], []

    def metrics(self, run, version, source, values):
        if source == "server":
            self.losses.append(values["loss"])

    def reply(self, run, message_id, reply, status):
        self.endings.append(status)


SIZES = {"concurrency": 10, "buffer-size": 8, "fraction-train": 0.8, "local-epochs": 1}


def settings_of(key, name):
    strategy = {} if key == "strategy" else {"strategy": "fedbuff"}
    return {**SIZES, **strategy, key: name, "num-server-rounds": 3}


@pytest.mark.parametrize(("key", "name"), EVERY, ids=lambda word: word)
def test_every_name_runs_some_rounds(key, name):
    config = FlowerApp.find("digits").run_config(settings_of(key, name))
    grid = TraceGrid(TraceSet.ideal(12), InlineExecutor(client()), costs=COSTS, run_config=config)
    seen = Seen()
    grid.runtime.add(seen)

    def evaluate(server_round, arrays):
        return MetricRecord({"loss": loss_of(arrays.to_numpy_ndarrays(), 1.0)})

    with grid.running(), stock_strategies_reporting():
        registry.strategy(config).start(
            grid=grid,
            initial_arrays=ArrayRecord([np.zeros((3, 2)), np.zeros(4, dtype=np.float32)]),
            num_rounds=3,
            timeout=3600.0,
            evaluate_fn=evaluate,
        )
    assert len(seen.losses) == len(set(seen.losses)) == 4
    assert seen.endings.count("reported") >= 3


@pytest.mark.parametrize(("key", "name"), [("strategy", "flower-fedavg"), ("selector", "agent")])
def test_a_name_reaches_the_strategy_of_a_built_in_app(key, name, tmp_path):
    run = fedstale.simulate(
        "digits",
        traces=TraceSet.ideal(12),
        run_config=settings_of(key, name),
        executor="inline",
        out=tmp_path / "run",
    )
    assert run.status == "finished", run.reason
    assert run.summary["rounds"] == 3
    losses = run.curve("loss", "server")[1]
    assert len(set(losses.tolist())) == 4
    assert (run.jobs["status"] == "reported").sum() >= 3


def called(*words):
    return CliRunner().invoke(command, [str(word) for word in words])


def test_the_command_line_takes_names_in_any_spelling(tmp_path):
    words = ["simulate", "digits", "--traces", "synthetic:30", "--out", tmp_path / "run", "-c"]
    parts = "strategy='GapAware' selector='Expected_Utility' weighting='gap' robust='trimmed-mean'"
    run = called(*words, f"{parts} num-server-rounds=2 buffer-size=4 local-epochs=1")
    assert run.exit_code == 0, run.output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 2


def summary_of(folder, settings):
    run = called(
        *("simulate", "digits", "--traces", "synthetic:30", "--out", folder, "--quiet", "-c"),
        f"strategy='fedbuff' num-server-rounds=6 buffer-size=2 local-epochs=1 {settings}",
    )
    assert run.exit_code == 0, run.output
    return json.loads((folder / "summary.json").read_text())


def test_the_command_line_rejects_updates_beyond_max_staleness(tmp_path):
    (too_old,) = summary_of(tmp_path / "run", "max-staleness=0")["rejected"].values()
    assert too_old > 0
    assert not summary_of(tmp_path / "any", "")["rejected"]


def test_the_command_line_makes_models_private(tmp_path):
    spent = {}
    for z in (1.0, 4.0):
        settings = f"privacy.clip-norm=0.5 privacy.noise-multiplier={z} privacy.delta=1e-6"
        summary = summary_of(tmp_path / str(z), f"{settings} privacy.noise-seed=3")
        spent[z] = summary["metrics"]["train epsilon"]
    assert spent[1.0] > 2 * spent[4.0] > 0


def test_the_command_line_makes_messages_smaller(tmp_path):
    uploaded = {}
    for settings in ("", "messages='int8'", "messages='INT4' messages-down='int8'"):
        folder = tmp_path / str(len(uploaded))
        summary_of(folder, settings)
        events = pd.read_parquet(folder / "events.parquet")
        reported = events[events["status"] == "reported"]
        uploaded[settings] = reported["uploaded_bytes"].median()
    full, int8, int4 = uploaded.values()
    # A fiftieth of the small model is in arrays that go in full.
    assert 0.25 < int8 / full < 0.28
    assert 0.125 < int4 / full < 0.16


@pytest.mark.parametrize("name", ["digits", "fashion", "shakespeare"])
def test_every_built_in_app_has_the_same_settings(name):
    config = FlowerApp.find(name).defaults
    assert {key: config.get(key) for key in registry.SETTINGS} == dict.fromkeys(
        registry.SETTINGS, ""
    )


def test_the_command_line_asks_for_less_work(tmp_path):
    work, shares = {}, {}
    for settings in ("", "work=0.5", "work='2m' work-least=0.25 forecasts=true"):
        folder = tmp_path / str(len(work))
        summary_of(folder, settings)
        events = pd.read_parquet(folder / "events.parquet")
        jobs = events[(events["status"] == "reported") & (events["kind"] == "train")]
        work[settings], shares[settings] = jobs["work"].sum() / len(jobs), jobs["work_share"]
    whole, half, by_forecast = work.values()
    assert 0.3 < half / whole < 0.6
    assert by_forecast < whole
    _, fixed, chosen = shares.values()
    assert set(fixed) == {0.5}
    assert set(chosen) <= {0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0}
    assert chosen.nunique() > 1


def test_the_command_line_normalises_by_steps(tmp_path):
    rejected = summary_of(tmp_path / "run", "work=0.5 normalise='steps'")["rejected"]
    assert not rejected


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            "strategy='fedbuff' work=0.3",
            "strategy.LocalWork.share = 0.3: expected a whole number",
        ),
        (
            "strategy='fedbuff' work=0",
            "strategy.LocalWork.share = 0: expected a whole number of eighths",
        ),
        (
            "strategy='fedbuff' work=1.5",
            "strategy.LocalWork.share = 1.5: expected a whole number",
        ),
        (
            "strategy='fedbuff' work=true",
            "strategy.LocalWork.share = True: expected a whole number",
        ),
        ("strategy='fedbuff' work='10m'", "work = '10m': expected a share such as 0.5, or forecas"),
        (
            "strategy='fedbuff' work='ten' forecasts=true",
            "work = 'ten': expected a time such as 30m",
        ),
        (
            "strategy='fedbuff' work='10m' work-least=0.1 forecasts=true",
            "strategy.LocalWork.least = 0.1: expected a number from 0.125 to 1",
        ),
        (
            "strategy='fedbuff' work=0.5 work-least=0.5",
            "work-least = 0.5: expected with a time such as work='10m'",
        ),
        ("work=0.5", "work = 0.5: flower-fedavg is Flower's own and has none"),
        ("strategy='fedbuff' normalise='step'", "strategy.normalise = 'step': expected examples|"),
        (
            "strategy='fedbuff' normalise='steps' robust='median'",
            "strategy.normalise = 'steps': expected another one with a robust rule",
        ),
        ("strategy='fedbuff' max-staleness=-1", "strategy.max_staleness = -1: expected an integer"),
        ("strategy='fedbuff' max-staleness='x'", "strategy.max_staleness = 'x': expected an"),
        ("max-staleness=0", "max-staleness = 0: flower-fedavg is Flower's own and has none"),
        (
            "strategy='fedbuff' privacy.delta=1e-6",
            "privacy.clip-norm, privacy.noise-multiplier missing: expected beside privacy.delta",
        ),
        (
            "strategy='fedbuff' privacy.delta='x' privacy.clip-norm=1 privacy.noise-multiplier=1",
            "privacy.delta = 'x': expected a number",
        ),
        (
            "strategy='fedavg' privacy.delta=0.5 privacy.clip-norm=1 privacy.noise-multiplier=1",
            "strategy.normalise = 'examples': expected 'buffer_size' with Privacy",
        ),
        ("strategy='fedbuff' messages='in4'", "messages = 'in4': expected 'int4'"),
        (
            "strategy='fedbuff' messages-down='zstd'",
            "messages-down = 'zstd': expected one of ['float16'",
        ),
        ("messages='int4'", "messages = 'int4': flower-fedavg is Flower's own and has none"),
        ("strategy='fedbuff' buffer-size='two'", "buffer-size = 'two': expected a number"),
        ("strategy='fedavgg'", "strategy = 'fedavgg': expected 'fedavg'"),
        ("strategy='GapAwares'", "strategy = 'GapAwares': expected 'gap-aware'"),
        ("strategy='fedbuff' selector='ort'", "selector = 'ort': expected 'oort'"),
        ("strategy='fedbuff' weighting='gaps'", "weighting = 'gaps': expected 'gap'"),
        ("strategy='fedbuff' robust='crum'", "robust = 'crum': expected 'krum'"),
        ("strategy='fedbuff' selector='zzz'", "selector = 'zzz': expected one of ['random'"),
        ("robust='krum'", "robust = 'krum': flower-fedavg is Flower's own and has none"),
        (
            "strategy='fedasync' robust='krum'",
            "strategy.schedule.buffer_size = 1: expected at least 3 for Krum(f=1)",
        ),
    ],
)
def test_an_unknown_name_is_one_sentence_with_the_nearest(settings, sentence):
    config = FlowerApp.find("digits").run_config(overrides_in([settings], "run-config"))
    with pytest.raises(ConfigError) as refused:
        registry.strategy(config)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ("strategy='GapAwares'", "strategy = 'GapAwares': expected 'gap-aware'"),
        (
            "strategy='fedbuff' work=0.3",
            "strategy.LocalWork.share = 0.3: expected a whole number",
        ),
    ],
)
def test_the_command_line_says_the_sentence_and_no_more(tmp_path, settings, sentence):
    run = called(
        *("simulate", "digits", "--traces", "ideal:5", "--out", tmp_path / "run"),
        *("-c", settings, "--quiet"),
    )
    assert run.exit_code != 0
    assert run.stderr.count("\n") == 1
    assert sentence in run.stderr
    assert "Traceback" not in run.output


def test_plans_of_a_comparison_name_parts_and_settings():
    plan = Plan.from_table(table_of(VARIANTS, traces="ideal:12"), where="plan")
    made = {name: registry.strategy(plan.config(name, 1).run_config) for name in VARIANTS}
    assert type(made["REFL"]) is strategies.REFL
    assert made["REFL"].max_staleness == 3
    assert type(made["Oort and a median"].selector) is selection.Oort
    assert type(made["Oort and a median"].robust) is robust.Median
    stages = {name: {stage.name: stage for stage in made[name].stages} for name in made}
    assert stages["private"]["Privacy"].noise_multiplier == 4.0
    small = stages["small"]["Compression"]
    assert (small.up, small.down) == ("int4", "int8")
    assert (stages["half"]["LocalWork"].share, made["half"].normalise) == (0.5, "steps")
    assert stages["fits"]["LocalWork"].within_s == 600.0


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"strategy": "reffl"}, "strategy = 'reffl': expected 'refl'"),
        ({"strategy": "fedbuff", "selector": "ort"}, "selector = 'ort': expected 'oort'"),
        ({"strategy": "fedbuff", "weighting": "gaps"}, "weighting = 'gaps': expected 'gap'"),
        ({"strategy": "fedbuff", "robust": "crum"}, "robust = 'crum': expected 'krum'"),
        ({"strategy": "fedbuff", "max-staleness": -1}, "strategy.max_staleness = -1: expected an"),
        ({"strategy": "fedbuff", "work": 0.1}, "strategy.LocalWork.share = 0.1: expected a whole"),
    ],
)
def test_a_plan_with_an_unknown_part_starts_no_run(tmp_path, parts, sentence):
    plan = table_of({"fine": {"strategy": "fedbuff"}, "bad one": parts}, traces="ideal:12")
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(plan))
    run = called("compare", tmp_path / "plan.toml", "--out", tmp_path / "compared")
    assert run.exit_code == 2
    assert f"variant 'bad one': {sentence}" in run.stderr
    assert not (tmp_path / "compared").exists()


def test_names_are_read_without_regard_to_case_and_hyphens():
    for spelling in ("gap-aware", "GapAware", "gap_aware", "GAP AWARE"):
        assert registry.named("strategy", spelling) is strategies.GapAware
    with pytest.raises(ConfigError, match="expected 'direction-aware'"):
        registry.named("strategy", "directionaware2")
