import re

import pytest
from places import ROOT

from fedstale.comparison.plan import Plan
from fedstale.config import read_toml
from fedstale.errors import ConfigError

TABLE = {
    "app": "digits",
    "traces": "synthetic:5",
    "until": "1h",
    "seeds": [1, 2],
    "target": "accuracy 0.9",
    "reference": "FedAvg",
    "run-config": {"local-epochs": 1, "batch-size": 3},
    "variants": {
        "FedAvg": {"run-config": {"strategy": "FedAvg()"}},
        "Gap-Aware": {
            "run-config": {"strategy": "GapAware(10, 5)", "batch-size": 4},
            "traces": "synthetic:9",
            "after_end": "stop",
        },
    },
}


def plan(**changes):
    table = {**TABLE, **changes}
    return Plan.from_table({k: v for k, v in table.items() if v is not None}, where="plan.toml")


def test_a_variant_replaces_settings_and_merges_tables():
    config = plan().config("Gap-Aware", 2)
    assert (config.traces, config.after_end, config.until, config.seed) == (
        *("synthetic:9", "stop", "1h"),
        2,
    )
    assert config.run_config["batch-size"] == 4
    assert config.run_config["local-epochs"] == 1
    assert config.run_config["learning-rate"] == 0.1, "the app's own defaults are resolved"
    assert config.costs["epochs"] == 1
    assert plan().config("FedAvg", 1).run_config["batch-size"] == 3


def test_the_seed_reaches_the_app_unless_it_is_set_there():
    assert plan().config("FedAvg", 7).run_config["seed"] == 7
    assert plan(**{"seed-key": ""}).config("FedAvg", 7).run_config["seed"] == 1
    assert plan(**{"run-config": {"seed": 5}}).config("FedAvg", 7).run_config["seed"] == 5
    with pytest.raises(ConfigError, match=r"seed-key = 'sed': expected .* such as 'seed'"):
        plan(**{"seed-key": "sed"}).config("FedAvg", 7)


def test_runs_train_in_their_own_process_unless_asked_otherwise():
    assert plan().config("FedAvg", 1).executor == "inline"
    assert plan(executor="batched").config("FedAvg", 1).executor == "batched"
    assert plan(workers=2).config("FedAvg", 1).executor == "auto"
    assert plan(executor="ray", gpus=0.25).config("FedAvg", 1).gpus == 0.25


def test_a_plan_as_a_table_reads_back_to_an_equal_plan():
    given = plan(**{"seed-key": "seed"})
    assert Plan.from_table(given.table(), where="again") == given


def test_the_first_variant_is_the_reference_if_none_is_named():
    assert plan(reference=None).reference == "FedAvg"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sedes": [1]}, "unknown key 'sedes': expected 'seeds'"),
        ({"seed": 1}, "unknown key 'seed': expected 'seeds'"),
        ({"variants": {"A": {"tracse": "x"}}, "reference": "A"}, "expected 'traces'"),
        ({"variants": {"A": {"seeds": [1]}}, "reference": "A"}, "unknown key 'seeds'"),
        ({"variants": None}, "has no variants"),
        ({"variants": {}}, "has no variants"),
        ({"variants": {"A": 3}}, "variants.A = 3: expected a table"),
        ({"variants": {"": {}}}, "expected a name of printable characters"),
        ({"variants": {"a\x1b[2J": {}}}, "expected a name of printable characters"),
        ({"reference": "fedavg"}, "reference = 'fedavg': expected 'FedAvg'"),
        ({"seeds": None}, "seeds = None: expected at least 1 whole numbers"),
        ({"seeds": []}, "whole numbers"),
        ({"seeds": [1, -1]}, "whole numbers"),
        ({"seeds": [1, 1.5]}, "whole numbers"),
        ({"seeds": [True]}, "whole numbers"),
        ({"seeds": [1, 2, 1]}, "seeds = [1, 2, 1]: expected each once"),
        ({"target": "3h"}, "target = '3h': expected a metric"),
        ({"target": "good"}, "target = 'good': expected a metric"),
        ({"target": 0.9}, "target = 0.9: expected a text"),
        ({"until": 3}, "until = 3: expected a text"),
        ({"devices": "all"}, "devices = 'all': expected a whole number"),
        ({"run-config": {"a": {"b": [1]}}}, "expected a table of numbers"),
        ({"run-config": 3}, "run-config = 3: expected a table"),
        ({"run_config": {"batch-size": 1}}, "run-config is there twice"),
        ({"app": None}, "app is missing, for all or for 'FedAvg'"),
        ({"traces": None}, "traces is missing, for all or for 'FedAvg'"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(changes, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)) as caught:
        plan(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"app": "digit"}, "variant 'FedAvg': app = 'digit'"),
        ({"run-config": {"batchsize": 1}}, "key 'batchsize' is unknown: expected 'batch-size'"),
        ({"until": "soon"}, "variant 'FedAvg': until = 'soon'"),
        ({"devices": 0}, "variant 'FedAvg': devices = 0"),
        ({"costs": {"epochs": True}}, "costs.epochs = True"),
    ],
)
def test_what_cannot_run_is_one_sentence_that_names_the_variant(changes, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        plan(**changes).config("FedAvg", 1)


def test_a_file_that_is_no_toml_is_one_sentence(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text("seeds = [")
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        Plan.from_table(read_toml(path), where=str(path))


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "compare").glob("*.toml")))
def test_the_plans_of_the_benchmarks_can_run(path):
    given = Plan.from_table(read_toml(path), where=str(path))
    for variant in given.variants:
        given.config(variant, given.seeds[0])
