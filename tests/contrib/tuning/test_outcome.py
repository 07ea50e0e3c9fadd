"""What is said of a search, and what is held out, of trials and runs that are written by hand."""

import html
import shlex
from dataclasses import replace
from functools import partial

import pytest
from compared_runs import BASE as BASE_RUN
from compared_runs import write_finished
from flwr.cli.config_utils import parse_config_args
from spaces import space

from fedstale.comparison.analysis import analyse
from fedstale.comparison.plan import PlannedRun, state_of
from fedstale.contrib.tuning.objective import Objective
from fedstale.contrib.tuning.outcome import Tuning, forget_others
from fedstale.contrib.tuning.search import Report, Trial
from fedstale.reports.run import Run


def trial(number, value=None, *, status="complete", rung=2, reason=""):
    own = {"strategy.concurrency": 5 + number}
    reports = () if value is None else (Report(rung=rung, value=value),)
    return Trial(number=number, parameters=own, reports=reports, status=status, reason=reason)


def ended(*values):
    """Return curves that begin at 0 and end at some values."""
    return [[(0.0, 0.0), (600.0, value)] for value in values]


def judged_of(folder, best, defaults, objective="accuracy", tried=None):
    """Return a search whose held-out runs measured some accuracies."""
    runs = {
        name: [
            Run(write_finished(folder / name / str(seed), seed=seed, accuracies=curve))
            for seed, curve in enumerate(curves, start=11)
        ]
        for name, curves in (("best", best), ("defaults", defaults))
    }
    one = Objective.parse(objective)
    target = objective.removeprefix("time to ") if one.kind == "time" else None
    found = analyse(runs, reference="defaults", target=target)
    own = replace(space(), objective=one)
    return Tuning(space=own, folder=folder, tried=tried or (trial(0, 0.5),), comparison=found)


@pytest.fixture
def judged(tmp_path):
    """Return a function that makes a search whose held-out runs measured some accuracies."""
    return partial(judged_of, tmp_path)


def test_an_interval_above_the_defaults_makes_the_best(judged):
    found = judged(ended(0.8, 0.9, 0.85), ended(0.5, 0.61, 0.54))
    words = (
        "Configuration 0 is best: on 3 held-out seeds its accuracy over the last eighth of the time"
    )
    assert found.verdict.startswith(f"{words} minus the defaults' is ")
    assert found.verdict.endswith("which leaves out 0.")
    assert found.gain.mean == pytest.approx(0.3)


def test_one_last_evaluation_decides_nothing(judged):
    unlucky = [[(0.0, 0.0), (600.0, value), (719.0, 0.1)] for value in (0.8, 0.9, 0.85)]
    found = judged(unlucky, ended(0.5, 0.61, 0.54))
    assert found.gain.mean == pytest.approx(0.3, abs=0.01)


def test_an_interval_that_holds_zero_makes_none(judged):
    found = judged(ended(0.8, 0.5, 0.7), ended(0.5, 0.8, 0.6))
    assert "is not shown to be better than the defaults" in found.verdict
    assert "is best" not in found.verdict
    assert found.verdict.endswith("which holds 0.")


def test_what_is_worse_than_the_defaults_is_said_to_be(judged):
    found = judged(ended(0.5, 0.61, 0.54), ended(0.8, 0.9, 0.85))
    assert "is worse than the defaults, which are best" in found.verdict


def test_of_times_the_shorter_is_better(judged):
    def curves(*instants):
        return [[(0.0, 0.0), (at_s, 0.9)] for at_s in instants]

    found = judged(curves(100.0, 130.0, 90.0), curves(900.0, 990.0, 880.0), "time to accuracy 0.8")
    assert found.verdict.startswith("Configuration 0 is best")
    assert found.gain.high < 0


def test_costs_are_compared_in_their_own_units(judged):
    found = judged(ended(0.8, 0.9), ended(0.5, 0.6), "device-hours")
    hours = [
        [run.costs["device_s"] / 3600.0 for run in one.runs] for one in found.comparison.variants
    ]
    assert found.gain.values == tuple(a - b for a, b in zip(*hours, strict=True))


@pytest.mark.parametrize("n", [1, 2])
def test_one_or_two_held_out_runs_judge_nothing(judged, n):
    assert "is not judged" in judged(ended(*[0.8, 0.9][:n]), ended(*[0.5, 0.6][:n])).verdict


@pytest.mark.parametrize("is_better", [True, False])
def test_the_answer_is_what_to_paste_and_its_device_hours(judged, is_better):
    better, worse = ended(0.8, 0.9, 0.85), ended(0.5, 0.61, 0.54)
    found = judged(*((better, worse) if is_better else (worse, better)))
    use = found.options if is_better else "the defaults, with no option,"
    name, other = ("best", "defaults") if is_better else ("defaults", "best")
    hours = "0.036 ± 0.000 device-hours: +0.000 (+0.000 to +0.000)"
    assert found.answer == f"Use {use} for {hours} against {other}."
    assert found.answer == f"Use {use} for {found.comparison.cost(name)}."
    assert found.answer in html.unescape(found._repr_html_())


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        ({}, {"learning-rate": 0.25, "strategy": 'FedBuff(10, 5, stages=[Compression("int8")])'}),
        ({}, {"strategy.concurrency": 7, "is-warm": True}),
        ({"strategy": "FedBuff(10, 5)"}, {"strategy.concurrency": 7}),
    ],
)
def test_what_is_pasted_sets_what_was_searched(tmp_path, judged, changes, parameters):
    runs = ended(0.8, 0.9, 0.85)
    found = judged(runs, runs, tried=(replace(trial(0, 0.5), parameters=parameters),))
    searched = {**found.space.shared, **changes}
    found = replace(found, space=replace(found.space, shared=searched))
    words = shlex.split(found.options)
    given = dict(zip(words[::2], words[1::2], strict=True))
    expected = found.space.settings(parameters)
    assert parse_config_args([given["-c"]] if "-c" in given else []) == expected["run-config"]
    assert given.get("--strategy") == expected.get("strategy")


def test_held_out_runs_of_another_best_make_room_and_others_stay(tmp_path):
    runs = [PlannedRun(variant=v, config=BASE_RUN, folder=tmp_path / v) for v in ("best", "same")]
    write_finished(runs[0].folder, run_config={"learning-rate": 0.5})
    write_finished(runs[1].folder)
    forget_others([*runs, PlannedRun(variant="new", config=BASE_RUN, folder=tmp_path / "new")])
    assert [state_of(run) for run in runs] == ["new", "done"]
