"""What configurations are judged by, of runs that are written by hand."""

import math

import numpy as np
import pytest
from compared_runs import write_finished
from hypothesis import given
from hypothesis import strategies as st

from fedstale.contrib.tuning.objective import Objective, recent_mean
from fedstale.errors import ConfigError
from fedstale.reports.run import Run


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a run of some accuracies, and returns it."""

    def write(*accuracies, **more):
        seed = len(list(tmp_path.iterdir()))
        place = tmp_path / str(seed)
        return Run(write_finished(place, seed=seed, accuracies=accuracies, **more))

    return write


def of(text, runs):
    return Objective.parse(text).of(runs, 3600.0, 3600.0)


def test_a_metric_is_the_mean_over_seeds_of_what_held_in_the_last_eighth(written):
    # From 3150 s on, the first model had .3 for a third of the time, and .6 for the rest.
    runs = [written((0.0, 0.9), (60.0, 0.3), (3300.0, 0.6)), written((0.0, 0.1), (30.0, 0.7))]
    assert of("accuracy", runs)[0] == pytest.approx((0.5 + 0.7) / 2)


def test_at_a_rung_nothing_counts_that_came_later(written):
    run = written((0.0, 0.2), (900.0, 0.4), (950.0, 0.9))
    assert Objective.parse("accuracy").of([run], 900.0, 3600.0)[0] == pytest.approx(0.2)


def test_a_run_that_ended_early_keeps_its_last_model(written):
    run = written((0.0, 0.2), (100.0, 0.8), end_s=100.0)
    assert of("accuracy", [run])[0] == pytest.approx(0.8)


@given(
    times=st.lists(st.integers(0, 120), min_size=1, max_size=12).map(sorted),
    values=st.lists(st.floats(0.0, 1.0), min_size=12, max_size=12),
    eighths=st.integers(1, 15),
)
def test_the_last_eighth_is_what_a_look_each_moment_finds(times, values, eighths):
    at, y, until = np.array(times, dtype=float), np.array(values[: len(times)]), 8.0 * eighths
    # Looks in the middle of seconds, for instants are whole: each finds the model of its second.
    looks = [7.0 * eighths + k + 0.5 for k in range(eighths)]
    seen = [y[at <= look][-1] for look in looks if (at <= look).any()]
    known = y[at <= until]
    if not known.size:
        assert math.isnan(recent_mean(at, y, until))
    else:
        assert recent_mean(at, y, until) == pytest.approx(np.mean(seen) if seen else known[-1])


@pytest.mark.parametrize("last", [math.nan, math.inf])
def test_a_model_that_has_just_diverged_has_no_value(last):
    assert not math.isfinite(recent_mean(np.array([0.0, 80.0]), np.array([0.5, last]), 80.0))


def test_a_run_that_never_reached_its_target_counts_with_all_of_its_time(written):
    runs = [written((0.0, 0.1), (600.0, 0.8), (700.0, 0.2)), written((0.0, 0.1), (60.0, 0.7))]
    assert of("time to accuracy 0.8", runs) == ((600.0 + 3600.0) / 2, 1)


def test_a_run_that_has_measured_nothing_yet_has_not_reached_its_target(written):
    assert of("time to accuracy 0.8", [written()]) == (3600.0, 1)
    assert math.isnan(of("accuracy", [written()])[0])


def test_costs_are_those_of_the_run(written):
    run = written((0.0, 0.5))
    assert run.costs["device_s"] > 0 < run.costs["bytes"]
    assert of("device-hours", [run])[0] == run.costs["device_s"] / 3600.0
    assert of("bytes", [run, run])[0] == run.costs["bytes"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_run_that_diverged_makes_the_mean_no_number(written, value):
    assert math.isnan(of("accuracy", [written((0.0, 0.5)), written((0.0, value))])[0])


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
