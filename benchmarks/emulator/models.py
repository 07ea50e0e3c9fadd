"""Models that an emulator may be, their intervals, and how they are judged on what is held out."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.stats import spearmanr
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import RidgeCV
from sklearn.neighbors import KNeighborsRegressor
from sklearn.neural_network import MLPRegressor

from emulator.rows import OUTPUTS, Table

LEVEL, MEMBERS = 0.9, 5
Predict = Callable[[Any], Any]
PLAYED, KEEPS = slice(-9, -4), -2
"""Measures that the played schedule comes to, and whether late jobs are kept."""


def scaled(x: Any) -> tuple[Any, Any]:
    """Return mean and spread of features."""
    spread = x.std(axis=0)
    return x.mean(axis=0), np.where(spread > 1e-9, spread, 1.0)


def played(table: Table) -> Predict:
    """Return the played schedule alone."""
    return lambda x: np.zeros((len(x), len(OUTPUTS)))


def shifted(table: Table) -> Predict:
    """Return the played schedule and the mean of what it lacks, by kind of schedule."""
    keeps = table.x[:, KEEPS] == 1
    means = np.array([table.y[~keeps].mean(axis=0), table.y[keeps].mean(axis=0)])
    return lambda x: means[x[:, KEEPS].astype(int)]


def nearest(table: Table, k: int) -> Predict:
    """Return the mean over the nearest k rows."""
    mean, spread = scaled(table.x)
    model = KNeighborsRegressor(k).fit((table.x - mean) / spread, table.y)
    return lambda x: model.predict((x - mean) / spread)


def ridge(table: Table) -> Predict:
    """Return a linear model."""
    mean, spread = scaled(table.x)
    model = RidgeCV(np.logspace(-2, 4, 13)).fit((table.x - mean) / spread, table.y)
    return lambda x: model.predict((x - mean) / spread)


def trees(table: Table) -> Predict:
    """Return gradient-boosted trees, of each output its own."""
    models = [
        GradientBoostingRegressor(
            n_estimators=150, max_depth=3, learning_rate=0.05, subsample=0.5,
            min_samples_leaf=15, random_state=0,
        ).fit(table.x, table.y[:, i])
        for i in range(len(OUTPUTS))
    ]  # fmt: skip
    return lambda x: np.column_stack([model.predict(x) for model in models])


def networks(table: Table) -> list[MLPRegressor]:
    """Return an ensemble of networks of scaled features and outputs."""
    mean, spread = scaled(table.x)
    y_mean, y_spread = scaled(table.y)
    x, y, found = (table.x - mean) / spread, (table.y - y_mean) / y_spread, []
    for seed in range(MEMBERS):
        model = MLPRegressor(
            hidden_layer_sizes=(24, 24), alpha=1.0, learning_rate_init=3e-3, batch_size=64,
            max_iter=60, random_state=seed,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            found.append(model.fit(x, y))
    return found


def arrays_of(members: Sequence[MLPRegressor], learn: Table, check: Table) -> dict[str, Any]:
    """Return the arrays of an emulator of networks; its margins are of fleets to check."""
    (mean, spread), (out_mean, out_spread) = scaled(learn.x), scaled(learn.y)
    arrays = {
        "mean": mean,
        "spread": spread,
        "low": learn.x.min(axis=0),
        "high": learn.x.max(axis=0),
        "out_mean": out_mean,
        "out_spread": out_spread,
        "margin": margins(ensemble_of(members, learn), check),
    }
    for i in range(3):
        arrays[f"weight_{i + 1}"] = np.array([each.coefs_[i] for each in members])
        arrays[f"bias_{i + 1}"] = np.array([each.intercepts_[i] for each in members])
    return {name: np.asarray(each, dtype=np.float32) for name, each in arrays.items()}


def ensemble(table: Table) -> Predict:
    """Return the mean of networks."""
    return ensemble_of(networks(table), table)


def ensemble_of(members: Sequence[MLPRegressor], table: Table) -> Predict:
    """Return the mean of networks that have learnt from a table."""
    mean, spread = scaled(table.x)
    y_mean, y_spread = scaled(table.y)

    def predict(x: Any) -> Any:
        own = (x - mean) / spread
        return y_mean + y_spread * np.mean([each.predict(own) for each in members], axis=0)

    return predict


MODELS: dict[str, Callable[[Table], Predict]] = {
    "played": played,
    "played, shifted": shifted,
    "nearest": lambda table: nearest(table, 1),
    "5 nearest": lambda table: nearest(table, 5),
    "ridge": ridge,
    "trees": trees,
    "networks": ensemble,
}


def margins(predict: Predict, check: Table) -> Any:
    """Return the half widths of intervals that hold `LEVEL` of held-out rows, by kind of schedule.

    Each fleet counts alike.
    """
    error, found = np.abs(check.y - predict(check.x)), []
    for keeps in (0, 1):
        own = check.x[:, KEEPS] == keeps
        _, which, counts = np.unique(check.fleet[own], return_inverse=True, return_counts=True)
        weight = 1.0 / counts[which]
        found.append([_quantile(error[own, i], weight) for i in range(len(OUTPUTS))])
    return np.array(found)


def _quantile(values: Any, weights: Any) -> float:
    order = np.argsort(values)
    total = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(np.searchsorted(total, LEVEL), len(values) - 1)])


def judged(predict: Predict, margin: Any, test: Table) -> dict[str, Any]:
    """Return how well held-out rows are told."""
    guess, found = predict(test.x), dict[str, Any]()
    half = margin[test.x[:, KEEPS].astype(int)]
    fair = test.reached
    for i, name in enumerate(OUTPUTS):
        base = test.x[:, PLAYED][:, i]
        some = fair & (test.x[:, KEEPS] == 1) if i > 2 else fair
        truth = (test.y[:, i] + base)[some]
        error = (test.y[:, i] - guess[:, i])[some]
        found[f"{name} r2"] = round(1 - float(np.mean(error**2) / np.var(truth)), 3)
        found[f"{name} error"] = round(float(np.median(np.abs(error))), 3)
        found[f"{name} covered"] = round(float(np.mean(np.abs(error) <= half[some, i])), 3)
        found[f"{name} width"] = round(float(np.mean(2 * half[some, i])), 3)
        if i < 2:
            found[f"{name} rank"] = rank(guess[:, i] + base, test.y[:, i] + base, test)
    return found


def rank(guess: Any, truth: Any, test: Table) -> float | None:
    """Return the mean of Spearman's coefficients within fleet, app, job and target.

    Groups of fewer than six rows are left out; None if all are.
    """
    found = []
    for group in np.unique(test.group):
        own = test.group == group
        if own.sum() >= 6 and np.ptp(truth[own]) > 0 and np.ptp(guess[own]) > 0:
            found.append(float(spearmanr(guess[own], truth[own])[0]))
    return round(float(np.mean(found)), 3) if found else None
