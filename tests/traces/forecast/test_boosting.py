import numpy as np
import pytest

from fedstale.errors import TraceError
from fedstale.traces.forecast import Boosting, Forecaster

pytestmark = pytest.mark.usefixtures("_one_thread")


@pytest.fixture(scope="module")
def boosting(training, held_out):
    return Boosting(n_trees=12).fit(training, held_out, seed=0)


def test_quantiles_rise_where_the_regressors_cross(boosting, held_out):
    rates = boosting.forecast(held_out.observed).rates
    assert np.all(np.diff(rates, axis=3) >= 0)


def test_chances_follow_the_state_whose_trees_they_are(boosting, training):
    observed, tested = training.observed, boosting.forecast(training.observed)
    hour = 4
    for state in (False, True):
        here = (observed.online == state) & ~np.isnan(training.survival[:, hour])
        assert tested.survival[here, hour].mean() == pytest.approx(
            training.survival[here, hour].mean(), abs=0.02
        )


def test_a_saved_one_of_an_earlier_version_is_one_sentence(tmp_path):
    from fedstale.traces.forecast.base import FILES

    FILES.write(tmp_path, {"fleet.rates": np.ones(3)}, {"kind": "boosting", "provenance": {}})
    with pytest.raises(TraceError, match="'boosting': only compared"):
        Forecaster.load(tmp_path)
