"""The benchmark of lies, in its quick form."""

import json
import logging
import sys
from pathlib import Path

import pandas as pd

from fedstale.traces import TraceSet
from lab.results import read_result


def test_the_quick_form_takes_no_recordings_and_shows_a_lie_and_its_end(
    monkeypatch, tmp_path, capsys
):
    from lab import results
    from liars import run as bench

    monkeypatch.setattr(results, "RESULTS", tmp_path)
    kept = tmp_path / "kept.jsonl"
    monkeypatch.setattr(sys, "argv", ["liars.py", "--quick", "--keep", str(kept)])
    # It says for a whole process that warnings are not shown.
    monkeypatch.setattr(logging, "disable", lambda level: None)
    for _ in range(2):
        bench.main()
    found = json.loads((tmp_path / "liars-quick.json").read_text())["rows"]
    got = {(row["lie"], row["when"]): row["got"] for row in found}
    assert got["3 x loss", "before"] > 0.3 + 0.1
    # What is stated plays no part: the same jobs as if nobody lied.
    assert got["3 x loss", "after"] == got["none", "after"] <= 0.3 + 0.1
    # The second time nothing was played again.
    assert len(kept.read_text().splitlines()) == len(found) == 4
    assert capsys.readouterr().out.count("'got'") == 4


def test_an_audit_of_two_hours_counts_devices_and_jobs_and_no_alarm(monkeypatch):
    from liars import run as bench

    generated = TraceSet.load("synthetic:20", seed=0)
    monkeypatch.setattr(bench, "fleets", lambda *args, **more: {"test": generated})
    found = bench.alarms(Path(), 0, "2h")
    assert 0 < found.pop("devices") < found.pop("tested")
    assert found == {"alarms": 0, "over": 0, "under": 0, "short": 0}


def test_durations_of_another_device_cost_less_by_their_weight(monkeypatch, tmp_path):
    from lab import results
    from liars import durations as bench

    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "VERSIONS", 6)
    monkeypatch.setattr(sys, "argv", ["durations.py", "--quick"])
    monkeypatch.setattr(logging, "disable", lambda level: None)
    bench.main()
    found = json.loads((tmp_path / "stated_durations-quick.json").read_text())["rows"]
    time = {(row["stated"], row["way"]): row["time"][0] for row in found}
    assert time["their own", "weighed"] < 0.6
    assert time["the opposite's", "weighed"] < 0.8 * time["the opposite's", "as stated"]


def test_what_the_page_says_of_lies_is_what_the_rows_say():
    rows = pd.DataFrame(read_result("liars")["rows"])
    got = rows.groupby(["part", "selector", "share", "lie", "when"])["got"].mean()
    hours = rows[rows.part.eq("training") & rows.share.eq(0.3) & rows.when.eq("before")]
    cost = hours.pivot_table("device_hours", "selector", "lie")

    def brought(part, selector, share, lie, when):
        return got[part, selector, share, lie, when] - got[part, selector, share, "none", when]

    for part, selector, share in {key[:3] for key in got.index if key[0] != "audit"}:
        assert brought(part, selector, share, "3 x loss", "after") == 0.0
    for selector in ("ExpectedUtility", "Oort", "LinUCB", "agent"):
        by_examples, left = (
            brought("alike", selector, 0.3, "10 x examples", when) for when in ("before", "after")
        )
        assert by_examples > brought("alike", selector, 0.3, "3 x loss", "before") > 0.1
        assert left < 0.51 * by_examples
    assert (cost["10 x examples"] >= cost.max(axis=1)).sum() == 8
    for selector in ("MostReliable", "ExpectedUtility", "agent"):
        honest, resting = (got["alike", selector, 0.3, x, "before"] for x in ("none", "chance 0"))
        assert resting < 0.55 * honest
    asked = "Probing(ExpectedUtility)"
    assert brought("alike", asked, 0.3, "chance 0", "before") > -0.03
    more = got["alike", "MostReliable", :, "chance 1", "before"]
    assert (more / got["alike", "MostReliable", :, "none", "before"]).between(1.3, 1.9).all()
