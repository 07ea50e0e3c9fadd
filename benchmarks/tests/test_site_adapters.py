"""The benchmark of adapters on sites trains each arm with its ranks, and pairs what comes of it."""

import json

import pytest
from places import PLAY


@pytest.fixture
def bench(monkeypatch):
    from sites import run

    monkeypatch.setattr(run, "UNTIL_S", 120.0)
    monkeypatch.setattr(run, "BASE_STEPS", 20)
    return run


@pytest.mark.skipif(not PLAY.is_file(), reason=f"{PLAY} is not here")
def test_arms_learn_with_replies_of_their_ranks(bench, tmp_path):
    paths = bench.base_of(PLAY, tmp_path)
    found = {name: bench.run((name, 1.0, 1), **paths) for name in bench.ARMS}
    assert all(one["loss"] < one["before"] for one in found.values())
    per_job = {name: one["gigabytes_up"] / one["jobs"] for name, one in found.items()}
    assert per_job["all 8"] > 3 * per_job["all 2"]
    mixed = per_job["2, 4 and 8, as products"]
    assert mixed == pytest.approx(per_job["2, 4 and 8, padded"])
    assert per_job["all 2"] < mixed < per_job["all 8"]


def test_nothing_that_five_seeds_show_is_what_the_page_says():
    from lab.results import read_result

    first, *others = read_result("site_adapters")["rows"]
    for row in others:
        _, low, high = row["difference"]
        assert low < 0 < high
    padded, small, large = others
    assert padded["gigabytes_up"] == first["gigabytes_up"]
    assert first["gigabytes_up"] / small["gigabytes_up"] == pytest.approx(2.0, abs=0.1)
    assert first["gigabytes_up"] / large["gigabytes_up"] == pytest.approx(0.6, abs=0.02)


def test_rows_are_paired_with_mixed_ranks_as_products(bench):
    from lab.kept import Kept

    kept = Kept()
    best = dict.fromkeys(bench.ARMS, 1.0)
    for i, name in enumerate(best):
        for seed in bench.SEEDS:
            found = {"before": 3.0, "loss": 2.0 + 0.1 * i + seed, "jobs": 9.0, "gigabytes_up": 1.0}
            kept.add([name, 1.0, seed], found)
    rows = bench.rows_of(best, kept, bench.SEEDS)
    assert [row["difference"][0] for row in rows] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert not any(row["is_end"] for row in rows)
    json.dumps(rows)
