"""The benchmark of lies: its quick form, what its simulator adds, and that its page follows."""

import json
import logging
import sys
from dataclasses import replace

import numpy as np
import published
import pytest
from published import ROOT

from fedstale.agents import Scenario
from fedstale.agents.evaluation import episode_metrics
from fedstale.strategies.selection import ExpectedUtility
from fedstale.strategies.server.reputation import Reputation
from fedstale.strategies.server.validation import Validation
from fedstale.strategies.types import ClientUpdate
from fedstale.traces import TraceSet
from fedstale.traces.arrays import stream


@pytest.fixture(scope="module")
def bench():
    """Return the benchmark's module."""
    sys.path.append(str(ROOT / "benchmarks"))
    import liars

    return liars


@pytest.fixture(scope="module")
def rows():
    """Return what the benchmark measured."""
    return published.rows("liars")


@pytest.fixture(scope="module")
def scenario():
    """Return synthetic phones that say nothing of themselves."""
    return Scenario.of(TraceSet.synthetic(60, days=1, seed=1), forecasts="none")


def test_the_quick_form_takes_no_recordings_and_shows_a_lie_and_its_end(
    bench, monkeypatch, tmp_path, capsys
):
    import results_file

    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    kept = tmp_path / "kept.jsonl"
    monkeypatch.setattr(
        sys, "argv", ["liars.py", "--quick", "--keep", str(kept), "--cache", str(tmp_path)]
    )
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


@pytest.mark.parametrize("loss_from", ["stated", "norm"])
def test_windows_in_which_nobody_lies_are_those_of_the_environment(bench, scenario, loss_from):
    scenario = replace(scenario, settings=replace(scenario.settings, loss_from=loss_from))
    drawn = scenario.draw(2, stream(0, 9))
    plain = scenario.simulator(2)
    nobody = np.zeros_like(drawn.present)
    lying = bench.Lying(scenario, 2, nobody, bench.LIES["3 x loss"])
    for simulator in (plain, lying):
        simulator.rewards = episode_metrics(simulator, drawn, ExpectedUtility())["reward"]
    assert plain.rewards.tolist() == lying.rewards.tolist()
    # And where all do, each is as much as every other again.
    everyone = bench.Lying(scenario, 2, drawn.present, bench.LIES["3 x loss"])
    rewards = episode_metrics(everyone, drawn, ExpectedUtility())["reward"]
    np.testing.assert_allclose(rewards, plain.rewards)


def test_evidence_is_of_the_update_alone(bench):
    from evidence import Evidence

    def update(node_id, *step):
        delta, base = {"w": np.array(step)}, {"w": np.zeros(2)}
        return ClientUpdate(delta=delta, base=base, current=base, staleness=0, node_id=node_id)

    # A public batch that wants both numbers to be 1.
    evidence = Evidence(lambda arrays: float(((1.0 - arrays["w"].numpy()) ** 2).sum()))
    first = evidence.of(update(1, 1.0, 1.0))
    assert first == {"alignment": 1.0, "public loss": 0.0, "public gain": 2.0}
    found = [evidence.of(update(2, *step)) for step in ((3.0, 3.0), (-1.0, -1.0), (1.0, -1.0))]
    assert [each["alignment"] for each in found] == pytest.approx([0.0, 2.0, 1.0])
    # What makes the batch worse gains nothing, and is not paid for.
    assert [each["public gain"] for each in found] == [0.0, 0.0, 0.0]
    assert [each["public loss"] for each in found] == [8.0, 8.0, 4.0]


def test_selectors_are_given_the_evidence_while_it_is_taken_and_no_longer(bench):
    from evidence import taken

    plain = Reputation.losses
    delta, base = {"w": np.ones(2)}, {"w": np.zeros(2)}
    of = ClientUpdate(delta=delta, base=base, current=base, staleness=0, node_id=3)
    server = Reputation(Validation())
    with taken("public loss", lambda arrays: 5.0):
        assert server.losses(of, stated=1.0, stated_square=1.0).loss == 5.0
    assert Reputation.losses is plain
    assert server.losses(of, stated=1.0, stated_square=1.0).loss == 1.0


