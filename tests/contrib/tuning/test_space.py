"""What may be tuned, and the sentences that say what may not, before Ray starts."""

import shutil
from pathlib import Path

import pytest
from small_app import write_small_app
from spaces import TABLE, space, table

from fedstale.app_folder import BUILT_IN
from fedstale.contrib.tuning import outcome, tune
from fedstale.contrib.tuning.space import Space
from fedstale.errors import ConfigError, FedstaleError
from fedstale.traces import TraceSet


def test_a_range_has_whole_numbers_where_it_is_written_so_and_no_default_is_a_fraction():
    whole = {"from": 0, "to": 2}
    found = space(search={"local-epochs": whole, "alpha": whole}).domains
    assert {type(one).__name__ for one in found.values()} == {
        "IntDistribution",
        "FloatDistribution",
    }


def test_rungs_are_an_eighth_a_quarter_and_half_unless_they_are_said():
    assert space(rungs=None, until="4h").instants_s == (1800.0, 3600.0, 7200.0, 14400.0)
    assert space(rungs=[]).instants_s == (720.0,)


def test_keys_of_inner_tables_have_dots():
    found = space(search={"strategy": {"eta": {"from": 0.1, "to": 1.0}}})
    assert list(found.domains) == ["strategy.eta"]


def test_every_run_of_a_configuration_has_its_seed_and_its_parameters(tmp_path):
    runs = space().runs({"strategy.concurrency": 7, "learning-rate": 0.5}, tmp_path)
    assert [run.folder.name for run in runs] == ["seed-1", "seed-2"]
    assert [run.config.run_config["seed"] for run in runs] == [1, 2]
    assert {run.config.run_config["learning-rate"] for run in runs} == {0.5}
    assert {run.config.run_config["strategy"] for run in runs} == {
        "FedBuff(concurrency=7, buffer_size=2)"
    }


def test_paths_mean_the_same_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(BUILT_IN / "digits", tmp_path / "my_app")
    TraceSet.synthetic(3, seed=0, days=1).write(tmp_path / "phones.parquet")
    monkeypatch.chdir(tmp_path)
    held_out = {"traces": "./elsewhere/../phones.parquet", "seeds": [3, 4]}
    found = space(app="my_app", traces="phones.parquet", held_out=held_out)
    monkeypatch.chdir(tmp_path / "elsewhere")
    (run, _) = found.runs({}, tmp_path)
    assert Path(run.config.app) == tmp_path / "my_app"
    assert Path(run.config.traces) == tmp_path / "phones.parquet"
    with pytest.raises(ConfigError, match="which also tunes"):
        space(
            traces=str(tmp_path / "phones.parquet"),
            held_out={**held_out, "traces": "../phones.parquet", "seeds": [1, 9]},
        )


def test_parts_of_a_strategy_are_searched_as_expressions():
    parts = ["Gap()", "ByAge(hinge(a=2.0))"]
    found = space(search={"strategy.weighting": parts, "strategy.normalise": ["'weights'"]})
    trial = {"strategy.weighting": parts[1], "strategy.normalise": "'weights'"}
    (run, _) = found.runs(trial, Path("out"))
    assert run.config.run_config["strategy"] == (
        "FedBuff(concurrency=10, buffer_size=2, weighting=ByAge(hinge(a=2.0)), normalise='weights')"
    )


@pytest.mark.parametrize("pace", ["None", "Ramp(50)"])
def test_a_pace_is_searched_beside_the_numbers_of_a_schedule(pace):
    found = space(search={"strategy.pace": ["None", "Ramp(50)"], "strategy.buffer_size": [1, 2]})
    (run, _) = found.runs({"strategy.pace": pace, "strategy.buffer_size": 1}, Path("out"))
    text = f"FedBuff(concurrency=10, buffer_size=1, pace={pace})"
    assert run.config.run_config["strategy"] == text


