"""What configurations are judged by, of runs that are written by hand."""

import math
import sys
from pathlib import Path

import pytest

from fedstale.errors import ConfigError
from fedstale.reports.run import Run
from fedstale.tuning.objective import Objective

sys.path.append(str(Path(__file__).parents[1] / "comparison"))

from compared_runs import write_finished


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a run of some accuracies, and returns it."""

    def write(*accuracies, **more):
        seed = len(list(tmp_path.iterdir()))
        place = tmp_path / str(seed)
        return Run(write_finished(place, seed=seed, accuracies=accuracies, **more))

    return write


def of(text, runs):
    return Objective.parse(text).of(runs, 3600.0)


def test_a_metric_is_the_mean_over_seeds_of_the_last_value(written):
    runs = [written((0.0, 0.9), (60.0, 0.5)), written((0.0, 0.1), (30.0, 0.7))]
    assert of("accuracy", runs).value == pytest.approx(0.6)


def test_a_run_that_never_reached_its_target_counts_with_all_of_its_time(written):
    runs = [written((0.0, 0.1), (600.0, 0.8), (700.0, 0.2)), written((0.0, 0.1), (60.0, 0.7))]
    found = of("time to accuracy 0.8", runs)
    assert found.value == (600.0 + 3600.0) / 2
    assert found.n_never == 1


def test_a_run_that_has_measured_nothing_yet_has_not_reached_its_target(written):
    assert of("time to accuracy 0.8", [written()]) == of("time to accuracy 0.8", [written()])
    assert of("time to accuracy 0.8", [written()]).n_never == 1
    assert math.isnan(of("accuracy", [written()]).value)


def test_costs_are_those_of_the_run(written):
    run = written((0.0, 0.5))
    assert run.costs["device_s"] > 0 < run.costs["bytes"]
    assert of("device-hours", [run]).value == run.costs["device_s"] / 3600.0
    assert of("bytes", [run, run]).value == run.costs["bytes"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_run_that_diverged_makes_the_mean_no_number(written, value):
    assert math.isnan(of("accuracy", [written((0.0, 0.5)), written((0.0, value))]).value)


@pytest.mark.parametrize(
    ("text", "is_lower_better"),
    [
        ("accuracy", False),
        ("eval_loss", True),
        ("perplexity", True),
        ("time to accuracy 0.8", True),
        ("device-hours", True),
        ("bytes", True),
    ],
)
def test_losses_times_and_costs_are_to_be_small(text, is_lower_better):
    assert Objective.parse(text).is_lower_better == is_lower_better


def test_a_metric_that_clients_report_of_their_training_is_no_objective(written):
    run = written((0.0, 0.5), source="train")
    with pytest.raises(ConfigError, match="measures no 'accuracy' in an evaluation"):
        Objective.parse("accuracy").require_measured([run], at_end=True)


def test_a_metric_that_the_app_never_measures_is_said_with_what_it_measures(written):
    run = written((0.0, 0.5))
    with pytest.raises(ConfigError, match=r"measures no 'acuracy'.*expected 'accuracy'"):
        Objective.parse("acuracy").require_measured([run], at_end=False)
    Objective.parse("accuracy").require_measured([run], at_end=False)
    # Before anything is measured, nothing is known.
    Objective.parse("acuracy").require_measured([written()], at_end=False)
    with pytest.raises(ConfigError, match="expected an app that evaluates"):
        Objective.parse("acuracy").require_measured([written()], at_end=True)
