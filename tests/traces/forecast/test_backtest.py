"""Backtests, their scores, and whether a forecaster pays against the strongest simple one."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import mean_pinball_loss

from fedstale.errors import TraceError
from fedstale.traces.forecast import (
    LEVELS,
    FleetStatistics,
    Forecaster,
    Hourly,
    LastValue,
    Persistence,
    draw_parts,
)
from fedstale.traces.forecast.backtest import (
    against,
    backtested,
    blocks,
    least_rates,
    no_better,
    pinball,
    reliability,
    rolling,
    strongest,
    verdict,
)
from fedstale.traces.forecast.dataset import examples_at

DAY = 86_400.0


class Perfect(Forecaster):
    """Forecasts what comes; has no kind, so that no command finds it."""

    def __init__(self, observer, training):
        self.observer, self.fleet = observer, FleetStatistics.of(training)

    def fit(self, training, validation, *, seed):
        raise NotImplementedError

    def _coming(self, observed):
        return examples_at(self.observer, observed.devices, observed.now, until=np.inf)

    def predict_sessions(self, observed):
        coming = self._coming(observed)
        return np.nan_to_num(coming.survival, nan=1.0), np.nan_to_num(coming.available, nan=1.0)

    def predict_rates(self, observed):
        rates = np.maximum(np.nan_to_num(self._coming(observed).rates, nan=1.0), 1e-6)
        return np.repeat(rates[..., None], LEVELS.size, axis=3)


@pytest.fixture(scope="module")
def tested(observer):
    return rolling(observer, np.arange(40, 60), start=2 * DAY, until=3 * DAY, step_s=3600.0, seed=0)


@pytest.fixture(scope="module")
def of_day(observer):
    return rolling(observer, np.arange(40, 60), start=2 * DAY, until=3 * DAY, step_s=7200.0, seed=0)


@pytest.fixture(scope="module")
def origins(tested):
    return tested.observed


def test_origins_are_in_order_inside_the_part_and_hold_all_devices_online(observer, origins, fleet):
    assert np.all(np.diff(origins.now) >= 0)
    assert 2 * DAY <= origins.now.min() < 2 * DAY + 3600.0
    np.testing.assert_array_equal(np.diff(np.unique(origins.now // 3600.0)), 1.0)
    assert origins.now.max() < 3 * DAY
    for now in np.unique(origins.now):
        chosen = origins.devices[origins.now == now]
        online = np.arange(40, 60)[
            fleet.availability.is_available(np.arange(40, 60), np.full(20, now))
        ]
        assert set(online) <= set(chosen)
        assert len(set(chosen)) == chosen.size


def test_a_part_without_origins_is_one_sentence(observer):
    with pytest.raises(TraceError, match="no origin"):
        rolling(observer, np.arange(60), start=9 * DAY, until=10 * DAY, step_s=60.0, seed=0)


def backtest_of(traces):
    return backtested(traces, ["last-value"], step_s=7200.0, examples=300, seed=0)


def test_a_backtest_is_the_same_again(fleet):
    once = backtest_of(fleet)
    assert list(once["forecaster"]) == ["last-value"]
    assert once.equals(backtest_of(fleet))
    assert once[["available", "compute", "downlink", "uplink"]].notna().all(axis=None)


def test_traces_without_all_channels_are_tested_on_what_they_know(fleet):
    (row,) = backtest_of(replace(fleet, compute=None, downlink=None, uplink=None)).to_dict(
        "records"
    )
    assert row["share"] == pytest.approx(row["available"])
    assert np.isnan([row["compute"], row["downlink"], row["uplink"]]).all()


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
def table(of_day, usual, observer, training):
    made = {name: Made(usual, observer, training, way) for name, way in WAYS.items()}
    return against(usual, made, of_day, least_rates(training))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("nearer", "{} has {}: use it."),
        ("as near", "{} is level with persistence here, with {}: use persistence."),
        ("farther", "{} has {}: use persistence."),
    ],
)
def test_what_is_nearer_to_what_came_is_better_and_what_is_farther_worse(table, name, advice):
    row = table[table["forecaster"] == name]
    low, share, high = (float(row[of].iloc[0]) for of in ("low", "share", "high"))
    assert low <= share <= high
    loss = f"{share:.2f} of persistence's loss [{low:.2f}, {high:.2f}]"
    assert verdict(row) == advice.format(name, loss)


def test_the_best_is_named(table):
    assert list(table["forecaster"]) == ["nearer", "as near", "farther"]
    assert verdict(table) == verdict(table.iloc[:1])
    assert "nothing is compared" in verdict(table.iloc[:0])


def simple_of(training, held_out):
    simple = (LastValue, Persistence, Hourly)
    return {one.kind: one().fit(training, held_out, seed=0) for one in simple}


def test_the_strongest_simple_forecaster_is_that_of_the_held_out_examples(training, held_out):
    found = strongest(training, held_out, seed=0)
    simple, least = simple_of(training, held_out), least_rates(training)
    assert (against(found, simple, held_out, least)["share"] >= 1.0).all()
    # Of devices whose outcome is that of their state, nothing beats what stays as it is.
    stays = np.repeat(held_out.observed.online[:, None] * 1.0, 10, axis=1)
    known = replace(held_out, available=stays, rates=np.full_like(held_out.rates, np.nan))
    assert found.kind == "hourly"
    assert strongest(training, known, seed=0).kind == "persistence"


def test_no_forecaster_is_judged_by_persistence_where_another_simple_one_is_stronger(fleet):
    names, options = ["persistence", "hourly"], dict(step_s=7200.0, examples=300, seed=0)
    found = backtested(fleet, names, **options)
    usual = strongest(*draw_parts(fleet, n=300, seed=0), seed=0)
    assert usual.kind == "hourly"
    assert list(found["forecaster"]) == ["persistence"]
    assert list(found["against"]) == ["hourly"]
    assert re.fullmatch(r"persistence has .* of hourly's loss .*: use hourly\.", verdict(found))


def test_what_is_no_better_than_a_simple_forecaster_names_it(observer, training, held_out):
    simple = simple_of(training, held_out)
    perfect = Perfect(observer, training)
    perfect.kind = "perfect"
    said = {
        one.kind: no_better(one, training, held_out, seed=0) for one in (*simple.values(), perfect)
    }
    for kind in ("persistence", "last-value"):
        told = r"no better than hourly, with [12].* of its loss in validation: use --kind hourly"
        assert re.fullmatch(told, said[kind])
    assert said["hourly"] == said["perfect"] == ""


def test_the_share_is_the_geometric_mean_of_those_of_the_quantities(table):
    each = table[["available", "compute", "downlink", "uplink"]].to_numpy(dtype=np.float64)
    np.testing.assert_allclose(np.exp(np.log(each).mean(axis=1)), table["share"])
    # Brier scores are squares: .7 of the error is .49 of the score.
    assert each[0, 0] == pytest.approx(0.49)


def test_what_persistence_foresees_is_left_out(of_day, usual, observer, training):
    known = replace(of_day, available=np.repeat(of_day.observed.online[:, None], 10, axis=1) * 1.0)
    made = {"nearer": Made(usual, observer, training, WAYS["nearer"])}
    found = against(usual, made, known, least_rates(training)).iloc[0]
    assert np.isnan(found["available"])
    assert found["share"] < 1.0
    nothing = replace(known, rates=np.full_like(known.rates, np.nan))
    assert against(usual, made, nothing, least_rates(training)).empty


def test_a_few_days_are_too_few_to_tell_and_the_missing_ones_are_stated():
    columns = ["forecaster", "against", "share", "low", "high", "blocks"]
    said = verdict(pd.DataFrame([("lstm", "hourly", 0.5, 0.4, 0.6, 3)], columns=columns))
    assert "too few to tell: use hourly" in said
    assert "record 6 days more" in said


def test_pinball_is_the_sum_of_that_of_scikit_learn():
    rng = np.random.default_rng(0)
    y, q = rng.normal(size=200), np.sort(rng.normal(size=(200, 3)), axis=1)
    expected = sum(mean_pinball_loss(y, q[:, i], alpha=level) for i, level in enumerate(LEVELS))
    assert pinball(q, y).mean() == pytest.approx(expected)


def test_reliability_of_a_calibrated_forecast_lies_on_the_diagonal():
    rng = np.random.default_rng(2)
    p = rng.random(100_000)
    curve = reliability(p, (rng.random(p.size) < p).astype(float))
    np.testing.assert_allclose(curve["predicted"], curve["observed"], atol=0.02)
    assert curve["n"].sum() == p.size


def test_few_devices_are_resampled_by_their_days(observer):
    when = np.arange(0.0, 3.0, 0.25) * 86_400.0
    one = observer.at(np.repeat(7, when.size), when)
    days = blocks(one)
    assert [np.count_nonzero(days == day) for day in np.unique(days)] == [4, 4, 4]
    two = observer.at(np.tile([7, 8], when.size // 2), when)
    assert np.unique(blocks(two)).size == 6
    five = observer.at(np.arange(5), np.full(5, 1000.0))
    np.testing.assert_array_equal(blocks(five), np.arange(5))
