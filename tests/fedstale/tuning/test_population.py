"""Population-based training: who is replaced by whom, whatever order, workers and kills."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spaces import space

from fedstale.errors import ConfigError
from fedstale.tuning import population
from fedstale.tuning.population import PopulationBasedTraining, perturbed
from fedstale.tuning.proposals import How
from fedstale.tuning.space import Choices, Range
from fedstale.tuning.trials import STATE, Ledger, Report

SEARCH = {
    "strategy": ["fedbuff", "gap-aware"],
    "concurrency": {"from": 5, "to": 15, "step": 5},
    "learning-rate": {"from": 0.01, "to": 1.0, "log": True},
    "buffer-size": [2, 3, 5],
}
BASE = replace(space(search=SEARCH, run_config={"num-server-rounds": 1000}, trials=8))
HOW = How(search="random", stop="pbt", seed=3)


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """Copy no folders, and note who was forked from whom."""
    made = []
    monkeypatch.setattr(
        population, "fork", lambda space, parent, child, folder: made.append((parent, child))
    )
    return made


class KilledError(BaseException):
    """Nothing of the process runs after this."""


def value_of(trial, rung):
    """Return a value of all that a configuration was until then."""
    numbers = [trial.parameters, *(own for at, own in trial.changes if at < rung)]
    return float(np.mean([own.get("learning-rate", 0.1) for own in numbers]) * (1 + rung))


def searched(folder, *, asked=BASE, workers=1, kill_after=math.inf, fails=lambda trial, rung: 0):
    """Search with some workers, of which the one that is asked last reports first."""
    found, running, n_steps = PopulationBasedTraining(asked, HOW, Ledger(folder), folder), [], 0
    while not (found.is_over and not running):
        while len(running) < workers and (trial := found.next()) is not None:
            running.append((trial, found.steps(trial)))
        trial, steps = running.pop()
        assert steps.first == steps.last
        n_steps += 1
        if n_steps > kill_after:
            raise KilledError
        is_bad = fails(trial, steps.first)
        value = math.nan if is_bad else value_of(trial, steps.first)
        why = "it diverged" if is_bad else ""
        found.reported(trial, Report(rung=steps.first, values=(value,), n_never=(0,), failure=why))
        found.ended(trial)
    return json.loads((folder / STATE).read_text(encoding="utf-8"))["trials"]


def decisions(trials):
    """Return all but the order in which reports came."""
    for trial in trials:
        for report in trial["reports"]:
            del report["arrival"]
    return trials


def test_at_each_rung_the_worst_quarter_becomes_forks_of_the_best(tmp_path):
    trials = searched(tmp_path)
    n_rungs = len(BASE.rungs_s)
    assert len(trials) == 8 + 2 * n_rungs
    for rung in range(n_rungs):
        here = [t for t in trials if any(report["rung"] == rung for report in t["reports"])]
        assert len(here) == 8
        value = {
            t["number"]: v["values"][0] for t in here for v in t["reports"] if v["rung"] == rung
        }
        order = sorted(value, key=lambda number: -value[number])
        stopped = {
            t["number"]
            for t in here
            if t["status"] == "stopped" and t["reports"][-1]["rung"] == rung
        }
        assert stopped == set(order[-2:])
        children = [t for t in trials if t["parent"] >= 0 and t["changes"][-1][0] == rung]
        assert len(children) == 2
        assert {child["parent"] for child in children} <= set(order[:2])
    assert sum(t["status"] == "complete" for t in trials) == 8


def test_a_fork_keeps_the_past_and_the_texts_of_its_parent(tmp_path, forked):
    searched(tmp_path)
    for parent, child in forked:
        assert child.parameters == parent.parameters
        assert child.changes[:-1] == parent.changes
        _, changed = child.changes[-1]
        assert "strategy" not in changed
        assert changed
        assert child.now == {**parent.now, **changed}


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_decisions_depend_neither_on_workers_nor_on_the_order_of_reports(tmp_path, workers):
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    one = decisions(searched(tmp_path / "one"))
    many = decisions(searched(tmp_path / "many", workers=workers))
    for trial in (*one, *many):
        # Places among those that ended together.
        del trial["ended"], trial["began"]
    assert one == many


@pytest.mark.parametrize("kill_after", [1, 7, 8, 9, 15, 23])
def test_a_search_that_was_killed_comes_to_the_same(tmp_path, kill_after):
    (tmp_path / "whole").mkdir()
    whole = searched(tmp_path / "whole")
    with pytest.raises(KilledError):
        searched(tmp_path, kill_after=kill_after)
    assert searched(tmp_path) == whole


def test_a_search_that_is_over_is_over(tmp_path):
    searched(tmp_path)
    again = PopulationBasedTraining(BASE, HOW, Ledger(tmp_path), tmp_path)
    assert again.is_over
    assert len(again.ledger.trials) == 12


def test_what_fails_is_replaced_and_counts_as_the_worst(tmp_path):
    trials = searched(tmp_path, fails=lambda trial, rung: rung == 0 and trial.number in (1, 4, 6))
    failed = [trial["number"] for trial in trials if trial["status"] == "failed"]
    assert failed == [1, 4, 6]
    assert sum(trial["parent"] >= 0 for trial in trials) == 3 + 2
    assert sum(trial["status"] == "complete" for trial in trials) == 8


def test_if_all_fail_it_is_over(tmp_path):
    trials = searched(tmp_path, fails=lambda trial, rung: 1)
    assert [trial["status"] for trial in trials] == ["failed"] * 8


DOMAINS = st.one_of(
    st.builds(
        lambda low, width, whole: Range(low=low, high=low + width, is_whole=whole),
        st.integers(1, 50),
        st.integers(1, 50),
        st.booleans(),
    ),
    st.builds(
        lambda low, n, step: Range(low=low, high=low + n * step, step=step, is_whole=True),
        st.integers(-20, 20),
        st.integers(1, 9),
        st.integers(1, 7),
    ),
    st.builds(lambda low: Range(low=low, high=100 * low, is_log=True), st.floats(1e-4, 1.0)),
    st.lists(st.integers(-5, 99), min_size=1, max_size=5, unique=True).map(
        lambda values: Choices(values=tuple(values))
    ),
)


@settings(max_examples=200, deadline=None)
@given(domain=DOMAINS, share=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_another_number_is_one_of_the_domain(domain, share, seed):
    rng = np.random.default_rng(seed)
    if isinstance(domain, Choices):
        value = domain.values[int(share * (len(domain.values) - 1))]
        assert perturbed(domain, value, rng) in domain.values
        return
    found = perturbed(domain, domain.at_share(share), rng)
    assert domain.low <= found <= domain.high
    assert isinstance(found, int) or not domain.is_whole
    if domain.step is not None:
        assert (found - domain.low) % domain.step == 0


def test_a_number_moves_by_a_fifth_or_a_step_and_sometimes_anywhere():
    rng = np.random.default_rng(0)
    wide, steps = Range(low=0.0, high=100.0), Range(low=1, high=20, step=1, is_whole=True)
    moved = [perturbed(wide, 50.0, rng) for _ in range(400)]
    near = sum(value in (40.0, 60.0) for value in moved)
    assert 0.65 < near / 400 < 0.85
    assert {perturbed(steps, 2, rng) for _ in range(200)} > {1, 3}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trials": 3}, "the size of the population, of at least 4"),
        ({"trials": 8, "budget": "2h"}, "and no budget"),
        ({"rungs": []}, "expected rungs"),
        ({"search": {"strategy": ["fedbuff", "gap-aware"]}, "run_config": {}}, "only these change"),
        ({"objective": ["accuracy", "bytes"]}, "of several objectives"),
    ],
)
def test_what_no_population_can_be_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        space(**changes).check("random", "pbt")
