"""The tables behind the plots of a backtest."""

import numpy as np
import pytest

from fedstale.traces.forecast import LastValue, Oracle, examples_at
from fedstale.traces.forecast.evaluation import rolling
from fedstale.traces.forecast.evaluation.report import PAST_S, SURVIVAL_S, fan, survival
from fedstale.traces.forecast.observation import RATE_HORIZONS_S

DAY = 86_400.0


@pytest.fixture(scope="module")
def tested(observer):
    return rolling(observer, np.arange(40, 60), start=2 * DAY, until=3 * DAY, step_s=7200.0, seed=0)


@pytest.fixture(scope="module")
def fitted(fleet, training, held_out):
    return {"last-value": LastValue().fit(training, held_out, seed=0), "oracle": Oracle(fleet)}


def test_the_survival_of_an_oracle_is_what_happens(fitted, tested):
    table = survival(fitted, tested)
    assert set(table["horizon_s"]) == set(SURVIVAL_S)
    sure = table[(table["forecaster"] == "oracle") & (table["n"] > 0)]
    np.testing.assert_allclose(sure["observed"], sure["predicted"], atol=1e-6)
    online = int((tested.observed.online & ~np.isnan(tested.survival[:, 2])).sum())
    counts = table[table["horizon_s"] == 900.0].groupby("forecaster")["n"].sum()
    assert counts.tolist() == [online, online]


def test_a_fan_shows_the_history_and_what_came(fitted, fleet, observer, tested):
    table = fan(fitted, observer, tested, 3 * DAY)
    assert set(table["forecaster"]) == {"", "last-value"}
    one = table[table["channel"] == "downlink"]
    past, ahead = one[one["forecaster"] == ""], one[one["forecaster"] == "last-value"]
    assert past["offset_s"].tolist() == np.arange(-PAST_S + 300.0, 1.0, 300.0).tolist()
    assert ahead["offset_s"].tolist() == RATE_HORIZONS_S.tolist()
    assert (ahead["q10"] <= ahead["q50"]).all()
    assert (ahead["q50"] <= ahead["q90"]).all()
    now = float(table["now"].iloc[0])
    device = fleet.device_ids.get_loc(table["device_id"].iloc[0])
    assert observer.at([device], now).online[0]
    carried = fleet.downlink.integral([device], [now], [now + 3600.0])[0]
    (hour,) = ahead.loc[ahead["offset_s"] == 3600.0, "actual"]
    assert hour == pytest.approx(carried / 3600.0)


def test_a_fan_needs_an_origin_with_a_history_and_a_future(fitted, observer):
    for now in (0.0, 3 * DAY - 60.0):
        nowhere = examples_at(observer, np.arange(60), now, until=3 * DAY)
        assert fan(fitted, observer, nowhere, 3 * DAY).empty