def test_the_defaults_keep_what_is_fixed_and_nothing_that_is_searched():
    plan = space(objective="time to accuracy 0.8").plan(
        {"best": {"run-config": {"batch-size": 15}}, "defaults": {}},
        held_out=True,
        reference="defaults",
    )
    assert (plan.seeds, plan.target) == ((11, 12), "accuracy 0.8")
    config = plan.config("defaults", 11).run_config
    assert (config["strategy"], config["learning-rate"]) == ("FedBuff(10, 2)", 0.1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"search": {"learning-rat": [0.1]}}, "is unknown: expected 'learning-rate'"),
        ({"search": {"until": ["1h"]}}, "run-config key 'until' is unknown"),
        ({"search": {"seed": [1, 2]}}, "cannot be tuned: it is the seed of a run"),
        ({"search": {"strategy": ["FedBuff(3)"]}}, "stands in run-config already"),
        (
            {"search": {"strategy": ["FedBuff(3)", "FedBuf(3)"]}, "run_config": {}},
            "expected 'FedBuff'",
        ),
        ({"search": {"strategy.weighting": ["Gap()", "Gaps()"]}}, "expected 'Gap'"),
        ({"search": {"strategy.etas": [0.5]}}, "FedBuff has no setting 'etas': expected 'eta'"),
        ({"search": {"strategy.eta": {"from": -1.0, "to": 1.0}}}, "eta = -1.0: expected a finite"),
        ({"search": {}}, "search is missing"),
        ({"search": {"alpha": {"from": 1.0, "to": 0.5}}}, "low=1.0, high=0.5"),
        ({"search": {"alpha": {"from": 0.0, "to": 0.5, "log": True}}}, "`low > 0`"),
        ({"search": {"alpha": {"from": -1, "to": 0.5, "log": True}}}, "`low > 0`"),
        ({"search": {"alpha": {"from": 0.1}}}, "to = None: expected a number"),
        ({"search": {"alpha": {"from": 0.1, "to": float("nan")}}}, "expected a number"),
        ({"search": {"alpha": {"from": 0.1, "to": 1.0, "steps": 2}}}, "expected 'step'"),
        ({"search": {"alpha": {"from": 0.1, "to": 1.0, "step": 0}}}, "step"),
        ({"search": {"forecasts": {"from": 0, "to": 1}}}, "expected a list of values"),
        ({"search": {"alpha": []}}, "expected a list of values, or of a number"),
        ({"search": {"alpha": [1.0, 1.0]}}, "expected each value once"),
        ({"held_out": {"seeds": [2, 3]}}, "seed 2 on 'synthetic:20', which also tunes"),
        ({"held_out": {"seeds": [3]}}, "held-out.seeds = [3]: expected at least 2"),
        ({"held_out": {"seed": [3, 4]}}, "held-out has unknown key 'seed'"),
        ({"held_out": None}, "held-out is missing"),
        ({"held_out": {"traces": "nowhere.parquet", "seeds": [1, 2]}}, "no such file"),
        ({"traces": "nowhere.parquet"}, "no such file"),
        ({"rungs": ["6m", "3m"]}, "expected rising instants before until"),
        ({"rungs": ["6m", "12m"]}, "expected rising instants before until"),
        ({"rungs": ["3 rounds"]}, "expected a time such as 30m"),
        ({"until": "100 rounds"}, "until = '100 rounds': expected a time"),
        ({"until": "accuracy 0.9"}, "expected a time"),
        ({"until": None}, "until = None: expected a time"),
        ({"app": None}, "app is missing"),
        ({"traces": 5}, "traces is missing: expected a text"),
        ({"budget": "soon"}, "budget = 'soon': expected a time"),
        ({"seeds": []}, "seeds = []: expected at least 1"),
        ({"seeds": [1, 1]}, "expected each once"),
        ({"objective": None}, "objective = None: expected a metric"),
        ({"objective": "time to 0.8"}, "objective = 'time to 0.8': expected a metric"),
        ({"objective": "time to 30m"}, "objective = 'time to 30m': expected a metric"),
        ({"objective": ["accuracy"]}, "expected a metric"),
        ({"trials": 0}, "trials = 0: expected a whole number >= 1"),
        ({"trials": None}, "trials is missing: expected a number, or a budget"),
        ({"keep": 1.0}, "keep = 1.0: expected a share above 0 and below 1"),
        ({"executor": "ray"}, "executor = 'ray': configurations run side by side already"),
        ({"objectiv": "loss"}, "unknown key 'objectiv': expected 'objective'"),
        ({"run_config": {"batchsize": 1}}, "expected 'batch-size'"),
        ({"app": "digit"}, "expected a directory with a Flower app"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence_before_ray_starts(
    changes, words, tmp_path, monkeypatch
):
    monkeypatch.setattr(outcome, "_search", None)
    with pytest.raises(FedstaleError) as refused:
        tune(table(**changes), out=tmp_path / "out", workers=1)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("how", "changes", "words"),
    [
        ({"search": "bayes"}, {}, "search = 'bayes': expected one of"),
        ({"stop": "late"}, {}, "stop = 'late': expected one of"),
        ({"workers": 0}, {}, "workers = 0: expected a number of processes >= 1"),
        ({"seed": -1}, {}, "seed = -1: expected a whole number >= 0"),
    ],
)
def test_a_way_of_searching_that_does_not_fit_is_refused(how, changes, words, tmp_path):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        tune(table(**changes), out=tmp_path / "out", **how)