def test_the_page_says_what_was_measured(bench):
    import liars_page

    for page, text in liars_page.written().items():
        assert page.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("part", ["alike", "windows", "training"])
def test_three_times_the_loss_brings_what_honesty_brings_where_norms_are_taken(bench, rows, part):
    from liars_page import Rows

    found = Rows(rows, part)
    about = [{"selector": name, "share": 0.3, "when": "after"} for name in bench.BELIEVERS]
    for each in about:
        lied, honest = (found.mean("got", lie=lie, **each) for lie in ("3 x loss", "none"))
        assert lied == pytest.approx(honest, abs=1e-3), each
        before = found.mean("got", lie="3 x loss", **(each | {"when": "before"}))
        assert before > lied, each


def test_among_devices_alike_a_fair_share_and_a_tenth_is_kept_at_one_and_three_in_ten(bench, rows):
    from liars_page import Rows

    found = Rows(rows, "alike")
    for name, share in ((name, share) for name in bench.BELIEVERS for share in (0.1, 0.3)):
        about = {"selector": name, "share": share, "lie": "3 x loss", "when": "after"}
        assert found.mean("got", **about) <= share + 0.1, about


def test_who_scales_its_update_still_gets_more_as_the_page_says(bench, rows):
    from liars_page import Rows

    found = Rows(rows, "alike")
    about = {"lie": bench.SCALED, "share": 0.3, "selector": "ExpectedUtility"}
    assert all(found.mean("got", when=when, **about) > 0.5 for when in ("after", bench.CLIPPED))


def test_a_lie_about_examples_brings_jobs_and_costs_hours_which_the_cap_lowers(bench, rows):
    from liars_page import Rows

    lie = "10 x examples"
    parts = {part: Rows(rows, part) for part in ("alike", "windows", "training")}
    for name in set(bench.BELIEVERS) - {"PowerOfChoice"}:
        for part, kept in (("alike", 0.6), ("windows", 0.75)):
            about = {"selector": name, "share": 0.3}

            def gain(when, part=part, about=about):
                got = (parts[part].mean("got", lie=x, when=when, **about) for x in (lie, "none"))
                return next(got) - next(got)

            # Who states more examples is not slower for it, and gets more by all of these.
            assert 0.0 < gain("after") < kept * gain("before"), (part, name)
        hours = [
            parts["training"].mean("device_hours", lie=x, when=when, **about)
            for x, when in ((lie, "before"), (lie, "after"), ("none", "before"))
        ]
        assert hours[0] > hours[1], name
        assert hours[0] > 1.2 * hours[2], name


def test_norms_cost_honest_fleets_of_the_agent_alone(bench, rows):
    from liars_page import Rows

    found = Rows(rows, "windows")
    for name in bench.BELIEVERS:
        stated, norm = (
            np.array(found.of(when=when, selector=name, lie="none")[0]["rewards"])
            for when in ("as stated", bench.NORM)
        )
        by = norm - stated
        errors = by.mean() / (by.std(ddof=1) / np.sqrt(by.size))
        assert (errors < -2.0) == (name == "agent"), name


def test_the_norm_tells_devices_of_one_moment_apart_and_alignment_and_public_batches_do_not():
    told = {row["skew"]: row for row in published.rows("update_norms")}
    for skew in ("0.1", "0.3"):
        ranks = {k.removesuffix("_by_ranks"): v for k, v in told[skew].items() if "ranks" in k}
        assert max(ranks, key=ranks.__getitem__) == "norm"
    every = told["all"]
    assert every["norm_by_ranks"] > every["stated_by_ranks"] > every["public gain_by_ranks"] > 0.1
    assert abs(every["public loss_by_ranks"]) < 0.1
    assert every["alignment_by_ranks"] < 0.0
