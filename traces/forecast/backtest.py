"""Rolling-origin backtest: forecasts at many instants, scored against what then happened.

Errors of rates are differences of logarithms, which need no unit and are the errors of times with
the sign turned. Unknown outcomes are NaN and stay so. Intervals come from resampling whole devices:
examples of one device are not independent. Fewer than five devices are resampled by their days.

The verdict is whether a forecaster pays: its share of the loss of the strongest simple one, which
is chosen on examples that are not tested on. The loss of a quantity is the Brier score of being
online later, or the pinball loss of the logarithm of a rate, over all horizons. The share is the
geometric mean, over the quantities, of the forecaster's loss divided by that of the simple one;
what the simple one foresees is left out.

Reference:
    Gneiting, Raftery. Strictly Proper Scoring Rules, Prediction, and Estimation. Journal of the
    American Statistical Association 102(477), 2007.
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path

import numpy as np
import pandas as pd

from fedstale.errors import ConfigError, TraceError
from fedstale.traces import DAY_S, Array, Index, TraceSet
from fedstale.traces.forecast.base import FILES, KINDS, LEAST_RATE, Forecaster, forecaster_folder
from fedstale.traces.forecast.dataset import (
    FEW,
    TURN_SHARE,
    Examples,
    draw_parts,
    examples_at,
    log_spans,
    split,
)
from fedstale.traces.forecast.observation import LEVELS, RATES, Observation, TraceObserver

Watch = Callable[[str, int, int], None]
"""Called with what comes next, how many parts of a backtest are done, and how many there are."""
SIMPLE = ("persistence", "last-value", "hourly")
"""Kinds of which the strongest is what others are judged against."""
LEAST_BLOCKS = 5
"""Devices, or days of fewer devices, that a forecaster is judged by at least."""
_FORESEEN = 1e-6
"""Loss of an example up to which there was nothing to forecast."""
_QUANTITIES = ("available", *RATES)
_SHARE = ["share", "low", "high"]
_JUDGED = ("forecaster", "against", *_SHARE, "blocks")
_BINS = 10
_DRAWS = 300


def backtested(
    traces: TraceSet,
    names: Sequence[str],
    *,
    step_s: float,
    examples: int,
    seed: int,
    all_devices: bool = False,
    watch: Watch = lambda what, done, total: None,
) -> pd.DataFrame:
    """Test forecasters on the testing part of traces, or on all devices.

    Args:
        traces: the devices.
        names: what to test, at least one: kinds, which are fitted on the learning part, and trained
            ones as `forecaster_folder` takes them.
        step_s: time between origins.
        examples: number of examples to fit on.
        seed: of everything.
        all_devices: test on every device, none of which the trained ones have learnt from; the
            fitted ones still learn from most of them, before the hours that are tested.
        watch: is told what comes next.

    Returns:
        What `against` does, of the strongest simple forecaster.

    Raises:
        ConfigError: a name is of none, or a trained one used another split of these traces.
    """
    fitted: dict[str, Forecaster] = {}
    kinds = [name for name in names if name in KINDS]
    for name in names:
        if name not in KINDS:
            forecaster, folder = _trained(name, None if all_devices else seed)
            fitted[f"{forecaster.kind} ({folder.name})"] = forecaster
    # Drawing, then fits, then scores.
    total = 1 + len(kinds) + 1
    watch("drawing examples", 0, total)
    parts = split(traces, seed=seed)
    devices = np.arange(traces.n_devices) if all_devices else parts.testing
    training, held_out = draw_parts(traces, n=examples, seed=seed)
    usual, least = strongest(training, held_out, seed=seed), least_rates(training)
    for done, kind in enumerate(kinds, start=1):
        watch(f"fitting {kind}", done, total)
        if kind != usual.kind:
            fitted[kind] = KINDS[kind]().fit(training, held_out, seed=seed)
    watch("scores", total - 1, total)
    observer = TraceObserver(traces)
    tested = rolling(observer, devices, start=parts.turn, until=parts.end, step_s=step_s, seed=seed)
    return against(usual, fitted, tested, least)


def strongest(training: Examples, held_out: Examples, *, seed: int) -> Forecaster:
    """Fit the simple forecasters, and return the one of the least loss on held-out examples."""
    simple = {kind: KINDS[kind]().fit(training, held_out, seed=seed) for kind in SIMPLE}
    usual = simple[SIMPLE[0]]
    table = against(usual, simple, held_out, least_rates(training))
    return simple[table["forecaster"].iloc[0]] if len(table) else usual


def no_better(forecaster: Forecaster, training: Examples, held_out: Examples, *, seed: int) -> str:
    """Say which simple forecaster a fitted one is no better than in validation; "" if than none."""
    usual = strongest(training, held_out, seed=seed)
    table = against(usual, {forecaster.kind: forecaster}, held_out, least_rates(training))
    if usual.kind == forecaster.kind or (table["high"] < 1.0).any():
        return ""
    shares = [f"{own:.2f} [{low:.2f}, {high:.2f}]" for own, low, high in table[_SHARE].to_numpy()]
    of_loss = f", with {shares[0]} of its loss in validation" if shares else ""
    return f"no better than {usual.kind}{of_loss}: use --kind {usual.kind}"


def _trained(name: str, seed: int | None) -> tuple[Forecaster, Path]:
    """Return a trained forecaster, which must have split devices by a seed, and its folder."""
    folder = forecaster_folder(name)
    if not folder.is_dir():
        raise ConfigError(
            f"forecaster = {name!r}: expected one of {', '.join(KINDS)}, embedded, or the folder "
            "of a trained one"
        )
    learnt_with = FILES.describe(folder)["provenance"].get("seed", seed)
    if seed is not None and learnt_with != seed:
        raise ConfigError(
            f"{folder}: trained with seed {learnt_with}, tested with {seed}: expected the same "
            "seed, which splits the devices, or --all-devices if it learnt from none of them"
        )
    return Forecaster.load(folder), folder


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
    """Draw examples at one origin in each step: the devices online then, and as many offline.

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


