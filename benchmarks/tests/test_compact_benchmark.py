"""The benchmark of smaller messages: arms, tuning on other phones, ratios, and its page."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import published
import pytest
from flwr.supercore.task_identity import TaskIdentity
from published import ROOT

from fedstale.strategies.messages.codec import n_bytes
from fedstale.traces import Series, TraceSet

RECORDINGS = ROOT / ".." / "shared" / "traces"
UNTIL_S = 1500.0


@pytest.fixture(scope="module")
def bench():
    sys.path.append(str(ROOT / "benchmarks"))
    import compact

    return compact


@pytest.fixture(scope="module")
def runs(bench):
    import compact_runs

    return compact_runs


@pytest.fixture(scope="module")
def windows(runs):
    """Return windows of synthetic phones, with what came before them."""
    from agent_training import windows

    fleet = TraceSet.synthetic(90, days=4, seed=3)
    return [runs.looking_back(w, fleet) for w in windows(fleet, "phones", (1, 2, 3))]


@pytest.fixture(scope="module")
def rows(bench, windows, tmp_path_factory):
    """Return the rows of a short measurement; nothing of it is read from recordings."""
    arms = (
        bench.FULL,
        "int4, int8 down",
        "top-k in the bytes of int4, int8 down",
        "by forecast, the LSTM's, int8 down",
        "by forecast, the oracle's, int8 down",
    )
    plan = bench.Plan(
        place="digits, 56 MB, LTE and UMTS",
        arms=arms,
        tuning=windows[:1],
        windows=windows[1:],
        rates=(1.2, 2.4),
        until_s=UNTIL_S,
    )
    keep = tmp_path_factory.mktemp("runs") / "runs.jsonl"
    found = bench.rows_of(plan, bench.Kept(Path("nowhere"), keep))
    # What is kept is not run again, and a line that was cut off is left out.
    keep.write_text(keep.read_text() + '{"of": "cut o')
    assert bench.rows_of(plan, bench.Kept(Path("nowhere"), keep)) == found
    return {row["arm"]: row for row in found}


def test_every_arm_trains_and_reports_what_crossed(rows, bench):
    full, small = rows[bench.FULL], rows["int4, int8 down"]
    assert full["hours_ratio"] == [1.0, 1.0, 1.0]
    assert small["jobs"] > full["jobs"]
    assert small["up_gb"] < full["up_gb"] / 3
    for row in rows.values():
        assert row["seeds"] == [2, 3]
        assert row["tuning_seeds"] == [1]
        assert row["best_pair"] in bench.UNIFORM


def test_a_sparse_reply_has_the_bytes_of_the_format_that_it_stands_for(rows, bench):
    sparse, dense = rows["top-k in the bytes of int4, int8 down"], rows["int4, int8 down"]
    assert sparse["jobs"] == dense["jobs"]
    mean = bench.ratio(dense["hours_by_seed"], sparse["hours_by_seed"])[0]
    assert sparse["hours_ratio_to_same_bytes"][0] == pytest.approx(mean, rel=0.02)


def test_the_oracle_has_the_rate_that_the_forecasts_were_tuned_with(rows):
    oracle, lstm = (
        rows[f"by forecast, {name}, int8 down"] for name in ("the oracle's", "the LSTM's")
    )
    assert oracle["server_rate"] == lstm["server_rate"]
    assert oracle["up_gb"] != lstm["up_gb"]


def test_the_largest_elements_arrive_and_the_others_are_owed(runs):
    rng = np.random.default_rng(0)
    x, left = rng.standard_normal(2048).astype(np.float32), np.zeros(2048, np.float32)
    data = runs.sparse(x, "int4", left=left)
    y = runs.dense(data, "int4", x.shape, x.dtype)
    assert len(data) == n_bytes("int4", x.size)
    k = np.count_nonzero(y)
    assert k == (len(data) - 4) // 3
    assert np.abs(left[y == 0]).max() <= np.abs(x[y != 0]).min()
    np.testing.assert_allclose(y + left, x, atol=1e-6)


def test_links_are_given_out_in_equal_numbers_from_instants_of_their_own(runs):
    fleet = TraceSet.synthetic(8, days=1, seed=0)
    down, up = (Series.regular(np.arange(8.0).reshape(4, 2) + 1, step_s=10.0) for _ in range(2))
    links = TraceSet(device_ids=pd.Index(list("abcd")), downlink=down, uplink=up)
    made = runs.linked(fleet, links, 0)
    rows = made.channel("downlink").rows
    assert np.bincount(rows).tolist() == [2] * 4
    assert (made.channel("uplink").rows == rows).all()
    assert np.unique(made.channel("downlink").shifts).size == 8
    assert made.availability is fleet.availability


def test_ratios_are_geometric_means_with_students_intervals(bench):
    mean, low, high = bench.ratio([2.0, 8.0], [1.0, 1.0])
    assert mean == pytest.approx(4.0)
    assert low * high == pytest.approx(16.0, rel=0.01)
    # t of one degree of freedom is 12.7, and the standard error ln(4) / 2.
    assert np.log(high / mean) == pytest.approx(12.706 * np.log(4) / 2, rel=0.01)


def test_what_is_counted_ends_when_the_target_is_reached(bench, runs):
    curve = runs.Curve(
        at_s=[0.0, 600.0, 1200.0],
        accuracy=[0.0, 1.0, 1.0],
        device_s=[0.0, 3600.0, 7200.0],
        up_bytes=[0.0, 1e9, 2e9],
        down_bytes=[0.0, 3e9, 4e9],
        jobs=7,
        versions=2,
    )
    found = bench.outcome(curve, 0.45, 1800.0)
    # Five of the last ten minutes.
    assert found["hours"] == pytest.approx(840 / 3600)
    assert (found["device_hours"], found["up_gb"], found["down_gb"]) == (1.0, 1.0, 3.0)
    never = bench.outcome(replace(curve, accuracy=[0.0] * 3), 0.45, 1800.0)
    assert (never["reached"], never["hours"]) == (0.0, 0.5)
    assert never["up_gb"] == 2.0


def test_replies_of_the_attacks_benchmark_go_in_a_format(bench):
    import attacks

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    rule, gate = attacks.RULES["median"]
    found = {}
    for form in (None, "int4"):
        run = attacks.Federation(1, "none", rule, gate, late=True, form=form)
        run.run(6)
        found[form] = run.accuracies[-1]
        assert run.rejected == 0
    assert found["int4"] != found[None]
    assert found["int4"] == pytest.approx(found[None], abs=0.1)


@pytest.fixture(scope="module")
def result(bench):
    """Return the rows that were measured, by place and arm."""
    return {(row["place"], row["arm"]): row for row in published.rows("compact")}


def test_the_readme_says_what_was_measured(result):
    ratio = result["digits, 56 MB, LTE and UMTS", "int4, int8 down"]["hours_ratio"]
    fast, low, high = (f"{x:.1f}" for x in ratio)
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{fast} times as fast, with an interval of {low} to {high}" in text


def test_the_page_says_what_small_messages_are_worth(result):
    assert "1.5 to 1.75 times as fast" in published.page("results/messages.md")
    pairs = {place: row for (place, arm), row in result.items() if arm == "int4, int8 down"}
    small = {place: row for place, row in pairs.items() if place.endswith(", 14 MB, 5G")}
    large = {place: row for place, row in pairs.items() if "56 MB" in place}
    assert (len(small), len(large)) == (3, 3)
    # Faster by an interval, with a sixth of the uploads or less.
    assert all(row["hours_ratio"][1] > 1 and row["up_gb_ratio"][0] > 6 for row in small.values())
    means = sorted(row["hours_ratio"][0] for row in large.values())
    assert (means[0], means[-1]) == pytest.approx((1.5, 1.75), abs=0.025)
    lows = {place.partition(",")[0]: row["hours_ratio"][1] for place, row in large.items()}
    assert {app for app, low in lows.items() if low > 1.2} == {"digits"}
    assert lows["shakespeare"] < 1


def test_no_refinement_was_faster_than_the_best_pair_by_an_interval(result):
    """What docs/what-does-not-pay.md and docs/smaller-messages.md say."""
    for (_, arm), row in result.items():
        if arm.startswith(("top-k", "by forecast")):
            assert row["hours_ratio_to_best_pair"][1] < 1.0
            # Top-k ties with the format of its bytes, too.
            low, high = row.get("hours_ratio_to_same_bytes", [1.0, 0.0, 2.0])[1:]
            assert low < 1.0 < high


def recorded(recipe):
    """Return the numbers of each line that a recipe prints; the last line is its summary."""
    text = (ROOT / "examples" / f"{recipe}.out").read_text(encoding="utf-8")
    return [[float(x) for x in re.findall(r"\d+(?:\.\d+)?", line)] for line in text.splitlines()]


def test_overlap_brings_more_and_staler_replies_and_no_time():
    *seeds, (_, ratio) = recorded("overlapping_upload")
    for _, plain, more, fresh, stale, *_ in seeds:
        assert 1.2 < more / plain < 1.55
        assert 2.0 < stale / fresh < 3.0
    assert 0.9 < ratio < 1.1


def test_momenta_cost_more_than_they_save():
    *_, (_, paid, free) = recorded("fedglomo_momenta")
    assert paid < 0.8
    assert 0.9 < free < 1.1


@pytest.mark.slow
@pytest.mark.skipif(not RECORDINGS.is_dir(), reason="the recordings are not here")
def test_the_quick_form_measures_four_arms():
    words = [sys.executable, "benchmarks/compact.py", RECORDINGS, "--quick"]
    done = subprocess.run(
        list(map(str, words)), cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.count("digits, 14 MB, 5G | ") == 4
