import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

from fedstale.traces.forecast.boosting import Trees


def data(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(800, 5)).astype(np.float32)
    return x, x[:, 0] * 2 + np.sin(3 * x[:, 1]) + 0.1 * rng.normal(size=800)


def test_kept_trees_say_what_the_regressor_of_scikit_learn_says():
    x, y = data()
    model = HistGradientBoostingRegressor(max_iter=12, loss="quantile", quantile=0.9).fit(x, y)
    np.testing.assert_allclose(Trees.of(model).sum(x), model.predict(x), rtol=1e-9, atol=1e-9)


def test_kept_trees_say_what_the_classifier_of_scikit_learn_says():
    x, y = data(1)
    model = HistGradientBoostingClassifier(max_iter=12).fit(x, y > 0)
    p = 1.0 / (1.0 + np.exp(-Trees.of(model).sum(x)))
    np.testing.assert_allclose(p, model.predict_proba(x)[:, 1], rtol=1e-9)