def against(
    usual: Forecaster, forecasters: Mapping[str, Forecaster], tested: Examples, least: Array
) -> pd.DataFrame:
    """Return which share of a simple forecaster's loss each other one has, the smallest first.

    Args:
        usual: the simple one.
        forecasters: fitted ones, by name.
        tested: examples, such as those at rolling origins.
        least: from `least_rates`.

    Returns:
        Columns forecaster, against (the kind of the simple one), share, its 95 % interval low and
        high, blocks (devices or days that it resamples, for both forecasters the same), and the
        share of each quantity, NaN where there was nothing to forecast.
    """
    _, block = np.unique(blocks(tested.observed), return_inverse=True)
    n = int(block.max()) + 1
    weights = np.concatenate([np.ones((1, n)), resampled(n)])
    of_usual = weights @ _sums(usual, tested, least, block)
    something = of_usual > _FORESEEN * len(tested)
    rows = []
    for name, forecaster in forecasters.items():
        own = weights @ _sums(forecaster, tested, least, block)
        shares = np.divide(own, of_usual, out=np.full(own.shape, np.nan), where=something)
        # A draw without anything to forecast of a quantity says nothing of it.
        known = np.where(np.isnan(shares), shares[0], shares)[:, something[0]]
        if known.size:
            with np.errstate(divide="ignore"):
                means = np.exp(np.log(known).mean(axis=1))
            low, high = np.quantile(means[1:], [0.025, 0.975])
            rows.append((name, usual.kind, means[0], low, high, n, *shares[0]))
    return pd.DataFrame(rows, columns=[*_JUDGED, *_QUANTITIES]).sort_values(
        "share", ignore_index=True
    )


def _sums(forecaster: Forecaster, tested: Examples, least: Array, block: Index) -> Array:
    """Return the sum of each quantity's losses over each block; shape (blocks, 4)."""
    forecast = forecaster.forecast(tested.observed)
    chances = brier(forecast.available, tested.available)
    rates = pinball(logs(forecast.rates, least), logs(tested.rates, least))
    losses = np.column_stack([np.nansum(chances, axis=1), np.nansum(rates, axis=2)])
    return np.stack([np.bincount(block, weights=each) for each in losses.T], axis=1)


def verdict(table: pd.DataFrame) -> str:
    """Say whether the best forecaster pays, by the interval of its share of the loss.

    Args:
        table: from `against`.
    """
    if table.empty:
        return "no forecaster but the simple one, or nothing to forecast: nothing is compared."
    name, usual, share, low, high, n = table.iloc[0, : len(_JUDGED)]
    loss = f"{share:.2f} of {usual}'s loss"
    if n < LEAST_BLOCKS:
        more = ceil((LEAST_BLOCKS - n) / (1.0 - TURN_SHARE))
        return (
            f"{name} has {loss} on {n} days, too few to tell: use {usual}, or record {more} "
            "days more."
        )
    loss += f" [{low:.2f}, {high:.2f}]"
    if low <= 1.0 <= high:
        return f"{name} is level with {usual} here, with {loss}: use {usual}."
    return f"{name} has {loss}: use {'it' if high < 1.0 else usual}."


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


def brier(p: Array, happened: Array) -> Array:
    """Return the squared error of a probability.

    Example:
        >>> brier(np.array([0.8]), np.array([1.0])).round(2)
        array([0.04])
    """
    return (p - happened) ** 2


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
