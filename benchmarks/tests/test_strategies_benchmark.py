"""The benchmark of strategies trains as the apps do, deals as it says, and compares in pairs."""

import importlib.util
import json
import re
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from places import RECORDINGS, ROOT

from fedstale.apps import classification, client
from fedstale.simulation.flower_app import FlowerApp
from fedstale.strategies import FedBuff
from fedstale.strategies.selection import Random

RESULTS = ROOT / "benchmarks" / "results"
published = pytest.mark.skipif(not RECORDINGS.is_dir(), reason="published recordings are not here")


@pytest.fixture
def numpy_digits():
    import numpy_digits

    return numpy_digits


@pytest.fixture
def numpy_shakespeare():
    import numpy_shakespeare

    return numpy_shakespeare


@pytest.fixture
def comparing():
    spec = importlib.util.spec_from_file_location(
        "comparing", ROOT / "benchmarks" / "strategies.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["comparing"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["comparing"]


@pytest.mark.parametrize(("steps", "mu"), [(None, 0.0), (4, 0.0), (1, 0.0), (None, 0.5)], ids=str)
def test_training_in_numpy_agrees_with_the_app_within_rounding(numpy_digits, steps, mu):
    app = FlowerApp.find("digits")
    with app.importable():
        app.load_client()
        from digits_app import task

        for partition in (0, 7):
            data, _ = task.client_data(partition, 20, 0.1, 3)
            network = task.Network(3)
            model = {name: x.numpy().copy() for name, x in network.state_dict().items()}
            torch.set_num_threads(1)
            seed = (3, partition, 11)
            seed = (task.SHUFFLE, *seed)
            order = client.order(len(data[1]), 5, seed)
            settings = {"batch_size": 8, "learning_rate": 0.1}
            settings |= {"steps": steps, "proximal_mu": mu}
            loss = client.train(network, classification.mean_loss, data, order, **settings)
            rng = np.random.default_rng(seed)
            arrays = data[0].numpy(), data[1].numpy()
            settings = {"epochs": 5, "batch_size": 8, "rate": 0.1, "steps": steps, "mu": mu}
            found = numpy_digits.train(model, arrays, rng=rng, **settings)
            assert found == pytest.approx(loss, rel=1e-4)
            for name, expected in network.state_dict().items():
                np.testing.assert_allclose(model[name], expected.numpy(), atol=1e-5)


def test_shakespeare_in_numpy_agrees_with_the_app_within_rounding(numpy_shakespeare):
    app = FlowerApp.find("shakespeare")
    with app.importable():
        app.load_client()
        from shakespeare_app import task

        text = "".join(np.random.default_rng(2).choice(list("to be or not\n"), 81 * 21))
        examples = task.encode(text)
        network = task.Network(3)
        model = {name: x.numpy().copy() for name, x in network.state_dict().items()}
        torch.set_num_threads(1)
        seed = (3, 4, 11)
        settings = {"batch_size": 8, "learning_rate": 1.0, "max_norm": task.MAX_NORM}
        order = client.order(len(examples), 2, seed)
        loss = client.train(network, task.mean_loss, (examples,), order, **settings)
        found = numpy_shakespeare.train(
            model,
            examples.numpy(),
            order,
            batch_size=8,
            rate=1.0,
            max_norm=task.MAX_NORM,
        )
        assert found == pytest.approx(loss, rel=1e-4)
        for name, expected in network.state_dict().items():
            np.testing.assert_allclose(model[name], expected.numpy(), atol=1e-5)
        assert numpy_shakespeare.evaluate(model, examples.numpy()) == pytest.approx(
            task.evaluate(network, examples), rel=1e-4
        )


def test_rare_classes_are_dealt_to_their_owners_alone(numpy_digits):
    labels = np.repeat(np.arange(10), 140)
    owners = np.arange(60) % 4 == 0
    for seed in range(5):
        deal = numpy_digits.deal_rare_to(owners, labels, (7, 8, 9), alpha=0.1, seed=seed)
        assert sorted(np.concatenate(deal)) == list(range(len(labels)))
        assert min(map(len, deal)) >= 1
        held = [labels[mine] for mine in deal]
        common = np.concatenate([x for x, own in zip(held, owners, strict=True) if not own])
        rare = np.concatenate([x for x, own in zip(held, owners, strict=True) if own])
        assert common.max() <= 6
        # A twentieth of 7 x 140 others, less what went to devices without any.
        assert np.sum(rare >= 7) == 3 * 140
        assert np.sum(rare < 7) <= 7 * 7


def test_a_curve_holds_the_last_value_and_averages_ten_readings(comparing):
    from strategy_runs import read_curve

    seen = np.array([[0.0, 0.0, 1.0], [150.0, 1.0, 0.5]])
    # A job counts from when it begins; one that never does moves nothing.
    jobs = {"started_at": [90.0, 10.0, np.nan], "downloaded_bytes": [2e9, 1e9, 0.0]}
    events = pd.DataFrame(jobs | {"uploaded_bytes": [0.0, 5e8, 0.0]})
    curve = read_curve(seen, events, 1200.0, 60.0)
    assert curve.gigabytes.tolist() == [1.5] + [3.5] * 19
    assert curve.outcome(0.2)["gigabytes_to_target"] == 3.5
    # Read at 60, 120, ...: from the third reading on the second value holds.
    assert curve.accuracy[:4] == pytest.approx([0.0, 0.0, 0.1, 0.2])
    assert curve.slow[[1, 2, 11]] == pytest.approx([1.0, 0.95, 0.5])
    assert curve.versions == 1
    assert curve.to_target_s(0.2) == pytest.approx(240.0)
    assert not curve.reaches(1.01)
    assert curve.to_target_s(1.01) == pytest.approx(1200.0)


class _Made:
    """Reaches 1 after about 1000 s divided by the rate; tuning looks at the first half."""

    def __init__(self, comparing, seed):
        self.comparing, self.seed, self.asked = comparing, seed, []

    def run(self, rate, until_s):
        self.asked.append((rate, until_s))
        instants = np.arange(60.0, until_s + 1, 60.0)
        accuracy = (instants >= (1000.0 + self.seed) / rate).astype(float)
        return self.comparing.Curve(
            **{"accuracy": accuracy, "slow": accuracy / 2, "gigabytes": instants},
            **{"versions": 7, "grid_s": 60.0},
        )


def _comparison(comparing, settings, **more):
    return comparing.Comparison(
        title="made",
        settings=settings,
        tuning_seeds=(101,),
        seeds=(1, 2),
        target=0.8,
        horizon_s=7200.0,
        **more,
    )


def test_a_strategy_is_tuned_on_its_own_seeds_and_compared_in_pairs(comparing):
    settings = {seed: _Made(comparing, seed) for seed in (1, 2, 101)}
    comparison = _comparison(comparing, settings)
    trials = {
        "slow": comparing.Trial(make=lambda rate, seed: min(rate, 0.5)),
        "fast": comparing.Trial(make=lambda rate, seed: rate, per_rate=0.1),
    }
    slow, fast = comparing.compare(comparison, trials, (0.3, 10.0))
    assert [until for _, until in settings[101].asked] == [3600.0] * 4
    assert [until for _, until in settings[1].asked] == [7200.0] * 2
    assert (slow["server_rate"], fast["server_rate"]) == (10.0, 1.0)
    assert slow["hours_to_target_by_seed"] == pytest.approx([2040 / 3600, 2040 / 3600], abs=1e-4)
    assert fast["speed_up"] == fast["fewer_gigabytes"] == pytest.approx([2.0, 2.0, 2.0])
    assert fast["final_slow_accuracy"] == pytest.approx(0.5)
    assert slow["reached"] == fast["reached"] == 2


def test_a_run_that_is_kept_is_not_run_again(comparing, tmp_path, monkeypatch):
    settings = {seed: _Made(comparing, seed) for seed in (1, 2, 101)}
    trials = {"one": comparing.Trial(make=lambda rate, seed: rate)}

    def rows():
        comparison = _comparison(comparing, settings, kept=comparing.Kept(tmp_path / "runs.jsonl"))
        return list(comparing.compare(comparison, trials, (0.5, 2.0)))

    first = rows()
    asked = {seed: list(setting.asked) for seed, setting in settings.items()}
    assert [len(each) for each in asked.values()] == [1, 1, 2]
    assert rows() == first
    assert {seed: setting.asked for seed, setting in settings.items()} == asked
    # A killed measurement goes on after its last whole run.
    whole = (tmp_path / "runs.jsonl").read_text()
    (tmp_path / "runs.jsonl").write_text(whole[:-20])
    assert rows() == first
    assert (tmp_path / "runs.jsonl").read_text() == whole
    assert settings[2].asked == asked[2] * 2
    assert settings[1].asked == asked[1]
    monkeypatch.setattr(comparing, "commit", lambda: "another")
    with pytest.raises(ValueError, match="expected another; name another file"):
        rows()


def test_a_setting_that_is_not_measured_again_keeps_its_commit(comparing, tmp_path, monkeypatch):
    monkeypatch.setattr(comparing, "RESULTS", tmp_path)
    assert comparing._measured_before("mixed") == []
    rows = [{"setting": "mixed", "n": 1}, {"setting": "mixed", "n": 2, "commit": "older"}]
    found = {"commit": "old", "rows": [*rows, {"setting": "other"}]}
    (tmp_path / "strategies.json").write_text(json.dumps(found))
    kept = comparing._measured_before("mixed")
    assert [(row["n"], row["commit"]) for row in kept] == [(1, "old"), (2, "older")]


def test_windows_of_different_seeds_lie_on_different_days_and_tuning_at_other_hours(comparing):
    for kind, starts in comparing.STARTS.items():
        places = [place for place in comparing.PLACES.values() if place.kind == kind]
        assert places
        assert {seed for place in places for seed in place.tuning_seeds} <= set(starts)
        assert set(comparing.SEEDS) <= set(starts)
        assert len({day for day, _ in starts.values()}) == len(starts)
    # Records of phones repeat within these days, so a day alone does not keep tuning apart.
    longest = max(place.horizon_s for place in comparing.PLACES.values() if place.kind == "phones")
    for seed in comparing.TUNING_SEEDS:
        tuned = _hours(comparing.STARTS["phones"][seed][1], longest / 2)
        for reported in comparing.SEEDS:
            assert not tuned & _hours(comparing.STARTS["phones"][reported][1], longest)


def _hours(start, lasts_s):
    """Return the minutes of the day that a run covers."""
    return {(start * 60 + minute) % 1440 for minute in range(round(lasts_s / 60))}


def test_forty_devices_and_more_were_online_in_each_window_that_was_measured(comparing):
    rows = json.loads((RESULTS / "strategy_windows.json").read_text())["rows"]
    assert {(row["fleet"], row["seed"]) for row in rows} == {
        (kind, seed) for kind, starts in comparing.STARTS.items() for seed in starts
    }
    assert min(row["online_least"] for row in rows) >= 40
    # The jobs that run are not those of twenty devices in turn: updates come stale.
    assert min(row["staleness_median"] for row in rows) >= 2
    for kind in comparing.STARTS:
        assert len({row["begins"][:10] for row in rows if row["fleet"] == kind}) == 7


@published
@pytest.mark.parametrize("kind", ["phones", "desktops"])
def test_the_server_can_choose_while_twenty_jobs_run(comparing, kind):
    (row,) = (
        row
        for row in json.loads((RESULTS / "strategy_windows.json").read_text())["rows"]
        if (row["fleet"], row["seed"]) == (kind, 3)
    )
    traces = comparing.devices(RECORDINGS, kind, 3)
    assert traces.n_devices == comparing.N_DEVICES
    assert traces.epoch == row["begins"]
    place = next(each for each in comparing.PLACES.values() if each.kind == kind)
    online = comparing.online(traces, place.horizon_s).sum(1)
    assert (online.min(), online.max()) == (row["online_least"], row["online_most"])
    free = []

    class Counting(Random):
        """Notes among how many devices it chooses."""

        def select(self, candidates, k, now, rng):
            free.append(len(candidates))
            return super().select(candidates, k, now, rng)

    app = FlowerApp.find(place.app)
    with app.importable():
        setting = place.open(app, RECORDINGS, None, 3)
        strategy = FedBuff(comparing.IN_FLIGHT, comparing.MERGE_SIZE, seed=3, selector=Counting())
        curve = setting.run(strategy, 300.0)
    assert curve.versions >= 2
    # Whoever is online and has no job: with twenty jobs in flight at least twenty more.
    assert np.median(free) >= comparing.IN_FLIGHT


def test_what_the_pages_say_in_words_stands_in_the_results():
    rows = json.loads((RESULTS / "strategies.json").read_text())["rows"]
    speeds = {"{:.2f} ({:.2f} to {:.2f})".format(*row["speed_up"]) for row in rows}
    differences = {
        "{:+.3f} ({:+.3f} to {:+.3f})".format(*row[f"{key}_difference"])
        for row in rows
        for key in ("final_accuracy", "final_slow_accuracy")
    }
    whole = (ROOT / "docs" / "results" / "strategies.md").read_text(encoding="utf-8")
    _, _, words = whole.partition("<!-- strategies: end -->")
    words, _, _ = words.partition("## Speed")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page, least in ((words, 8), (readme, 1)):
        text = " ".join(page.split())
        said = re.findall(r"(?<![+.\d-])\d\.\d\d \(\d\.\d\d to \d\.\d\d\)", text)
        assert len(said) >= least
        assert set(said) <= speeds
        said = re.findall(r"[+-]\d\.\d{3} \([+-]\d\.\d{3} to [+-]\d\.\d{3}\)", text)
        assert len(said) >= min(least, 4)
        assert set(said) <= differences
    others = [row for row in rows if row["strategy"] != "FedBuff"]
    assert sum(row["speed_up"][1] > 1 for row in others) == 1
    assert f"One of the {len(others)} intervals" in words
    found = {(row["setting"], row["strategy"]): row for row in rows}
    # The directional gap keeps more of what the slow alone hold, and is not clearly faster.
    slow = "slow alone hold 7-9"
    assert found[slow, "directional gap"]["final_slow_accuracy_difference"][1] > 0
    for (_, strategy), row in found.items():
        if strategy == "directional gap":
            assert row["speed_up"][1] <= 1
    # SAA keeps no more of it than FedBuff; Gap-Aware is nowhere faster.
    assert found[slow, "SAA"]["final_slow_accuracy_difference"][1] <= 0
    for (_, strategy), row in found.items():
        if strategy == "Gap-Aware":
            assert row["speed_up"][0] <= 1


def test_the_page_names_what_is_faster_and_what_is_slower():
    import strategies_page

    def row(name, speed_up):
        return {
            "setting": "made",
            "strategy": name,
            "server_rate": 1.0,
            "target": 0.8,
            "reached": 2,
            "hours_to_target": 1.0,
            "hours_to_target_by_seed": [1.0, 1.0],
            "speed_up": speed_up,
            "final_accuracy": 0.9,
            "final_accuracy_difference": [0.0, -0.1, 0.1],
            "final_slow_accuracy": 0.8,
            "final_slow_accuracy_difference": [0.0, -0.1, 0.1],
        }

    rows = [
        row("FedBuff", [1.0, 1.0, 1.0]),
        row("A", [1.5, 1.1, 2.0]),
        row("B", [1.2, 0.9, 1.6]),
        row("C", [0.7, 0.5, 0.98]),
    ]
    assert strategies_page.strategies(rows)[-1] == (
        "In hours to 0.8, faster than FedBuff by an interval without 1: A. "
        "Slower than FedBuff by an interval without 1: C."
    )
    assert strategies_page.strategies(rows[:3])[-1].endswith("without 1: none.")


def test_shakespeare_needs_its_text(comparing, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["strategies.py", str(tmp_path), "--text", "nowhere.gz"])
    with pytest.raises(SystemExit):
        comparing.main()
    assert "--text nowhere.gz: expected the file of the plays" in capsys.readouterr().err


def test_runs_of_another_commit_are_not_mixed_with_those_of_this(
    comparing, monkeypatch, capsys, tmp_path
):
    runs = tmp_path / "runs.jsonl"
    runs.write_text(json.dumps({"commit": "old", "of": [], "curve": {}}) + "\n")
    words = ["strategies.py", str(tmp_path), "--setting", "mixed", "--keep", str(runs)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        comparing.main()
    assert "holds runs of commit old: expected" in capsys.readouterr().err


def test_the_pages_are_what_the_results_say():
    import strategies_page

    pages = [path.read_text(encoding="utf-8") for path in strategies_page.PAGES]
    assert list(strategies_page.written().values()) == pages
    page = "".join(pages)
    for name in strategies_page.TABLES:
        assert (
            page.count(f"<!-- {name}: begin -->\n|") + page.count(f"<!-- {name}: begin -->\n**")
            == 1
        )
    # The claim is about the figures, so a changed one changes the page.
    row = json.loads((RESULTS / "runtime.json").read_text())["rows"][0]
    (shown,) = strategies_page.runtime([row])[2:]
    assert shown in page
    (other,) = strategies_page.runtime([row | {"simulated_s": 99.0}])[2:]
    assert other not in page


@pytest.fixture
def staleness():
    import staleness

    return staleness


def test_the_scheduled_rate_warms_up_and_falls_to_a_tenth_twice(staleness):
    rate = staleness.scheduled(2000)
    steps = (1, 50, 100, 101, 1000, 1001, 1500, 1501, 2000)
    expected = (0.001, 0.05, 0.1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001)
    assert [rate(step) for step in steps] == pytest.approx(expected)
    assert max(map(rate, range(1, 2001))) == 0.1


def test_at_the_scheduled_rate_gap_aware_beats_sa_and_penalises_less_as_it_falls(staleness):
    ours, sa = (
        staleness.run(staleness.WEIGHTINGS[name](), 64, 600, 3, staleness.scheduled(600))
        for name in ("gap-aware", "staleness-aware")
    )
    assert ours > sa
    weights = []

    class Watched(staleness.Gap):
        def weigh(self, update):
            weights.append(super().weigh(update))
            return weights[-1]

    staleness.run(Watched(decay=0.999), 64, 600, 3, staleness.scheduled(600))
    early, late = np.mean(weights[200:290]), np.mean(weights[520:])
    assert late > 2 * early


def test_both_tables_of_single_gradients_are_on_the_page():
    import strategies_page

    page = (ROOT / "docs" / "results" / "strategies-papers.md").read_text(encoding="utf-8")
    for name in ("staleness_scheduled", "staleness"):
        rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        assert {(row["workers"], len(row["by_seed"])) for row in rows} == {
            (16, 10),
            (64, 10),
            (128, 10),
        }
        for line in strategies_page.staleness(rows):
            assert line in page


def test_what_the_page_of_less_work_says_stands_in_its_results():
    import less_work
    import less_work_page

    for page, text in less_work_page.written().items():
        assert page.read_text(encoding="utf-8") == text
    found = json.loads((RESULTS / "less_work.json").read_text())["rows"]
    rows = {(row["setting"], row["strategy"]): row for row in found}
    assert set(rows) == {(title, arm) for title in less_work.SETTINGS for arm in less_work.ARMS}
    for title, times in zip(less_work.SETTINGS, (1.2, 1.4), strict=True):
        minute, one, five, small, both = (
            rows[title, name]
            for name in (
                *("at most 60 s", "1 epoch", "5 epochs"),
                *("at most 60 s, small messages", "1 epoch, small messages"),
            )
        )
        assert minute["speed_up"][0] == pytest.approx(times, abs=0.05)
        assert one["hours_to_target"] < minute["hours_to_target"] < five["hours_to_target"]
        # By itself it saves no traffic, and messages do.
        assert minute["gigabytes_to_target"] > five["gigabytes_to_target"]
        messages = rows[title, "5 epochs, small messages"]
        assert 0.9 < messages["hours_to_target"] / minute["hours_to_target"] < 1.06
        saved = minute["gigabytes_to_target"] / messages["gigabytes_to_target"]
        assert 4.5 < saved < 6.5
        assert both["hours_to_target"] < small["hours_to_target"] < one["hours_to_target"]
        # A larger rate was tried with each.
        for arm in less_work.ARMS:
            assert rows[title, arm]["server_rate"] < less_work.FASTEST
        lost = {
            name: (row["final_accuracy"] - row["final_slow_accuracy"]) / 0.7
            for name, row in (("minute", minute), ("five", five), ("small", small))
        }
        assert lost["small"] < 0.05
        assert max(lost["small"], lost["minute"]) < min(0.06, lost["five"])
    assert lost["five"] == pytest.approx(0.08, abs=0.005)
