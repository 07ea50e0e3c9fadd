"""Whether a forecaster pays against persistence: on forecasts that are made for it."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from perfect_forecaster import Perfect

from fedstale.traces.forecast import Persistence
from fedstale.traces.forecast.evaluation import least_rates, rolling
from fedstale.traces.forecast.evaluation.verdict import against_persistence, judged, verdict

DAY = 86_400.0


@pytest.fixture(scope="module")
def tested(observer):
    return rolling(observer, np.arange(40, 60), start=2 * DAY, until=3 * DAY, step_s=7200.0, seed=0)


@pytest.fixture(scope="module")
def usual(training, held_out):
    return Persistence().fit(training, held_out, seed=0)


class Made(Perfect):
    """Forecasts that lie between those of persistence and what came, or beyond persistence."""

    def __init__(self, usual, observer, training, way):
        super().__init__(observer, training)
        self.usual, self.way = usual, way

    def forecast(self, observed):
        usual, truth = self.usual.forecast(observed), super().forecast(observed)
        way = self.way(observed.devices)[:, None]
        available = usual.available + way * (truth.available - usual.available)
        logs = np.log(usual.rates) + way[..., None, None] * (
            np.log(np.maximum(truth.rates, 1e-6)) - np.log(usual.rates)
        )
        return replace(usual, available=available, rates=np.exp(logs))


WAYS = {
    "nearer": lambda devices: np.full(devices.size, 0.3),
    "as near": lambda devices: np.where(devices % 2, 0.1, -0.1),
    "farther": lambda devices: np.full(devices.size, -0.3),
}


@pytest.fixture(scope="module")
def table(tested, usual, observer, training):
    made = {name: Made(usual, observer, training, way) for name, way in WAYS.items()}
    every = {**made, "persistence": usual}
    return against_persistence(every, tested, usual, least_rates(training))


@pytest.mark.parametrize(
    ("name", "found", "advice"),
    [
        ("nearer", "better", "use it."),
        ("as near", "level", "use persistence."),
        ("farther", "worse", "use persistence."),
    ],
)
def test_what_is_nearer_to_what_came_is_better_and_what_is_farther_worse(
    table, name, found, advice
):
    row = table[table["forecaster"] == name]
    low, high = float(row["low"].iloc[0]), float(row["high"].iloc[0])
    assert low <= float(row["share"].iloc[0]) <= high
    assert judged(low, high, int(row["blocks"].iloc[0])) == found
    said = verdict(row)
    assert said.startswith(name)
    assert said.endswith(advice)
    assert f"[{low:.2f}, {high:.2f}]" in said
    assert ("level with persistence" in said) == (found == "level")


def test_the_best_is_named_and_persistence_is_not_judged(table):
    assert list(table["forecaster"]) == ["nearer", "as near", "farther"]
    assert verdict(table) == verdict(table.iloc[:1])
    assert verdict(table.iloc[:0]) == ""


def test_the_share_is_the_geometric_mean_of_those_of_the_quantities(table):
    each = table[["available", "compute", "downlink", "uplink"]].to_numpy(dtype=np.float64)
    np.testing.assert_allclose(np.exp(np.log(each).mean(axis=1)), table["share"])
    # Brier scores are squares: .7 of the error is .49 of the score.
    assert each[0, 0] == pytest.approx(0.49)


def test_what_persistence_foresees_is_left_out(tested, usual, observer, training):
    known = replace(tested, available=np.repeat(tested.observed.online[:, None], 10, axis=1) * 1.0)
    made = {"nearer": Made(usual, observer, training, WAYS["nearer"])}
    found = against_persistence(made, known, usual, least_rates(training)).iloc[0]
    assert np.isnan(found["available"])
    assert found["share"] < 1.0
    nothing = replace(known, rates=np.full_like(known.rates, np.nan))
    assert against_persistence(made, nothing, usual, least_rates(training)).empty


def test_a_few_days_are_too_few_to_tell_and_the_missing_ones_are_stated():
    columns = ["forecaster", "share", "low", "high", "blocks"]
    said = verdict(pd.DataFrame([("lstm", 0.5, 0.4, 0.6, 3)], columns=columns))
    assert "too few to tell" in said
    assert "record 6 days more" in said
