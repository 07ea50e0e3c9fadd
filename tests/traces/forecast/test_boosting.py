import numpy as np
import pytest

from fedstale.errors import TraceError
from fedstale.traces.forecast import Boosting, Forecaster
from fedstale.traces.forecast.lstm import features, flat


@pytest.fixture(scope="module")
def boosting(training, held_out):
    return Boosting(n_trees=12).fit(training, held_out, seed=0)


def with_horizon(x, k):
    return np.column_stack([x, np.full(len(x), k)])


def test_rates_are_the_sorted_quantiles_of_the_regressors_of_scikit_learn(boosting, held_out):
    given = features(held_out.observed, boosting.fleet)
    at = with_horizon(flat(given), 2)
    logs = np.sort([each.predict(at) for each in boosting.quantiles[1]], axis=0).T
    np.testing.assert_allclose(
        boosting.forecast(held_out.observed).rates[:, 1, 2],
        np.exp(given.level[:, 1, None] + logs),
        rtol=1e-6,
    )


def test_survival_is_the_product_of_the_pieces_of_the_classifier(boosting, held_out):
    x = flat(features(held_out.observed, boosting.fleet))
    (classifier,) = boosting.survives
    first, second = (classifier.predict_proba(with_horizon(x, k))[:, 1] for k in (0, 1))
    survival = boosting.forecast(held_out.observed).survival
    np.testing.assert_allclose(survival[:, 0], first, rtol=1e-9)
    np.testing.assert_allclose(survival[:, 1], first * second, rtol=1e-9)


def test_a_saved_one_of_an_earlier_version_is_one_sentence(tmp_path):
    from fedstale.traces.forecast.base import FILES

    FILES.write(tmp_path, {"prior.rates": np.ones(3)}, {"kind": "boosting", "provenance": {}})
    with pytest.raises(TraceError, match="'boosting': only compared"):
        Forecaster.load(tmp_path)
