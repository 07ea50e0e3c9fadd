"""ASHA decides as a few lines do, and a search that goes on comes to what it would have come to."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spaces import space

from fedstale.contrib.tuning.objective import Objective
from fedstale.contrib.tuning.trials import (
    STATE,
    How,
    Ledger,
    Proposals,
    Report,
    result_of,
    scheduler_of,
)
from fedstale.errors import ConfigError

BASE = space()


def quick(*, keep=1 / 3, rungs=(180.0, 360.0), objective="accuracy", **more):
    """Return a space without looking at its devices again."""
    texts = [objective] if isinstance(objective, str) else objective
    objectives = tuple(map(Objective.parse, texts))
    ends = max(rungs, default=0.0) + 1.0
    return replace(
        BASE, keep=keep, rungs_s=tuple(rungs), until_s=ends, objectives=objectives, **more
    )


class Oracle:
    """ASHA in a few lines: who is below the share that is kept, of those who came before, stops."""

    def __init__(self, keep):
        self.keep, self.recorded = keep, {}

    def stops(self, rung, score):
        before = sorted(self.recorded.get(rung, []))
        self.recorded.setdefault(rung, []).append(score)
        if not before:
            return False
        place = (1 - self.keep) * (len(before) - 1)
        low, high = before[math.floor(place)], before[math.ceil(place)]
        return score < low + (high - low) * (place - math.floor(place))


SCORES = st.one_of(st.just(math.nan), st.integers(0, 40).map(lambda n: n / 8))


@settings(max_examples=150, deadline=None)
@given(
    rungs=st.lists(st.integers(1, 700), min_size=1, max_size=5, unique=True).map(sorted),
    keep=st.sampled_from([1 / 2, 1 / 3, 1 / 4, 0.3, 0.9]),
    objective=st.sampled_from(["accuracy", "loss"]),
    arrivals=st.lists(st.tuples(st.integers(0, 7), SCORES), max_size=60),
)
def test_asha_decides_at_rungs_of_device_time_as_the_oracle_does(rungs, keep, objective, arrivals):
    asked = quick(rungs=rungs, keep=keep, objective=objective)
    scheduler, oracle = scheduler_of(asked, "asha"), Oracle(keep)
    trials, reached, over = {}, {}, set()
    for number, value in arrivals:
        rung = reached.get(number, 0)
        if number in over or rung == len(rungs):
            continue
        if number not in trials:
            trials[number] = SimpleNamespace(trial_id=str(number))
            scheduler.on_trial_add(None, trials[number])
        reached[number] = rung + 1
        result = result_of(asked, Report(rung=rung, values=(value,), n_never=(0,)))
        decision = scheduler.on_trial_result(None, trials[number], result)
        score = -value if objective == "loss" else value
        assert (decision == "STOP") == oracle.stops(rung, -1e300 if math.isnan(score) else score)
        if decision == "STOP":
            over.add(number)


def test_milestones_are_the_rungs_and_the_end_for_any_share():
    for keep in np.linspace(0.05, 0.95, 50):
        for n in range(1, 12):
            asked = quick(rungs=[i + 1.0 for i in range(n)], keep=float(keep))
            (bracket,) = scheduler_of(asked, "asha")._brackets
            times = [
                result_of(asked, Report(rung=i, values=(0.0,), n_never=(0,)))["rung_time"]
                for i in range(n + 1)
            ]
            assert [milestone for milestone, _ in reversed(bracket._rungs)] == times


def test_nothing_is_stopped_where_nothing_is_to_be_stopped():
    assert type(scheduler_of(quick(), "none")).__name__ == "FIFOScheduler"
    assert type(scheduler_of(quick(rungs=()), "asha")).__name__ == "FIFOScheduler"


class KilledError(BaseException):
    """Nothing of the process runs after this."""


def searched(asked, how, folder, *, kill_after=math.inf):
    """Search in this process with one worker, and values that are a function of the parameters."""
    n_steps = 0

    def step():
        nonlocal n_steps
        n_steps += 1
        if n_steps > kill_after:
            raise KilledError

    proposals = Proposals(asked, how, Ledger(folder))
    step()
    while (trial := proposals.next()) is not None:
        step()
        own = SimpleNamespace(trial_id=f"now-{trial.number}")
        proposals.scheduler.on_trial_add(None, own)
        for rung, at_s in enumerate(asked.instants_s):
            draw = hash((trial.parameters["strategy.concurrency"], rung)) % 7
            value = trial.parameters["learning-rate"] * at_s / (1 + draw)
            fails = rung == 0 and trial.parameters["learning-rate"] > 0.8
            values = (math.nan if fails else value, -value)[: len(asked.objectives)]
            report = Report(
                rung=rung, values=values, n_never=(0, 0), failure="it diverged" if fails else ""
            )
            decision = proposals.scheduler.on_trial_result(None, own, result_of(asked, report))
            proposals.reported(trial, report)
            step()
            if fails or decision == "STOP":
                break
        proposals.ended(trial)
        step()
    return json.loads((folder / STATE).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("search", "objective"),
    [("tpe", "accuracy"), ("tpe", "loss"), ("random", "loss"), ("tpe", ["accuracy", "bytes"])],
)
def test_a_search_that_was_killed_anywhere_comes_to_the_same(search, objective, tmp_path):
    asked = quick(objective=objective, trials=16)
    stop = "asha" if isinstance(objective, str) else "none"
    how = How(search=search, stop=stop, seed=3)
    (tmp_path / "whole").mkdir()
    whole = searched(asked, how, tmp_path / "whole")
    statuses = [trial["status"] for trial in whole["trials"]]
    assert len(statuses) == 16
    assert {"complete", "failed"} <= set(statuses)
    assert ("stopped" in statuses) == (stop == "asha")
    for kill_after in (2, 3, 4, 37):
        folder = tmp_path / str(kill_after)
        folder.mkdir()
        with pytest.raises(KilledError):
            searched(asked, how, folder, kill_after=kill_after)
        assert searched(asked, how, folder) == whole


def test_another_seed_proposes_others_and_the_same_seed_the_same(tmp_path):
    def proposed(seed, name):
        (tmp_path / name).mkdir()
        found = searched(quick(trials=12), How(seed=seed), tmp_path / name)
        return [trial["parameters"] for trial in found["trials"]]

    assert proposed(1, "a") == proposed(1, "b") != proposed(2, "c")


def test_tpe_learns_from_what_was_reported(tmp_path):
    (tmp_path / "tpe").mkdir()
    found = searched(quick(trials=40, objective="loss"), How(stop="none"), tmp_path / "tpe")
    rates = [trial["parameters"]["learning-rate"] for trial in found["trials"]]
    assert np.median(rates[20:]) < 0.6 * np.median(rates[:10])


def test_a_grid_is_proposed_whole_and_in_its_order(tmp_path):
    asked = space(
        trials=None, search={"strategy.concurrency": [5, 10], "learning-rate": [0.1, 0.2]}
    )
    found = searched(asked, How(search="grid", stop="none"), tmp_path)
    assert [trial["parameters"] for trial in found["trials"]] == asked.grid()


def test_after_the_budget_nothing_is_begun(tmp_path):
    proposals = Proposals(quick(trials=None, budget_s=10.0), How(workers=2), Ledger(tmp_path))
    for wall_s in (12.0, 12.0):
        trial = proposals.next()
        proposals.reported(trial, Report(rung=2, values=(0.5,), n_never=(0,), wall_s=wall_s))
        proposals.ended(trial)
    # Two workers have been busy for 12 s each.
    assert proposals.next() is None
    assert proposals.is_over


def test_a_ledger_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / STATE).write_text('{"trials": [{"number": 0', encoding="utf-8")
    with pytest.raises(ConfigError, match="runs that are done are not repeated"):
        Ledger(tmp_path)
