"""ASHA decides as a few lines do, and a search that goes on comes to what it would have come to."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from short_searches import decisions
from spaces import space

from fedstale.contrib.tuning.engine import result_of, scheduler_of
from fedstale.contrib.tuning.objective import Objective
from fedstale.contrib.tuning.search import STUDY, Proposals, Report, SearchJob
from fedstale.errors import ConfigError

BASE = space()


def quick(*, keep=1 / 3, rungs=(180.0, 360.0), objective="accuracy", **more):
    """Return a space without looking at its devices again."""
    own = {"keep": keep, "rungs_s": tuple(rungs), "until_s": max(rungs, default=0.0) + 1.0}
    return replace(BASE, **own, objective=Objective.parse(objective), **more)


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
            trials[number] = SimpleNamespace(trial_id=str(number), config={"number": number})
            scheduler.on_trial_add(None, trials[number])
        reached[number] = rung + 1
        result = result_of(asked, Report(rung=rung, value=value))
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
            times = [result_of(asked, Report(rung=i, value=0.0))["rung_time"] for i in range(n + 1)]
            assert [milestone for milestone, _ in reversed(bracket._rungs)] == times


def test_nothing_is_stopped_where_nothing_is_to_be_stopped():
    assert type(scheduler_of(quick(), "none")).__name__ == "FIFOScheduler"
    assert type(scheduler_of(quick(rungs=()), "asha")).__name__ == "FIFOScheduler"


class KilledError(BaseException):
    """Nothing of the process runs after this."""


def searched(asked, folder, *, kill_after=math.inf, **how):
    """Search in this process with one worker, and values that are a function of the parameters."""
    folder.mkdir(exist_ok=True)
    task, n_steps = SearchJob(space=asked, folder=folder, **how), 0

    def step():
        nonlocal n_steps
        n_steps += 1
        if n_steps > kill_after:
            raise KilledError

    with Proposals(task) as proposals:
        tell = proposals._study.tell
        proposals._study.tell = lambda *told, **how: (step(), tell(*told, **how))
        proposals.take_up()
        scheduler = scheduler_of(asked, task.stop, proposals.trials)
        step()
        while (trial := proposals.next()) is not None:
            step()
            own = SimpleNamespace(trial_id=f"now-{trial.number}", config={"number": trial.number})
            scheduler.on_trial_add(None, own)
            for rung, at_s in list(enumerate(asked.instants_s))[len(trial.reports) :]:
                draw = hash((trial.parameters["strategy.concurrency"], rung)) % 7
                value = trial.parameters["learning-rate"] * at_s / (1 + draw)
                fails = rung == 0 and trial.parameters["learning-rate"] > 0.8
                failure = "it diverged" if fails else ""
                value = math.nan if fails else value
                report = Report(rung=rung, value=value, failure=failure)
                trial = replace(trial, reports=(*trial.reports, report))
                result = result_of(asked, report)
                decision = scheduler.on_trial_result(None, own, result)
                if fails or decision == "STOP" or rung == len(asked.rungs_s):
                    break
                proposals.reported(trial)
                step()
            # As Ray does, whoever has ended it.
            scheduler.on_trial_complete(None, own, result)
            proposals.ended(trial)
            step()
    return decisions(folder)


@pytest.mark.parametrize(
    ("search", "objective", "stop"),
    [
        ("tpe", "accuracy", "asha"),
        pytest.param("tpe", "loss", "none", marks=pytest.mark.slow),
        pytest.param("random", "loss", "asha", marks=pytest.mark.slow),
    ],
)
def test_a_search_that_was_killed_anywhere_comes_to_the_same(search, objective, stop, tmp_path):
    # Optuna looks at what it was told from the eleventh on.
    asked = quick(objective=objective, trials=12)
    how = {"search": search, "seed": 3, "stop": stop}
    whole = searched(asked, tmp_path / "whole", **how)
    statuses = [trial["status"] for trial in whole]
    assert len(statuses) == 12
    assert {"complete", "failed"} <= set(statuses)
    assert ("stopped" in statuses) == (stop == "asha")
    for kill_after in (4, 9, 20):
        folder = tmp_path / str(kill_after)
        # And the process that takes it up is killed while it does.
        for n in (kill_after, 0):
            with pytest.raises(KilledError):
                searched(asked, folder, kill_after=n, **how)
        assert searched(asked, folder, **how) == whole


def test_what_ended_before_optuna_was_told_is_told_once_and_not_run_again(tmp_path):
    asked = quick(trials=2)
    with Proposals(SearchJob(space=asked, folder=tmp_path)) as proposals:
        report = Report(rung=2, value=0.5)
        trial = replace(proposals.next(), reports=(report,), status="complete")
        proposals.reported(trial)
    with Proposals(SearchJob(space=asked, folder=tmp_path)) as proposals:
        proposals.take_up()
        assert proposals.next().number == 1
        assert proposals.trials[0] == trial


def test_another_seed_proposes_others_and_the_same_seed_the_same(tmp_path):
    def proposed(seed, name):
        found = searched(quick(trials=12), tmp_path / name, seed=seed)
        return [trial["parameters"] for trial in found]

    assert proposed(1, "a") == proposed(1, "b") != proposed(2, "c")


def test_tpe_learns_from_what_was_reported(tmp_path):
    found = searched(quick(trials=24, objective="loss"), tmp_path, stop="none")
    rates = [trial["parameters"]["learning-rate"] for trial in found]
    assert np.median(rates[12:]) < 0.6 * np.median(rates[:10])


def test_after_the_budget_nothing_is_begun(tmp_path):
    task = SearchJob(space=quick(trials=None, budget_s=10.0), folder=tmp_path, workers=2)
    with Proposals(task) as proposals:
        for _ in range(2):
            report = Report(rung=2, value=0.5, wall_s=12.0)
            proposals.ended(replace(proposals.next(), reports=(report,)))
        # Two workers have been busy for 12 s each.
        assert proposals.next() is None
        assert proposals.is_over


def test_a_study_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / STUDY).write_text("no database", encoding="utf-8")
    with pytest.raises(ConfigError, match="runs that are done are not repeated"):
        Proposals(SearchJob(space=BASE, folder=tmp_path))
