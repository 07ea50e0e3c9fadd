"""The benchmark of smaller messages: arms, tuning on other phones, and what recipes print."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from flwr.supercore.task_identity import TaskIdentity
from places import RECORDINGS, ROOT

from fedstale.traces import Series, TraceSet

UNTIL_S = 1500.0


@pytest.fixture(scope="module")
def bench():
    from messages import run

    return run


@pytest.fixture(scope="module")
def runs(bench):
    from messages import runs

    return runs


@pytest.fixture(scope="module")
def windows(runs):
    """Return windows of synthetic phones, with what came before them."""
    from lab.training import windows

    fleet = TraceSet.synthetic(90, days=4, seed=3)
    return [runs.looking_back(w, fleet) for w in windows(fleet, "phones", (1, 2, 3))]


@pytest.fixture(scope="module")
def rows(bench, windows, tmp_path_factory):
    """Return the rows of a short measurement; nothing of it is read from recordings."""
    arms = (
        bench.FULL,
        "int4, int8 down",
    )
    keep = tmp_path_factory.mktemp("runs") / "runs.jsonl"
    plan = bench.Plan(
        place="digits, 56 MB, LTE and UMTS",
        arms=arms,
        tuning=windows[:1],
        windows=windows[1:],
        rates=(1.2, 2.4),
        kept=bench.Kept(keep),
        until_s=UNTIL_S,
    )
    found = bench.rows_of(plan)
    again = bench.rows_of(replace(plan, kept=bench.Kept(keep)))
    # Two windows have no interval, and its NaN equals nothing.
    assert json.dumps(again) == json.dumps(found)
    return {row["arm"]: row for row in found}


def test_every_arm_trains_and_reports_what_crossed(rows, bench):
    full, small = rows[bench.FULL], rows["int4, int8 down"]
    assert full["hours_ratio"][0] == 1.0
    assert small["jobs"] > full["jobs"]
    assert small["up_gb"] < full["up_gb"] / 3
    for row in rows.values():
        assert row["seeds"] == [2, 3]
        assert row["tuning_seeds"] == [1]
        assert row["best_pair"] in bench.ARMS


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


def test_replies_of_the_attacks_benchmark_go_in_a_format():
    from robustness import attacks

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
def test_the_quick_form_measures_two_arms():
    words = [sys.executable, "benchmarks/messages/run.py", RECORDINGS, "--quick"]
    done = subprocess.run(
        list(map(str, words)), cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.count("digits, 14 MB, 5G | ") == 2
