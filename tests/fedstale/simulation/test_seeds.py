"""The seed of a run is that of its app too, unless the user gives the app another."""

import pytest
from seeded_apps import by_command, by_python, devices, digest, opened
from small_app import PYPROJECT, write_small_app

import fedstale
from fedstale.comparison.plan import Plan
from fedstale.config import SimulationConfig
from fedstale.errors import ConfigError
from fedstale.simulation.flower_app import FlowerApp


def resolved(app, seed=3, **settings):
    config = SimulationConfig(app=str(app), traces="ideal:4", seed=seed, **settings)
    found = FlowerApp.find(app)
    config = found.resolved(config)
    return config.run_config, found.own_seed(config)


def small(folder, keys, own=""):
    """Write the small app with further keys in its run config, and in [tool.fedstale]."""
    text = PYPROJECT.replace("rounds = 3", f"rounds = 3\n{keys}")
    text = text.replace("[tool.fedstale]", f"[tool.fedstale]\n{own}")
    return write_small_app(folder, pyproject=text)


@pytest.mark.parametrize(
    ("name", "way", "kind"),
    [
        ("template", by_python, "recorded"),
        ("template", by_command, "ideal"),
        ("named", by_command, "recorded"),
        ("named", by_python, "ideal"),
        ("unseeded", by_python, "recorded"),
        ("older", by_python, "recorded"),
    ],
)
def test_two_seeds_differ_and_one_repeats(name, way, kind, tmp_path):
    # All apps, commands and devices: tests/system/apps/test_seeds_of_apps.py.
    settings = opened(name, tmp_path) | {"traces": devices(kind, tmp_path)}
    one, other, again = (way(settings, s, tmp_path / str(i)) for i, s in enumerate((1, 2, 1)))
    assert again == one
    assert one[1] != other[1]
    assert one[0] != other[0] or name == "older"


@pytest.mark.parametrize(
    ("keys", "own", "settings", "key", "value"),
    [
        ("seed = 1", "", {}, "seed", 3),
        ("seed = 1", "", {"run_config": {"seed": 7}}, "seed", 7),
        ("seed = 1", "", {"seed_key": ""}, "seed", 1),
        ('seed = "one"', "", {}, "seed", "one"),
        ("seed = true", "", {}, "seed", True),
        ("random-state = 1", 'seed-key = "random-state"', {}, "random-state", 3),
        ("random-state = 1", "", {"seed_key": "random-state"}, "random-state", 3),
        ("random-state = 1", "", {}, "random-state", 1),
        ("data.seed = 1", 'seed-key = "data.seed"', {}, "data.seed", 3),
        ("seed = 1", 'seed-key = ""', {}, "seed", 1),
        ("a = 1\nb = 2", 'seed-key = "a"', {"seed_key": "b"}, "b", 3),
    ],
)
def test_the_key_takes_the_seed_unless_the_run_config_sets_it(  # noqa: PLR0917
    tmp_path, keys, own, settings, key, value
):
    assert resolved(small(tmp_path / "app", keys, own), **settings)[0][key] == value


@pytest.mark.parametrize(
    ("keys", "own", "settings", "said"),
    [
        ("seed = 1", "", {}, ""),
        ("seed = 1", "", {"run_config": {"seed": 3}}, ""),
        ("seed = 1", "", {"run_config": {"seed": 7}}, "from seed 7 of its own (run-config seed)"),
        ("rs = 1", 'seed-key = "rs"', {"run_config": {"rs": 8}}, "seed 8 of its own"),
        ("random-seed = 1", "", {}, "(run-config random-seed = 1): --set 'seed-key="),
        ("random_state = 1", "", {}, "random_state = 1"),
        ("dataSeed = 1", "", {}, "dataSeed = 1"),
        ("data.rng-seed = 5", "", {}, "data.rng-seed = 5"),
        ("random-seed = 1", "", {"seed_key": ""}, ""),
        ("seedling = 1\nstate = 2", "", {}, ""),
        ('seed-file = "x"', "", {}, ""),
    ],
)
def test_an_app_with_a_seed_of_its_own_is_named(tmp_path, keys, own, settings, said):
    _, found = resolved(small(tmp_path / "app", keys, own), **settings)
    assert said in found if said else not found


