"""The benchmark of pools trains each arm as it says, and pairs what comes of it."""

import json

import pytest


@pytest.fixture
def bench(monkeypatch):
    from pools import run

    monkeypatch.setattr(run, "UNTIL", "150s")
    return run


@pytest.mark.slow
def test_arms_train_with_what_they_pay_for(bench):
    different = [name for name in bench.arms("digits") if "different" in name]
    found = {name: bench.run((name, 0, 1), "") for name in different}
    told, alone, one, few = found.values()
    assert all(each["accuracy"] > 0.15 for each in found.values())
    # Learning from predictions takes as long again, and their bytes are paid for.
    assert alone["versions"] == one["versions"] > told["versions"] == few["versions"]
    assert told["megabytes"] > few["megabytes"] > alone["megabytes"]
    assert one.keys() == told.keys() - {"accuracy_wide", "accuracy_conv"}
    assert one["accuracy"] == one["ensemble_accuracy"] == one["accuracy_small"]


def test_rows_are_paired_with_codistillation_of_the_same_data(bench):
    from lab.kept import Kept

    kept, names = Kept(), list(bench.arms("digits"))
    for i, name in enumerate(names):
        for seed in bench.SEEDS:
            found = {"accuracy": 0.5 + 0.01 * i + 0.1 * seed, "ensemble_accuracy": 0.3}
            kept.add([name, 1, seed], found | {"accuracy_small": 0.4, "versions": 9})
            # The mean of predictions has a setting of its own.
            kept.add([name, 2, seed], {"accuracy": 0.3, "ensemble_accuracy": 0.9})
    alone = [name for name in names if bench.ARMS[name].method == bench.ALONE]
    best, means = dict.fromkeys(names, 1), dict.fromkeys(alone, 2)
    rows = bench.rows_of(best, means, kept, bench.SEEDS)
    alike, different = ([row for row in rows if row["pools"] == pools] for pools in bench.POOLS)
    for some in (alike, different):
        assert [row["method"] for row in some] == [
            *(bench.TOLD, bench.ALONE, bench.MEAN, "small for all", bench.TOLD)
        ]
        assert some[0]["difference"] == [0.0, 0.0, 0.0]
        assert some[1]["difference"][0] == pytest.approx(0.01)
        assert some[2]["difference"][0] == pytest.approx(0.9 - some[0]["accuracy"])
        assert some[3]["difference"][0] == pytest.approx(0.02)
        assert ["versions" in row for row in some] == [True, True, False, True, True]
    assert [row["public"] for row in alike] == [300, 300, 300, 300, 30]
    json.dumps(rows)


def test_the_page_says_what_beats_and_what_ties_with_codistillation(bench):
    from lab.results import read_result

    found = {}
    for row in read_result("pools")["rows"]:
        told, (_, low, high) = row["method"] == bench.TOLD, row["difference"]
        if told:
            assert 0.45 < row["versions"] / 65 < 0.6
        if not told or row["public"] == bench.FEW:
            found.setdefault(row["method"], []).append((low > 0) - (high < 0))
    assert bench.RATES["Fashion-MNIST"][-1] == 0.2
    # Digits, then Fashion-MNIST, of each alike pools and then those of different classes.
    assert found == {
        bench.ALONE: [-1, -1, 0, -1],
        bench.MEAN: [1, -1, 1, 0],
        "small for all": [0, 0, 1, 1],
        bench.TOLD: [-1, -1],
    }
