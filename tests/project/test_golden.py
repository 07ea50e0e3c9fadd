"""Small runs compute what they did when they were recorded: see `golden_runs`."""

import re

import numpy as np
import pytest
from golden_runs import RUNS, STATUS, assert_as_recorded, digest

from fedstale import strategies

RESUMED = [name for name, settings in RUNS.items() if "same_as" in settings]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_computes_what_it_did_when_it_was_recorded(name, tmp_path):
    settings = RUNS[name]
    if settings.get("executor", "processes") == "processes":
        # They give the same bytes, and a test of the system has them do so.
        settings = settings | {"executor": "auto", "workers": 1}
    assert_as_recorded(settings, tmp_path)


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_recorded_as_the_one_that_was_never_killed(name):
    assert RUNS[name]["outcome"] == RUNS[RUNS[name]["same_as"]]["outcome"]


def test_every_published_strategy_is_in_some_run():
    published = {
        name
        for name, value in vars(strategies).items()
        if isinstance(value, type)
        and issubclass(value, strategies.StaleStrategy)
        and value is not strategies.StaleStrategy
    }
    words = str([settings.get("run_config") for settings in RUNS.values()])
    assert len(published) == 16
    missing = {n for n in published if not re.search(rf"\b{n}\b", words)}
    assert not missing


def test_jobs_end_in_every_way_in_some_run():
    ended = {status for settings in RUNS.values() for status in settings["outcome"]["jobs"]}
    assert ended == set(STATUS.values())


def test_a_digest_holds_values_and_their_order_and_kind_and_not_which_nan():
    one = digest([np.array([1.0, np.nan]), ["a", "bc"]])
    assert one == digest([np.array([1.0, -np.nan], ">f8"), np.array(["a", "bc"], object)])
    for other in (
        [np.array([1.0, np.nan]), ["ab", "c"]],
        [np.array([np.nan, 1.0]), ["a", "bc"]],
        [np.array([1.0, np.nan], np.float32), ["a", "bc"]],
        [["a", "bc"], np.array([1.0, np.nan])],
        [np.array([1.0]), np.array([np.nan]), ["a", "bc"]],
    ):
        assert digest(other) != one
