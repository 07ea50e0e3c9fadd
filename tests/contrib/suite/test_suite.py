"""A suite's scenarios stay what they are, its rule judges as it says, and its rows repeat."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from places import RECORDINGS
from pool_here import PoolHere
from typer.testing import CliRunner

from fedstale.cli.main import app
from fedstale.contrib.suite import Scenario, Setting, judge, judging, table
from fedstale.contrib.suite.judging import RATES, Method
from fedstale.contrib.suite.scenarios import Task
from fedstale.errors import ConfigError, TraceError
from fedstale.strategies import FedAvg, FedBuff
from fedstale.traces.sources import SOURCES

NAMES = [*Setting.all()]
METHOD = '''"""Mine: FedBuff by another name.

More of it.
"""

from fedstale.strategies import FedBuff

RATES = (0.5, 1.0)


def strategy(scenario, rate):
    return FedBuff(scenario.concurrency, scenario.buffer_size, eta=rate, seed=scenario.seed)
'''
TINY = {
    "about": "what a test can run",
    "population": "desktops",
    "n-devices": 12,
    "concurrency": 6,
    "buffer-size": 2,
    "work": 60.0,
    "model-bytes": 1_000_000,
    "timeout-s": 600.0,
    "budget-h": 0.02,
    "skews": [0.2, 0.5, 2.0],
    "tuning-seeds": [101, 102, 103],
    "seeds": [1, 2, 3, 4, 5],
    "tasks": ["digits"],
    "digits": {
        "target": 0.5,
        "costs": {"work-per-example": 0.6, "epochs": 1, "examples": 96},
        "run-config": {"local-epochs": 1, "batch-size": 8, "learning-rate": 0.1},
    },
}


@pytest.fixture
def tiny(monkeypatch):
    """Put a scenario that takes seconds beside the others, and play it in this process."""
    every = {**Setting.all(), "tiny-v1": Setting("tiny-v1", TINY)}
    monkeypatch.setattr(Setting, "all", lambda: every)
    monkeypatch.setattr(judging, "WorkerPool", PoolHere)
    monkeypatch.setattr(judging, "_kept", {})


@pytest.fixture
def mine(tmp_path):
    """Return the path of a method."""
    path = tmp_path / "mine.py"
    path.write_text(METHOD, encoding="utf-8")
    return str(path)


def seeds_of(setting):
    return [*setting.table["tuning-seeds"], *setting.table["seeds"]]


# Scenarios.


def test_scenarios_have_three_skews_three_tuning_seeds_and_five_others():
    assert NAMES == ["phones-v1", "desktops-v1", "cars-v1", "sites-v1"]
    for setting in Setting.all().values():
        of = setting.table
        assert len(of["skews"]) == len(of["tuning-seeds"]) == 3
        assert len(set(seeds_of(setting))) == 8
        assert all({"target", "costs", "run-config"} == of[task].keys() for task in of["tasks"])
        for task in of["tasks"]:
            costs = of[task]["costs"]
            work = costs["work-per-example"] * costs["epochs"] * costs["examples"]
            # A job of the mean device is as much work whatever is trained.
            assert work == pytest.approx(of["work"], rel=1e-3)


def test_every_scenario_has_a_digest_of_devices_and_digits_for_each_seed():
    for setting in Setting.all().values():
        found = setting.table["digests"]
        for what in ("devices", "digits"):
            assert [*found[what]] == [str(seed) for seed in seeds_of(setting)]
            assert len(set(found[what].values())) == 8


def check(name, seeds):
    setting, task = Setting.find(name), Task("digits")
    for seed in seeds:
        traces, waits = setting.devices(seed, task)
        assert traces.n_devices == waits.size == setting.table["n-devices"]


@pytest.mark.parametrize("name", NAMES)
def test_this_installation_makes_the_devices_and_data_of_a_scenario(name):
    check(name, [101, 1])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_this_installation_makes_those_of_all_seeds(name):
    check(name, seeds_of(Setting.find(name)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"work": 301.0}, "makes other devices than phones-v1: digest "),
        ({"skews": [0.2, 0.5, 2.1]}, "makes other data of digits than phones-v1: digest "),
    ],
)
def test_a_run_is_refused_where_a_scenario_would_be_another(change, sentence):
    setting = Setting("phones-v1", {**Setting.find("phones-v1").table, **change})
    with pytest.raises(ConfigError, match=f"^fedstale .* {sentence}"):
        setting.devices(1, Task("digits"))


def test_waits_are_of_jobs_by_hand_and_at_most_the_time_out(monkeypatch):
    from fedstale.traces import TraceSet

    # 1 MB at 8 Mbit/s is a second each way.
    equal = TraceSet.constant(12, compute=2.0, downlink_bit_per_s=8e6, uplink_bit_per_s=8e6)
    monkeypatch.setattr(TraceSet, "synthetic", lambda n, **options: equal)
    _, waits = Setting("tiny-v1", TINY).devices(1, Task("digits"))
    assert waits == pytest.approx(np.full(12, 32.0))
    _, waits = Setting("tiny-v1", {**TINY, "work": 6000.0}).devices(1, Task("digits"))
    assert waits == pytest.approx(np.full(12, 600.0))


def test_a_recorded_scenario_has_another_name_and_no_digest(tmp_path):
    found = Setting.find("phones-v1", tmp_path)
    assert found.name == "phones-v1@recorded"
    assert found.table["digests"] == {}
    with pytest.raises(TraceError, match=r"cached_timers\.json"):
        found.devices(1, Task("digits"))
    with pytest.raises(ConfigError, match="nothing of its kind is recorded"):
        Setting.find("sites-v1", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[:3])
def test_recordings_as_they_are_fetched_make_devices(tmp_path, name):
    files = {
        "flash_days": "flash-days.json",
        "aibenchmark": "ai-benchmark-devices.json",
        "planetlab": "planetlab-cpu.tar.gz",
        "gnettrack": "uccmisl-5g.zip",
        "library_desktops": "library-desktops",
    }
    parts = [part for part in Setting.find(name).table["recorded"].values() if part in files]
    for part in parts:
        if not (RECORDINGS / files[part]).exists():
            pytest.skip(f"needs {files[part]}")
        several = len(SOURCES[part].files) > 1
        fetched = part if several else SOURCES[part].files[0].filename
        (tmp_path / fetched).symlink_to(RECORDINGS / files[part])
    if name == "cars-v1":
        pytest.skip("its file is kept compressed, under another name")
    traces, waits = Setting.find(name, tmp_path).devices(1, Task("digits"))
    assert traces.n_devices == Setting.find(name).table["n-devices"]
    assert np.isfinite(waits).all()


# Tasks.


def test_a_task_measures_a_model_on_what_each_device_holds_back():
    task = Task("digits")
    with task.app.importable():
        task.app.load_client()
        from digits_app import task as digits

        network = digits.Network(3)
        model = {name: array.numpy() for name, array in network.state_dict().items()}
        expected = []
        for i in range(8):
            _, (images, labels) = digits.client_data(i, 8, 0.5, 1)
            right = network(images).argmax(1) == labels
            expected.append([right.double().mean().item(), len(labels)])
    assert task.right(model, 0.5, 1, 8) == pytest.approx(np.array(expected).T)


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ("shakespeare", "its data are missing: expected --data, a play as .txt or .gz"),
        ("letters2", "its app is not here; expected examples/letters2 of fedstale's repository"),
    ],
)
def test_what_a_task_lacks_is_said(task, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Task(task, "/nowhere").examples(1.0, 1, 4)


# Methods.


def test_a_method_has_the_title_and_the_rates_of_its_file(mine):
    found = Method.of(mine)
    assert (found.title, found.rates) == ("Mine", (0.5, 1.0))
    seen = Scenario(name="x", n_devices=9, concurrency=5, buffer_size=2, timeout_s=60.0, seed=7)
    made = found.strategy(seen, 0.25)
    assert repr(made) == repr(FedBuff(5, 2, eta=0.25, seed=7))
    Path(mine).write_text("def strategy(scenario, rate):\n    return 'FedAvg(3)'\n")
    again = Method.of(mine)
    assert (again.title, again.rates) == ("mine", RATES)
    assert again.checksum != found.checksum
    assert repr(again.strategy(seen, 1.0)) == repr(FedAvg(3, seed=7))


def test_a_text_is_a_method_with_a_rate_of_its_own():
    found = Method.of("FedBuff(20, 5)")
    assert (found.title, len(found.rates)) == ("FedBuff(20, 5)", 1)


def test_a_file_may_import_what_stands_beside_it(tmp_path):
    (tmp_path / "beside_it.py").write_text("JOBS = 3\n")
    path = tmp_path / "method.py"
    path.write_text(
        "from beside_it import JOBS\n\n\ndef strategy(scenario, rate):\n"
        "    return f'FedAvg({JOBS})'\n"
    )
    assert Method.of(str(path)).title == "method"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "no such file"),
        ("x = 1\n", r"expected a function strategy\(scenario, rate\)"),
        ("strategy = 3\n", r"expected a function strategy\(scenario, rate\)"),
        ("import no_such_thing\n", "raised ModuleNotFoundError: No module named 'no_such_thing'"),
        ("def strategy(\n", "raised SyntaxError: "),
        ("def strategy(s, rate):\n    return 1 / 0\n", "raised ZeroDivisionError: division"),
        ("def strategy(s):\n    return 1\n", "raised TypeError: strategy"),
        ("def strategy(s, rate):\n    return 3\n", r"strategy\(\) returned 3: expected a strategy"),
        ("def strategy(s, rate):\n    return 'FedBuf(3)'\n", "FedBuff"),
        ("RATES = ()\ndef strategy(s, r):\n    pass\n", r"RATES = \(\): expected one to 5"),
        ("RATES = (1, 2, 3, 4, 5, 6)\ndef strategy(s, r):\n    pass\n", "expected one to 5"),
        ("RATES = (0.0,)\ndef strategy(s, r):\n    pass\n", "expected one to 5 numbers > 0"),
        ("RATES = 1.0\ndef strategy(s, r):\n    pass\n", "expected one to 5 numbers > 0"),
    ],
)
def test_what_is_no_method_is_refused_in_a_sentence_before_anything_runs(
    tmp_path, monkeypatch, text, sentence
):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("bad.py").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        judge("bad.py", "phones-v1", tmp_path / "out")
    result = CliRunner().invoke(app, ["suite", "run", "bad.py"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "suites").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["FedBuff(2)", "--scenario", "phone-v1"], "expected 'phones-v1'"),
        (["FedBuff(2)", "--task", "digit"], "expected 'digits'"),
        (["FedBuf(2)"], "FedBuff"),
        (["FedBuff(2)", "--scenario", "sites-v1", "--recordings", "."], "nothing of its kind"),
    ],
)
def test_bad_usage_is_one_sentence(tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["suite", "run", *words])
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


# The rule.


def run_of(at_s, accuracy, device_s=0.0):
    """Return a run with evaluations, whose devices are busy all the time."""
    return SimpleNamespace(
        curve=lambda name, source: (np.array(at_s), np.array(accuracy)),
        costs={"device_s": device_s, "bytes": 2e9},
        device_s_until=lambda at: 2.0 * at,
    )


OF = {"budget-h": 10.0, "concurrency": 2}
"""A reading every three minutes, and 20 device-hours."""


def test_the_target_is_reached_where_the_mean_of_ten_readings_is():
    run = run_of([0.0, 3600.0], [0.1, 0.9], 72_000.0)
    found = judging.scores(run, OF, 0.5)
    # The 20th reading is the first of .9; with five of ten the mean is .5.
    assert found["reached"]
    assert found["hours"] == pytest.approx(24 * 0.05)
    assert found["device_hours"] == pytest.approx(2 * 24 * 0.05)
    assert found["accuracy"] == pytest.approx(0.9)
    assert found["gigabytes"] == 2.0
    spike = run_of([0.0, 3600.0, 3780.0], [0.1, 0.9, 0.1])
    assert not judging.scores(spike, OF, 0.5)["reached"]


def test_a_run_without_the_target_counts_with_both_budgets():
    found = judging.scores(run_of([0.0], [0.1], 1000.0), OF, 0.5)
    assert (found["reached"], found["hours"], found["device_hours"]) == (False, 10.0, 20.0)


def test_what_comes_after_the_budget_of_device_hours_does_not_count():
    late = run_of([0.0, 5.5 * 3600.0], [0.1, 0.9])
    assert judging.scores(late, OF, 0.5)["reached"]
    late.device_s_until, late.costs["device_s"] = lambda at: 4.0 * at, 144_000.0
    found = judging.scores(late, OF, 0.5)
    assert not found["reached"]
    assert found["accuracy"] == pytest.approx(0.1)


def test_a_model_that_is_lost_counts_as_no_accuracy():
    found = judging.scores(run_of([0.0, 3600.0], [0.1, np.nan]), OF, 0.5)
    assert found["accuracy"] == 0.0


def row_of(name, hours, accuracy=0.8, reached=1, **more):
    seeds = range(1, len(hours) + 1)
    scores = {"device_hours": 1.0, "gigabytes": 1.0, "slow": 0.7, "gap": 0.1}
    runs = [
        {"seed": s, "skew": 1.0, "hours": h, "accuracy": accuracy, "reached": reached, **scores}
        for s, h in zip(seeds, hours, strict=True)
    ]
    about = {"method": name, "rate": 1.0, "scenario": "phones-v1", "task": "digits"}
    return {**about, "quick": False, "runs": runs, **more}


def test_of_rates_that_cost_the_same_the_more_accurate_one_is_judged():
    runs = [{"device_hours": 60.0, "accuracy": x} for x in (0.2, 0.4)]
    assert judging._cost(runs) == pytest.approx([60.0, -0.3])
    better = [{"device_hours": 60.0, "accuracy": x} for x in (0.3, 0.4)]
    cheaper = [{"device_hours": x, "accuracy": 0.1} for x in (60.0, 50.0)]
    assert min([runs, better], key=judging._cost) is better
    assert min([runs, better, cheaper], key=judging._cost) is cheaper


def test_a_table_pairs_with_the_reference_by_seed():
    base = row_of("FedBuff", [1.0, 2.0, 4.0])
    own = row_of("Mine", [2.0, 4.0, 8.0], accuracy=0.9, reached=0)
    lines = table([base, own]).splitlines()
    assert lines[0].startswith("| method | rate | reached | hours | device-hours | GB | accuracy |")
    (found,) = (line for line in lines if "Mine" in line)
    assert "| 0 of 3 | ≥ 4.67 (2.00 to 2.00) |" in found
    assert "| 0.900 (+0.100 to +0.100) |" in found
    (found,) = (line for line in lines if "FedBuff" in line)
    assert "| 3 of 3 | 2.33 | 1 | 1 | 0.800 | 0.700 | 0.100 |" in found


def test_skews_are_averaged_before_seeds_are_paired():
    row = row_of("Mine", [1.0, 2.0])
    row["runs"] += [{**run, "skew": 2.0, "hours": run["hours"] + 2.0} for run in row["runs"]]
    assert judging.by_seed(row, "hours") == {1: 2.0, 2: 3.0}


def test_ones_own_row_is_bold_and_without_a_reference_nothing_is_paired():
    text = table([], row_of("Mine", [1.0, 2.0, 4.0]))
    assert "| **Mine** | 1 | 3 of 3 | 2.33 |" in text
    assert "(" not in text


def test_a_quick_look_stands_alone(monkeypatch):
    monkeypatch.setattr(judging, "standing", lambda *of: [row_of("FedBuff", [1.0, 2.0, 4.0])])
    setting = Setting.find("phones-v1")
    whole = judging.page(row_of("Mine", [1.0, 2.0, 4.0]), setting)
    assert "| FedBuff |" in whole
    quick = judging.page(row_of("Mine", [1.0, 2.0], quick=True), setting)
    assert "| FedBuff |" not in quick
    assert "A quick look, not comparable to the table." in quick


# Runs.


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_the_rate_with_fewer_device_hours_is_judged_and_rows_repeat_to_the_byte(tmp_path, mine):
    row = judge(mine, "tiny-v1", tmp_path / "a", quick=True, workers=2)
    assert [(run["rate"], run["skew"], run["seed"]) for run in row["tuned"]] == [
        (0.5, 0.5, 101),
        (1.0, 0.5, 101),
    ]
    costs = [(run["device_hours"], -run["accuracy"]) for run in row["tuned"]]
    assert row["rate"] == (0.5 if costs[0] < costs[1] else 1.0)
    assert [(run["rate"], run["seed"]) for run in row["runs"]] == [
        (row["rate"], 1),
        (row["rate"], 2),
    ]
    names = ("rows.json", "row.md", "scenario.toml")
    first = [(tmp_path / "a" / name).read_bytes() for name in names]
    judge(mine, "tiny-v1", tmp_path / "b", quick=True, workers=1)
    assert [(tmp_path / "b" / name).read_bytes() for name in names] == first
    # As after a kill: one run has no end, one has not begun, and two are over.
    (runs,) = (tmp_path / "b" / "runs").iterdir()
    folders = sorted(runs.iterdir())
    kept = folders[0] / "summary.json"
    before = kept.stat().st_mtime_ns
    (folders[1] / "summary.json").unlink()
    shutil.rmtree(folders[2])
    for name in names:
        (tmp_path / "b" / name).unlink()
    judge(mine, "tiny-v1", tmp_path / "b", quick=True, workers=1)
    assert [(tmp_path / "b" / name).read_bytes() for name in names] == first
    assert kept.stat().st_mtime_ns == before


@pytest.mark.usefixtures("tiny")
def test_a_text_is_judged_as_it_is(tmp_path):
    row = judge("FedBuff(6, 2)", "tiny-v1", tmp_path, quick=True, workers=2)
    assert row["tuned"] == []
    assert row["rate"] is None
    assert "| **FedBuff(6, 2)** | - |" in (tmp_path / "row.md").read_text()


@pytest.mark.usefixtures("tiny")
def test_a_method_that_never_makes_a_step_counts_with_the_budgets(tmp_path):
    row = judge("FedBuff(6, 100000)", "tiny-v1", tmp_path, quick=True)
    for run in row["runs"]:
        assert (run["reached"], run["hours"], run["device_hours"]) == (0, 0.02, 0.12)
        assert (run["slow"], run["gap"]) == (0.0, 0.0)


def test_a_run_without_an_evaluation_has_no_accuracy():
    found = judging.scores(run_of([], []), OF, 0.5)
    assert (found["reached"], found["accuracy"]) == (False, 0.0)


@pytest.mark.usefixtures("tiny")
def test_a_method_that_fails_in_a_run_is_named_with_the_run(tmp_path):
    path = tmp_path / "late.py"
    path.write_text(
        "from fedstale.strategies import FedBuff\n\n\nclass Late(FedBuff):\n"
        "    def start(self, *of, **options):\n        raise ValueError('too late')\n\n\n"
        "RATES = (1.0,)\n\n\ndef strategy(scenario, rate):\n    return Late(2, 1)\n"
    )
    with pytest.raises(ConfigError, match=r"failed with rate 1, skew 0\.5 and seed 1: .*too late"):
        judge(str(path), "tiny-v1", tmp_path / "out", quick=True, workers=1)


# The command, and standing methods.


@pytest.mark.usefixtures("tiny")
def test_the_command_prints_a_row_its_page_and_as_json(tmp_path, monkeypatch, mine):
    monkeypatch.chdir(tmp_path)
    words = ["suite", "run", mine, "--scenario", "tiny-v1", "--quick", "--workers", "2"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    page = Path("suites", "mine", "tiny-v1-digits-quick", "row.md")
    assert page.read_text(encoding="utf-8") in result.stdout
    assert result.stdout.endswith(f"page: {page}\n")
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert found["out"] == str(page.parent)
    assert found["runs"] == json.loads(page.with_name("rows.json").read_text())["runs"]


def test_the_folder_of_a_text_is_called_by_the_whole_of_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(judging, "judge", lambda *of, **options: asked.append(of) or {})
    CliRunner().invoke(app, ["suite", "run", "FedBuff(9, eta=0.5)", "--json"])
    CliRunner().invoke(app, ["suite", "run", "of/mine.py", "--json", "--task", "fashion"])
    assert [of[2] for of in asked] == [
        Path("suites", "FedBuff(9, eta=0.5)", "phones-v1-digits"),
        Path("suites", "mine", "phones-v1-fashion"),
    ]


def test_scenarios_are_listed():
    text = CliRunner().invoke(app, ["suite", "list"]).stdout
    assert all(name in text for name in NAMES)
    found = json.loads(CliRunner().invoke(app, ["suite", "list", "--json"]).stdout)
    assert [*found["scenarios"]] == NAMES
