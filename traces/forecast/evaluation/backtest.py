"""Rolling-origin backtest of processes: forecasts at many instants, against what then happened.

Tables are long: one row a forecaster, quantity, horizon and metric, with an interval from
resampling devices. Errors of rates are differences of logarithms, which need no unit and are the
errors of times with the sign turned; errors of jobs are in seconds.

Scores take forecasts and outcomes and return one number for each example, or for each column;
unknown outcomes are NaN and stay so. Intervals come from resampling whole devices: examples of one
device are not independent. Fewer than five devices are resampled by their days.

Reference:
    Gneiting, Raftery. Strictly Proper Scoring Rules, Prediction, and Estimation. Journal of the
    American Statistical Association 102(477), 2007.
    Hyndman, Koehler. Another Look at Measures of Forecast Accuracy. International Journal of
    Forecasting 22(4), 2006 (MASE).
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces import DAY_S, Array, Index
from fedstale.traces.forecast.base import LEAST_RATE, Forecaster
from fedstale.traces.forecast.baselines import LastValue
from fedstale.traces.forecast.dataset import FEW, Examples, examples_at, log_spans
from fedstale.traces.forecast.observation import (
    LEVELS,
    RATE_HORIZONS_S,
    RATES,
    Observation,
    TraceObserver,
)
from fedstale.traces.forecast.sessions import HORIZONS_S
from fedstale.traces.forecast.survival import DeviceForecast

COLD_START_S = (0.0, 3600.0, 6 * 3600.0, 24 * 3600.0)
"""Lengths of history for which a cold start is tested, in s."""
_COLUMNS = ["forecaster", "quantity", "horizon_s", "metric", "value", "low", "high", "n"]
# A wrong probability of exactly 0 or 1 would have an infinite loss.
_LEAST_P = 1e-4
_BINS = 10
_DRAWS = 300


def rolling(
    observer: TraceObserver,
    devices: Index,
    *,
    start: float,
    until: float,
    step_s: float,
    seed: int,
    most: int = 200,
) -> Examples:
    """Return examples at one origin in each step: the devices online then, and as many offline.

    Where in its step an origin lies is drawn, lest every origin fall on a change of records that
    have a step of their own.

    Args:
        observer: of the devices' traces.
        devices: positions to test on.
        start: first origin in s.
        until: instant in s before which origins and labels lie.
        step_s: time between origins.
        seed: of the draw among devices.
        most: at most this many devices online, and as many offline, at each origin.

    Returns:
        Examples in order of time.

    Raises:
        TraceError: no origin lies in the part.
    """
    rng = np.random.default_rng(seed)
    drawn: list[Index] = []
    when: list[Array] = []
    availability = observer.traces.availability
    which, begins, ends = log_spans(observer.traces, devices)
    grid = np.arange(start, until, step_s)
    for now in np.minimum(grid + step_s * rng.random(grid.size), np.nextafter(until, 0.0)):
        recorded = devices[which[(begins <= now) & (now < ends)]]
        if availability is None:
            chosen = _some(recorded, most, rng)
        else:
            is_online = availability.is_available(recorded, now)
            online = _some(recorded[is_online], most, rng)
            offline = _some(recorded[~is_online], max(online.size, 1), rng)
            chosen = np.concatenate([online, offline])
        drawn.append(np.sort(chosen))
        when.append(np.full(chosen.size, now))
    if sum(d.size for d in drawn) == 0:
        raise TraceError(f"no origin to test on in [{start}, {until}) s every {step_s} s")
    return examples_at(observer, np.concatenate(drawn), np.concatenate(when), until=until)


def _some(devices: Index, most: int, rng: np.random.Generator) -> Index:
    if devices.size <= most:
        return devices
    return rng.choice(devices, most, replace=False)


def by_horizon(
    forecasters: Mapping[str, Forecaster], tested: Examples, training: Examples
) -> pd.DataFrame:
    """Return the scores of forecasters on the horizon grid.

    Args:
        forecasters: fitted ones, by the name in the table.
        tested: examples at rolling origins.
        training: examples learnt from; their last values scale MASE.

    Returns:
        Columns forecaster, quantity, horizon_s, metric, value, low, high, n.
    """
    rows: list[tuple[object, ...]] = []
    scale = naive_scale(training)
    for name, forecaster in forecasters.items():
        forecast = forecaster.forecast(tested.observed)
        rows += _chances(name, forecast, tested)
        rows += _rates(name, forecast, tested, scale, least_rates(training))
    return pd.DataFrame(rows, columns=_COLUMNS)


def naive_scale(training: Examples) -> Array:
    """Return the mean absolute log error of the last value on the training part; (3, horizons)."""
    least = least_rates(training)
    last = logs(LastValue().level(training.observed), least)
    error = np.abs(logs(training.rates, least) - last)
    known = ~np.isnan(error)
    with np.errstate(invalid="ignore"):
        return np.where(known, error, 0.0).sum(axis=0) / known.sum(axis=0)


def least_rates(training: Examples) -> Array:
    """Return a thousandth of the fleet's median rate of each channel; shape (3,).

    Lower rates are scored as this: differences between dead links do not matter, and their
    logarithms would be most of every mean.
    """
    rates = training.rates
    known = [r[~np.isnan(r)] for r in np.moveaxis(rates, 1, 0)]
    return np.array([1e-3 * np.median(r) if r.size else LEAST_RATE for r in known])


def logs(rates: Array, least: Array) -> Array:
    """Return logarithms of rates, none below the least; the channel is the second axis."""
    return np.log(np.maximum(rates, least.reshape(1, -1, *[1] * (rates.ndim - 2))))


def _chances(name: str, forecast: DeviceForecast, tested: Examples) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    online, block = tested.observed.online, blocks(tested.observed)
    for quantity, chosen, chances, outcomes in (
        ("online", online, forecast.survival, tested.survival),
        ("offline", ~online, forecast.survival, tested.survival),
        ("available", np.ones(online.size, dtype=bool), forecast.available, tested.available),
    ):
        for k, horizon in enumerate(HORIZONS_S):
            p, happened = chances[chosen, k], outcomes[chosen, k]
            known = int(np.count_nonzero(~np.isnan(happened)))
            if known == 0:
                continue
            head = (name, quantity, float(horizon))
            metrics = {"brier": brier(p, happened), "log_loss": log_loss(p, happened)}
            rows += scored(head, metrics, block[chosen], known)
            for metric, value in (
                # The rarer of the two events: leaving, coming back, being offline.
                ("auprc_change", average_precision(1.0 - p, 1.0 - happened)),
                ("skill", skill(p, happened)),
                ("ece", calibration_error(p, happened)),
            ):
                rows.append((*head, metric, value, np.nan, np.nan, known))
    return rows


def _rates(
    name: str, forecast: DeviceForecast, tested: Examples, scale: Array, least: Array
) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    truth, predicted = logs(tested.rates, least), logs(forecast.rates, least)
    block = blocks(tested.observed)
    for c, channel in enumerate(RATES):
        for k, horizon in enumerate(RATE_HORIZONS_S):
            y, q = truth[:, c, k], predicted[:, c, k]
            known = int(np.count_nonzero(~np.isnan(y)))
            if known == 0:
                continue
            error = np.abs(y - q[:, 1])
            metrics: dict[str, Array] = {
                "mae": error,
                "mase": error / scale[c, k] if scale[c, k] > 0 else np.full(y.shape, np.nan),
                "pinball": pinball(q, y),
                "coverage": covered(q, y),
                "width": np.where(np.isnan(y), np.nan, q[:, 2] - q[:, 0]),
            }
            rows += scored((name, channel, float(horizon)), metrics, block, known)
    return rows


def cold_start(
    forecasters: Mapping[str, Forecaster],
    observer: TraceObserver,
    tested: Examples,
    until: float,
    least: Array,
) -> pd.DataFrame:
    """Return mean scores when devices remember only a part of their history, or nothing.

    Columns are forecaster, history_s, pinball (log rate, mean over channels and horizons) and brier
    (of survival online, mean over the horizons up to an hour). Origins are the same for each
    length; the oracle, whose score does not depend on it, is left out.
    """
    rows = []
    early = HORIZONS_S <= 3600.0
    for memory in COLD_START_S:
        devices, now = tested.observed.devices, tested.observed.now
        forgetful = examples_at(observer, devices, now, until=until, history_s=memory)
        online = forgetful.observed.online
        for name, forecaster in forecasters.items():
            if forecaster.reads_the_future:
                continue
            forecast = forecaster.forecast(forgetful.observed)
            loss = pinball(logs(forecast.rates, least), logs(forgetful.rates, least))
            error = brier(forecast.survival[online], forgetful.survival[online])[:, early]
            rows.append((name, memory, _mean(loss), _mean(error)))
    return pd.DataFrame(rows, columns=["forecaster", "history_s", "pinball", "brier"])


def _mean(x: Array) -> float:
    return float(np.nanmean(x)) if np.isfinite(x).any() else float("nan")


def error_per_device(
    forecasters: Mapping[str, Forecaster], tested: Examples, least: Array
) -> pd.DataFrame:
    """Return quantiles over devices of each one's mean absolute log error over 5 min, by channel.

    Args:
        forecasters: fitted ones.
        tested: examples at rolling origins.
        least: from `least_rates`.
    """
    k = int(np.searchsorted(RATE_HORIZONS_S, 300.0))
    rows = []
    for name, forecaster in forecasters.items():
        predicted = logs(forecaster.forecast(tested.observed).rates, least)[:, :, k, 1]
        error = np.abs(logs(tested.rates, least)[:, :, k] - predicted)
        for c, channel in enumerate(RATES):
            each = pd.Series(error[:, c]).groupby(tested.observed.devices).mean().dropna()
            if each.size:
                rows.append((name, channel, *np.quantile(each, [0.1, 0.5, 0.9])))
    return pd.DataFrame(rows, columns=["forecaster", "channel", "q10", "q50", "q90"])


def pinball(quantiles: Array, truth: Array) -> Array:
    """Return the pinball loss, summed over the levels of the quantiles.

    Args:
        quantiles: shape (..., quantiles).
        truth: shape (...).

    Example:
        >>> pinball(np.array([[1.0, 2.0, 3.0]]), np.array([2.5])).round(3)
        array([0.45])
    """
    miss = truth[..., None] - quantiles
    return np.maximum(LEVELS * miss, (LEVELS - 1.0) * miss).sum(axis=-1)


def covered(quantiles: Array, truth: Array) -> Array:
    """Return 1 where the truth lies between the outer quantiles, 0 where not, NaN if unknown."""
    inside = (quantiles[..., 0] <= truth) & (truth <= quantiles[..., -1])
    return np.where(np.isnan(truth), np.nan, inside)


def brier(p: Array, happened: Array) -> Array:
    """Return the squared error of a probability.

    Example:
        >>> brier(np.array([0.8]), np.array([1.0])).round(2)
        array([0.04])
    """
    return (p - happened) ** 2


def log_loss(p: Array, happened: Array) -> Array:
    """Return minus the logarithm of the probability of what happened; p is kept off 0 and 1."""
    p = np.clip(p, _LEAST_P, 1.0 - _LEAST_P)
    return -(happened * np.log(p) + (1.0 - happened) * np.log1p(-p))


def average_precision(p: Array, happened: Array) -> float:
    """Return the area under the curve of precision against recall; NaN if nothing happened.

    A constant forecast scores the base rate.

    Example:
        >>> round(average_precision(np.array([0.9, 0.8, 0.1]), np.array([1.0, 0.0, 1.0])), 4)
        0.8333
    """
    known = ~np.isnan(happened)
    if happened[known].sum() == 0:
        return float("nan")
    order = np.argsort(-p[known])
    p, hits = p[known][order], np.cumsum(happened[known][order])
    # Equal chances are one threshold, so their order does not matter.
    last = np.flatnonzero(np.append(np.diff(p) != 0, True))
    return float(np.diff(hits[last], prepend=0.0) @ (hits[last] / (last + 1)) / hits[-1])


def skill(p: Array, happened: Array) -> float:
    """Return by how much a forecast is better than the share of what happened in this test.

    It is 1 minus the ratio of their Brier scores; NaN where all or nothing happened.

    Example:
        >>> round(skill(np.array([0.8, 0.2, 0.5]), np.array([1.0, 0.0, np.nan])), 2)
        0.84
    """
    known = ~np.isnan(happened)
    base = float(np.var(happened[known])) if known.any() else 0.0
    return 1.0 - float(np.mean(brier(p, happened)[known])) / base if base > 0 else float("nan")


def calibration_error(p: Array, happened: Array) -> float:
    """Return the expected calibration error, in ten bins of equal width.

    Reference:
        Naeini, Cooper, Hauskrecht. Obtaining Well Calibrated Probabilities Using Bayesian Binning.
        AAAI 2015.

    Example:
        >>> round(calibration_error(np.full(4, 0.5), np.array([1.0, 1.0, 1.0, 0.0])), 2)
        0.25
    """
    bins = reliability(p, happened)
    bins = bins[bins["n"] > 0]
    miss = (bins["predicted"] - bins["observed"]).abs()
    return float((miss * bins["n"]).sum() / bins["n"].sum())


def reliability(p: Array, happened: Array) -> pd.DataFrame:
    """Return how reliable probabilities are, in ten bins of equal width.

    Args:
        p: probabilities; shape (n,).
        happened: 1, 0 or NaN; shape (n,).

    Returns:
        Columns predicted (mean probability), observed (how often it happened) and n; NaN, NaN, 0 in
        an empty bin.
    """
    known = ~np.isnan(happened)
    which = np.minimum((p[known] * _BINS).astype(np.int64), _BINS - 1)
    count = np.bincount(which, minlength=_BINS).astype(np.float64)
    with np.errstate(invalid="ignore"):
        predicted = np.bincount(which, weights=p[known], minlength=_BINS) / count
        observed = np.bincount(which, weights=happened[known], minlength=_BINS) / count
    return pd.DataFrame({"predicted": predicted, "observed": observed, "n": count})


def blocks(observed: Observation) -> Index:
    """Return a number for what is resampled as a whole: a device, or of few devices a day of one.

    Args:
        observed: the examples.
    """
    devices, days = observed.devices, np.floor(observed.now / DAY_S).astype(np.int64)
    if np.unique(devices).size >= FEW:
        return devices
    return devices * (days.max(initial=0) + 1) + days


def resampled(n: int) -> Array:
    """Return how often each of n blocks is drawn in each of some samples; shape (samples, n)."""
    weights = np.random.default_rng(0).multinomial(n, np.full(n, 1.0 / n), size=_DRAWS)
    return weights.astype(np.float64)


def mean_with_interval(scores: Array, blocks: Index) -> tuple[float, float, float]:
    """Return the mean of a score and its 95 % interval, resampling whole blocks.

    Args:
        scores: of each example, NaN where unknown; shape (n,).
        blocks: block of each example, such as its device; shape (n,).

    Returns:
        Mean, 2.5 % and 97.5 % quantiles of the resampled mean; NaN where nothing is known.
    """
    known = np.isfinite(scores)
    if not known.any():
        return (float("nan"),) * 3
    _, block = np.unique(blocks[known], return_inverse=True)
    total, count = np.bincount(block, weights=scores[known]), np.bincount(block)
    weights = resampled(count.size)
    means = (weights @ total) / (weights @ count)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(scores[known].mean()), float(low), float(high)


def scored(
    head: tuple[object, ...], metrics: Mapping[str, Array], blocks: Index, n: int
) -> list[tuple[object, ...]]:
    """Return rows of a table: what is scored, the metric, its mean with interval, and n."""
    return [
        (*head, metric, *mean_with_interval(score, blocks), n) for metric, score in metrics.items()
    ]
