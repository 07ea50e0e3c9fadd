"""Forecasts that are right and wrong: what devices state in the benchmark, and its table."""

from dataclasses import asdict

import numpy as np
import pytest

from agent import robustness
from fedstale.traces import TraceSet
from fedstale.traces.forecast import embedded
from lab.apps import opened
from lab.kept import Kept
from lab.training import WindowForecasts, own_jobs, windows


@pytest.fixture(scope="module")
def told():
    """Return what devices of a window may say."""
    fleet = TraceSet.synthetic(90, days=8, seed=3)
    (window,) = windows(fleet, "phones", (301,))
    learnt = WindowForecasts(fleet, embedded("phones"), window)
    jobs = own_jobs(window, opened("digits"), 0.3)
    return robustness.Told(window, jobs, learnt, learnt)


def test_all_that_is_said_is_said_when_the_forecaster_says_something(told):
    own = told.own().values
    for name, of in robustness.SAID.items():
        values = of(told).values
        np.testing.assert_array_equal(np.isnan(values[0]), np.isnan(own[0]), err_msg=name)
        assert ((values[0] >= 0.0) & (values[0] <= 1.0) | np.isnan(own[0])).all()


def test_wrong_forecasts_are_wrong_as_their_names_say(told):
    own, n = told.own().values[2], told.window.n_devices
    is_said = ~np.isnan(own)
    np.testing.assert_allclose(told.scaled(1.0).values[2], 10.0 * own)
    lies = (told.scaled(0.3).values[2] > 9.0 * own).any(axis=1)
    assert lies.sum() == round(0.3 * n)
    assert np.median(told.own(10.0).values[2][is_said] / own[is_said]) > 3.0
    anew = told.others(anew=True).values[2]
    for step in np.flatnonzero(is_said.any(axis=0)):
        np.testing.assert_array_equal(np.sort(anew[:, step]), np.sort(own[:, step]))
    fixed = told.others(anew=False).values[2]
    middle, others = (np.nanmedian(np.log(x), axis=1) for x in (own, fixed))
    known = ~np.isnan(others)
    assert abs(np.corrcoef(middle[known], others[known])[0, 1]) < 0.6
    # It is one other device's, whose durations are near one another.
    assert np.nanstd(np.log(fixed), axis=1)[known].mean() < 0.7 * np.nanstd(np.log(anew))


def test_the_truth_is_what_becomes_of_a_job(told):
    p, available, seconds = told.truth().values
    said = ~np.isnan(p)
    assert set(np.unique(p[said])) <= {0.0, 1.0}
    assert set(np.unique(available[said])) <= {0.0, 1.0}
    np.testing.assert_array_equal(np.isnan(seconds[said]), p[said] == 0.0)
    own = told.own().values
    assert own[0][p == 1.0].mean() > own[0][p == 0.0].mean()
    logs = np.log([own[2][p == 1.0], seconds[p == 1.0]])
    assert np.corrcoef(logs)[0, 1] > 0.9


def test_the_table_is_in_proportion_to_saying_nothing():
    kept, runs = Kept(), robustness.wanted("test", 2)
    assert len({(run.fleet, run.seed) for run in runs}) == 8
    assert {run.schedule for run in runs if run.regime == "long"} == {"fedavg", "fedbuff"}
    minutes = np.arange(241)
    for run in runs:
        rate = {robustness.NONE: 1.0, "LSTM": 2.0}.get(run.lies, 0.5)
        curve = {"accuracy": np.minimum(0.8, rate * minutes / 100.0).tolist()}
        spent = (minutes / 30.0).tolist()
        kept.add(asdict(run), {**curve, "device_hours": spent, "wasted_hours": spent})
    table = {(row["selector"], row["said"]): row for row in robustness.table(runs, kept)}
    assert len(table) == 3 * (1 + len(robustness.SAID))
    for selector in robustness.SELECTORS:
        for said, ratio in (("LSTM", 0.5), ("oracle", 2.0), (robustness.NONE, 1.0)):
            found = table[selector, said]["device_hours_ratio"]
            assert found["mean"] == pytest.approx(ratio, rel=0.02)
            assert (found["windows"], found["bound"]) == (8, "exact")
