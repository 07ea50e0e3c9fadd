"""How well do runs that were left out follow from the others: the learning proxy and others.

An emulator predicts by how much the log loss changes over the next server steps, from the loss now,
how far the run is, and whose updates come. It is fitted to some runs and judged on the others, run
by run and not row by row: rows of one run hang together, and a row's neighbours would give it away.

The others are regressions of scikit-learn. They say how much is to be known from these numbers.
They do not take the proxy's place: none tells what a group of data loses when its devices stay
away, which is what a selector is to learn.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd
from sklearn.ensemble import GradientBoostingRegressor, RandomForestRegressor
from sklearn.linear_model import LinearRegression, RidgeCV
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fedstale.agents.env import learning_fit
from fedstale.agents.env.learning_fit import (
    Curves,
    LearningFit,
    LearningRun,
    folds_of,
    spans_of,
)
from fedstale.traces.arrays import Array, Index

_RECENT = 24


class _Regression(Protocol):
    def fit(self, x: Array, y: Array) -> Any: ...  # noqa: ANN401 - itself
    def predict(self, x: Array) -> npt.NDArray[Any]: ...


def emulators(seed: int) -> dict[str, Callable[[], _Regression]]:
    """Return the regressions that are compared with the proxy, by their names."""

    def scaled(last: _Regression) -> _Regression:
        made: _Regression = make_pipeline(StandardScaler(), last)
        return made

    return {
        "linear": lambda: scaled(LinearRegression()),
        "ridge": lambda: scaled(RidgeCV(np.logspace(-3, 3, 13))),
        "random forest": lambda: RandomForestRegressor(100, min_samples_leaf=3, random_state=seed),
        "gradient boosting": lambda: GradientBoostingRegressor(
            n_estimators=100, max_depth=2, random_state=seed
        ),
        "MLP": lambda: scaled(
            MLPRegressor(hidden_layer_sizes=(16,), alpha=1.0, max_iter=500, random_state=seed)
        ),
    }


def out_of_sample(runs: Sequence[LearningRun], fit: LearningFit, *, seed: int = 0) -> pd.DataFrame:
    """Return how well each emulator predicts runs that it was not fitted to."""
    spans = [spans_of(run, Curves(runs, fit.skew, seed=seed).steps) for run in runs]
    tables = [_rows(run, *own) for run, own in zip(runs, spans, strict=True)]
    made: dict[str, list[Array]] = {}
    real, means = [], []
    for part in folds_of(len(runs), seed):
        others = np.setdiff1d(np.arange(len(runs)), part)
        x, y = (np.concatenate([tables[i][place] for i in others]) for place in (0, 1))
        asked = np.concatenate([tables[i][0] for i in part])
        real.append(np.concatenate([tables[i][1] for i in part]))
        means.append(np.full(len(asked), y.mean()))
        for name, regression in emulators(seed).items():
            with warnings.catch_warnings():
                # A network that has not converged is judged as it is.
                warnings.simplefilter("ignore")
                predicted = regression().fit(x, y).predict(asked)
            made.setdefault(name, []).append(np.asarray(predicted, dtype=np.float64))
    true = np.concatenate(real)
    nothing = ((true - np.concatenate(means)) ** 2).mean()
    rows = []
    for name, parts in made.items():
        error = ((true - np.concatenate(parts)) ** 2).mean()
        r2 = float(1.0 - error / nothing) if nothing > 0 else np.nan
        rows.append({"emulator": name, "rmse": float(np.sqrt(error)), "r2": r2})
    table = pd.concat([learning_fit.out_of_sample(runs, fit, seed=seed), pd.DataFrame(rows)])
    return table.sort_values("rmse", ignore_index=True)


def _rows(run: LearningRun, first: Index, last: Index) -> tuple[Array, Array]:
    """Return what emulators are given, (rows, f), and the changes of the log loss, (rows,)."""
    logs = np.log(run.losses)
    features = [_features(run, int(a), int(b)) for a, b in zip(first, last, strict=True)]
    return np.array(features).reshape(len(features), -1), logs[last] - logs[first]


def _features(run: LearningRun, start: int, end: int) -> list[float]:
    begin, until = int(run.versions[start]), int(run.versions[end])
    coming = np.concatenate([*run.merged[begin:until], np.zeros(0, dtype=np.int64)])
    recent = np.concatenate([*run.merged[max(begin - _RECENT, 0) : begin], np.zeros(0, np.int64)])
    before = np.concatenate([*run.merged[:begin], np.zeros(0, dtype=np.int64)])
    n = max(coming.size, 1)
    return [
        float(np.log(run.losses[start])),
        float(np.log(run.losses[start] / run.losses[0])),
        float(np.log1p(begin)),
        float(until - begin),
        coming.size / (until - begin),
        float(np.mean(run.staleness[begin:until])),
        np.unique(coming).size / n,
        float(np.isin(coming, recent).sum()) / n,
        float(np.isin(coming, before).sum()) / n,
        np.unique(before).size / run.n_devices,
        np.unique(recent).size / run.n_devices,
    ]