def test_the_same_seeds_on_other_devices_and_other_seeds_on_the_same_are_held_out():
    assert space(held_out={"traces": "synthetic:21", "seeds": [1, 2]}).held_out["seeds"] == (1, 2)
    assert space(held_out={"seeds": [3, 4]}).held_out["traces"] == "synthetic:20"


def test_without_the_extra_its_name_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(outcome, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs ray, .*\[ray\]"):
        tune(TABLE, out=tmp_path / "out")


def test_a_folder_of_another_space_is_refused_and_says_what_differs(tmp_path, monkeypatch):
    monkeypatch.setattr(outcome, "_search", None)
    # Nothing can search, so that each call ends once its folder is its own.
    with pytest.raises(TypeError):
        tune(TABLE, out=tmp_path, workers=1)
    with pytest.raises(ConfigError, match="holds another search, with seeds = "):
        tune(table(seeds=[1, 3]), out=tmp_path, workers=1)
    with pytest.raises(ConfigError, match="--seed = 0 instead of 1"):
        tune(TABLE, out=tmp_path, workers=1, seed=1)
    with pytest.raises(TypeError):
        tune(table(trials=9), out=tmp_path, workers=1)


def test_a_folder_with_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds something that is no search"):
        tune(TABLE, out=tmp_path, workers=1)


def test_a_space_is_read_from_its_file(tmp_path):
    path = tmp_path / "space.toml"
    path.write_text('app = "digits"\ntraces = ', encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        Space.read(path)


def test_the_strategy_of_any_app_is_searched_where_the_space_names_it(tmp_path):
    app = write_small_app(tmp_path / "small")
    found = space(
        app=str(app),
        strategy="FedBuff(4, 2)",
        search={"strategy.buffer_size": [2, 3], "local-epochs": [1, 2]},
        run_config=None,
    )
    (first, *_) = found.runs({"strategy.buffer_size": 3, "local-epochs": 1}, tmp_path)
    assert first.config.strategy == "FedBuff(concurrency=4, buffer_size=3)"
    assert first.config.run_config["local-epochs"] == 1
    assert first.config.run_config["strategy"] == "FedAvg", "a key of the app's own"
    named = space(
        app=str(app),
        strategy="FedAvg()",
        search={"strategy": ["FedBuff(4, 2)", "FedAsync(4)"]},
        run_config=None,
    )
    (first, *_) = named.runs({"strategy": "FedAsync(4)"}, tmp_path)
    assert first.config.strategy == "FedAsync(4)"


def test_a_strategy_that_a_space_names_is_that_of_a_built_in_app_too(tmp_path):
    named = space(
        strategy="FedBuff(4, 2)", search={"strategy.buffer_size": [2, 3]}, run_config=None
    )
    (first, *_) = named.runs({"strategy.buffer_size": 3}, tmp_path)
    assert first.config.run_config["strategy"] == "FedBuff(concurrency=4, buffer_size=3)"
    assert first.config.strategy is None


def test_a_search_of_strategies_that_are_none_is_refused(tmp_path):
    app = write_small_app(tmp_path / "small")
    with pytest.raises(ConfigError, match="'FedBof' is unknown: expected 'FedBuff'"):
        space(
            app=str(app),
            strategy="FedAvg()",
            search={"strategy": ["FedBuff(4, 2)", "FedBof(4)"]},
            run_config=None,
        )
