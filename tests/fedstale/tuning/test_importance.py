"""What a key explains: of values that are drawn without regard to what came of others."""

import math

import numpy as np
import pytest
from spaces import space

from fedstale.tuning.page import importance
from fedstale.tuning.trials import Report, Trial

SPACE = space(
    search={
        "strategy": ["fedbuff", "gap-aware"],
        "concurrency": {"from": 5, "to": 15, "step": 5},
        "learning-rate": {"from": 0.01, "to": 1.0, "log": True},
    },
    run_config={},
)


def trials(n, value_of, seed=0):
    """Return configurations that came to the first rung."""
    rng, made = np.random.default_rng(seed), []
    for number in range(n):
        own = {
            "strategy": ["fedbuff", "gap-aware"][rng.integers(2)],
            "concurrency": 5 * int(rng.integers(1, 4)),
            "learning-rate": float(10 ** rng.uniform(-2, 0)),
        }
        report = Report(rung=0, values=(value_of(own, rng),), n_never=(0,))
        made.append(Trial(number=number, parameters=own, reports=[report], status="complete"))
    return made


def shares(some):
    found = importance(SPACE, some).set_index("key")["share of the variance"]
    return {key: math.nan if text == "-" else float(text) for key, text in found.items()}


def test_who_decides_alone_explains_all_and_the_others_nothing():
    found = shares(trials(60, lambda own, rng: float(own["strategy"] == "fedbuff")))
    assert found["strategy"] == 1.0
    assert found["learning-rate"] < 0.2 > found["concurrency"]


def test_shares_add_up_to_what_is_not_noise():
    def value_of(own, rng):
        return own["concurrency"] / 5 + math.log10(own["learning-rate"]) + rng.normal(0, 0.5)

    parts = {"concurrency": 2 / 3, "learning-rate": 1 / 3, "strategy": 0.0}
    total = sum(parts.values()) + 0.25
    found = shares(trials(2000, value_of))
    assert found == {key: pytest.approx(share / total, abs=0.05) for key, share in parts.items()}


def test_nothing_but_noise_explains_nothing_in_the_mean():
    found = [shares(trials(24, lambda own, rng: rng.normal(), seed)) for seed in range(40)]
    assert np.mean([one["learning-rate"] for one in found]) < 0.1


@pytest.mark.parametrize("n", [0, 1, 2])
def test_of_too_few_nothing_is_said(n):
    assert math.isnan(shares(trials(n, lambda own, rng: rng.normal()))["learning-rate"])


def test_failures_are_left_out():
    some = trials(30, lambda own, rng: float(own["strategy"] == "fedbuff"))
    some.append(Trial(number=30, parameters=some[0].parameters, status="failed"))
    fails = Report(rung=0, values=(math.nan,), n_never=(0,), failure="it diverged")
    some.append(Trial(number=31, parameters=some[0].parameters, reports=[fails]))
    found = importance(SPACE, some)
    assert set(found["configurations"]) == {30}