@pytest.mark.parametrize(
    ("own", "settings", "sentence"),
    [
        ("", {"seed_key": "sede"}, "seed-key = 'sede': expected a run-config key .* 'seed'"),
        ('seed-key = "strategy"', {}, "seed-key = 'strategy': expected a run-config key"),
        ("seed-key = 3", {}, r"\[tool.fedstale\] seed-key = 3: expected a key"),
        ("", {"seed_key": 3}, "seed_key = 3: expected a key"),
    ],
)
def test_a_key_that_takes_no_seed_is_refused(tmp_path, own, settings, sentence):
    app = small(tmp_path / "app", "seed = 1", own)
    with pytest.raises(ConfigError, match=sentence):
        resolved(app, **settings)


def test_a_config_runs_again_with_another_seed_and_goes_on_with_its_own(tmp_path):
    settings = opened("named", tmp_path) | {"traces": devices("ideal", tmp_path)}
    one, other = (by_command(settings, seed, tmp_path / str(seed)) for seed in (1, 2))
    config = str(tmp_path / "1" / "config.toml")
    again = {"app": config, "traces": settings["traces"], "run_config": {"rounds": 2}}
    assert by_command(again, 2, tmp_path / "again") == other
    assert one != other
    # Settings from before the seed was handed over: the app's own is what they say.
    older = SimulationConfig.read(tmp_path / "1" / "config.toml").table()
    older["run_config"]["random-state"] = 42
    found = FlowerApp.find(settings["app"]).resolved(
        SimulationConfig.from_table(older, where="older")
    )
    assert found.run_config["random-state"] == 42


def test_objects_get_the_seed_under_a_key_that_is_named(tmp_path):
    app = FlowerApp.find(small(tmp_path / "app", "seed = 1"))
    with app.importable():
        objects = app.load_server(), app.load_client()
        given = {"rounds": 1, "strategy": "FedAvg", "fraction-evaluate": 0.0, "min-available": 2}
        given["local-epochs"] = 1
        costs = {"work_per_example": 1.0, "epochs": 1, "examples": 20}
        costs["evaluate_work_per_example"] = 0.3
        run = fedstale.simulate(
            objects, traces="ideal:3", seed=5, seed_key="draws", run_config=given, **costs
        )
        own = fedstale.simulate(
            objects, traces="ideal:3", seed=5, run_config={**given, "seed": 7}, **costs
        )
    assert "draws = 5" in run.config_text
    assert not run.summary["hint"]
    assert "from seed 7 of its own" in own.summary["hint"]


@pytest.mark.parametrize("same", [True, False])
def test_a_comparison_says_which_seeds_came_out_alike(tmp_path, same):
    settings = opened("template", tmp_path) | {"traces": devices("recorded", tmp_path)}
    settings["run_config"] |= {"seed": 9} if same else {}
    runs = [
        fedstale.simulate(**settings, seed=seed, out=tmp_path / str(seed), executor="inline")
        for seed in (1, 2)
    ]
    assert (digest(tmp_path / "1") == digest(tmp_path / "2")) is same
    notes = fedstale.compare({"one": runs}, progress=False).notes
    assert any("one: seeds 1 and 2 came out alike" in note for note in notes) is same


def test_a_plan_hands_the_seed_over_as_a_run_does(tmp_path):
    app = str(small(tmp_path / "app", "rs = 1"))
    table = {"app": app, "traces": "ideal:3", "seeds": [4], "seed-key": "rs", "variants": {"A": {}}}
    plan = Plan.from_table(table, where="plan")
    assert plan.config("A", 4).run_config["rs"] == 4
    assert Plan.from_table(plan.table(), where="again") == plan
