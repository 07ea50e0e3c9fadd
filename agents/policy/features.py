"""The observation: every candidate as the same few numbers, however many candidates there are.

Times, losses and sizes are logarithms of their ratio to the median over the candidates,
chances are log-odds, ages logarithms of seconds; an unknown number is 0, with a flag. Nothing is an
id or a position, and nothing is summed or maximised over candidates, so what is learnt on sixteen
holds for a hundred thousand.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from fedstale.strategies.selection import BALANCED
from fedstale.strategies.types import Candidates
from fedstale.traces import Array, Mask

Single = npt.NDArray[np.float32]
AnyFloats = npt.NDArray[np.floating]
Observation: TypeAlias = dict[str, Single]
"""What a policy of one's own sees of b choices, by name, as `SelectionEnv` says it."""
_T = TypeVar("_T", bound=np.generic)

FEATURES = (
    "p_finish_logit",
    "forecast_unknown",
    "forecast_age",
    "p_available_logit",
    "p_available_unknown",
    "forecast_duration_ratio",
    "forecast_duration_to_deadline",
    "forecast_duration_unknown",
    "duration_ratio",
    "duration_to_deadline",
    "duration_unknown",
    "utility_ratio",
    "utility_unknown",
    "loss_ratio",
    "examples_ratio",
    "versions_since",
    "staleness",
    "picked_since",
    "times_picked",
    "times_picked_ratio",
    "forecast_reliability",
    "success_logit",
    "heuristic_rank",
)
"""Numbers of each candidate, in their order."""
CONTEXT = (
    "slots_share",
    "in_flight_share",
    "version",
    "utility_known_share",
    "forecast_known_share",
    "mean_p_finish",
    "median_duration_to_deadline",
    "missing_to_slots",
    "expected_to_missing",
)
"""Numbers of a choice, in their order."""
SCHEMA: Mapping[str, object] = {"version": 3, "features": FEATURES, "context": CONTEXT}
"""All names, and a version that changes when their meaning does."""

N_FEATURES, N_CONTEXT = len(FEATURES), len(CONTEXT)

N_MAX = 64
"""Candidates that a policy of one's own is shown at a time, by default."""
LIMIT = 8.0
"""No feature is larger than this, or smaller than its negative."""
HEURISTIC_LIMIT = 20.0
"""No score of the heuristic is larger than this, or smaller than its negative."""

_LEAST_P = 1e-6
# Log-odds beyond this are no longer evidence: a device that claims certainty is a candidate like
# any other of 98 %.
_RATIO = 4.0
# Stands for the logarithm of 0.
_NONE = -700.0
# Ranks and medians of more candidates than this are read off a sample of them.
_SAMPLED = 4_096
_BINS = 65_536
# Of more candidates than this, so many are looked at at a time that their numbers fit in the cache.
_CHUNK = 16_384
# In rows up to this long, comparing all pairs is faster than sorting each row.
_SHORT = 128

_PLACE = {name: i for i, name in enumerate(FEATURES)}


class Inputs(NamedTuple):
    """What the scorer is given of b choices of at most n candidates; all finite."""

    features: Single
    """Of each candidate, in the order of `FEATURES`; shape (b, n, f)."""
    context: Single
    """Of each choice, in the order of `CONTEXT`; shape (b, g)."""
    heuristic: Single
    """Logarithm of the score of `ExpectedUtility(BALANCED)`, up to a constant; shape (b, n)."""


def features(
    candidates: Candidates,
    mask: Mask,
    *,
    now: npt.ArrayLike,
    k: npt.ArrayLike,
    n_in_flight: npt.ArrayLike,
    version: npt.ArrayLike,
    deadline_s: npt.ArrayLike,
    n_missing: npt.ArrayLike,
    n_expected: npt.ArrayLike,
) -> Inputs:
    """Return the inputs of b choices at once; a real server has one.

    Args:
        candidates: n clients of each choice, choice after choice; b x n of them.
        mask: which of them may be picked; the others are 0 in the result; shape (b, n).
        now: instants in s; one, or shape (b,), as all that follow.
        k: how many are to be picked, >= 1.
        n_in_flight: jobs in flight.
        version: of the model.
        deadline_s: time in which a reply counts, in s; inf if there is no limit.
        n_missing: updates that the next server step waits for; 0 where it waits for no number.
        n_expected: sum of the chances to finish of the jobs in flight.
    """
    b, n = mask.shape
    now, k, n_in_flight, version, deadline_s, n_missing, n_expected = (
        np.asarray(x, dtype=np.float64).reshape(-1, 1) + np.zeros((b, 1))
        for x in (now, k, n_in_flight, version, deadline_s, n_missing, n_expected)
    )
    # A real choice is written feature by feature, so that each is one piece of memory.
    shape, order = ((N_FEATURES, b, n), (1, 2, 0)) if b == 1 else ((b, n, N_FEATURES), (0, 1, 2))
    x = np.empty(shape, dtype=np.float32).transpose(order)
    heuristic = np.empty((b, n), dtype=np.float32)

    @cache
    def column(name: str) -> Array:
        return np.asarray(getattr(candidates, name), dtype=np.float64).reshape(b, n)

    # Reports are not trusted: infinity times zero is unknown here.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        limit = _log(deadline_s)
        medians = _medians(column, mask)
        for start in range(0, n, _CHUNK):
            part = slice(start, start + _CHUNK)
            heuristic[:, part] = _fill(
                x, column, part, medians, now=now, version=version, limit=limit
            )
        heuristic[~mask] = 0.0
        x[..., _PLACE["heuristic_rank"]] = _rank(heuristic, mask)
    x[~mask] = 0.0
    context = _context(
        x,
        mask,
        medians,
        k=k,
        n_in_flight=n_in_flight,
        version=version,
        limit=limit,
        n_missing=n_missing,
        n_expected=n_expected,
    )
    return Inputs(features=x, context=context, heuristic=heuristic)


# Columns whose logarithms are compared with their median over the candidates of a choice.
_COMPARED = ("forecast_duration_s", "duration_s", "utility", "loss", "examples")

_LOGITS = ("p_finish_logit", "p_available_logit", "success_logit")
_AGES = ("forecast_age", "versions_since", "staleness", "picked_since")
_RATIOS = (
    *("forecast_duration_ratio", "duration_ratio", "utility_ratio", "loss_ratio", "examples_ratio"),
    *("forecast_duration_to_deadline", "duration_to_deadline"),
    *("times_picked_ratio", "forecast_reliability"),
)
_FLAGS = (
    *("forecast_unknown", "p_available_unknown", "forecast_duration_unknown", "duration_unknown"),
    "utility_unknown",
)


def _medians(get: Callable[[str], Array], mask: Mask) -> dict[str, Single]:
    """Return medians over the candidates of each row, and the largest utility; (b, 1) each."""
    every = slice(None) if mask.shape[1] <= _CHUNK else _sample(np.arange(mask.shape[1]))
    logs = _log(np.array([get(name)[:, every] for name in _COMPARED]))
    picked = np.log1p(get("times_picked")[:, every])
    rows = np.array([*logs, picked, _expected(*logs[:2])])
    # One row after the other, each under the candidates of its choice.
    each = rows.shape[0] * rows.shape[1], rows.shape[2]
    known = np.array([mask[:, every]] * len(rows)).reshape(each)
    found = row_medians(rows.reshape(each), known).reshape(*rows.shape[:2], 1)
    largest = _largest(np.where(mask, get("utility"), np.nan))
    names = (*_COMPARED, "times_picked", "expected", "largest")
    singles = np.array([*found, largest], dtype=np.float32)
    return dict(zip(names, singles, strict=True))


def _largest(utility: Array) -> Array:
    """Return the logarithm of the largest utility that is known, 0 if none is; shape (b, 1)."""
    known = np.where(np.isfinite(utility) & (utility >= 0.0), utility, -1.0)
    largest = known.max(axis=1, keepdims=True, initial=-1.0)
    return np.where(largest < 0.0, 0.0, np.maximum(np.log(largest), _NONE))


def _fill(
    x: Single,
    get: Callable[[str], Array],
    part: slice,
    medians: Mapping[str, Single],
    *,
    now: Array,
    version: Array,
    limit: AnyFloats,
) -> AnyFloats:
    """Write all features but the rank of some columns, and return the heuristic's scores."""

    def columns(*names: str) -> Array:
        return np.array([get(name)[:, part] for name in names])

    # 32 bits are enough from here on, but not for instants, only for their differences.
    then = columns("forecast_at", "last_version", "picked_at", "staleness")
    ages = np.array([now - then[0], version - then[1], then[3], now - then[2]], dtype=np.float32)
    stated, counts, compared = (
        columns(*names).astype(np.float32)
        for names in (
            ("p_finish", "forecast_p_available"),
            ("times_finished", "times_failed", "expected_finishes", "times_picked"),
            _COMPARED,
        )
    )
    finished, failed, expected = counts[:3]
    picked, logs = np.log1p(counts[3]), _log(compared)
    ratios = [
        *(logs - np.array([medians[name] for name in _COMPARED])),
        *(logs[:2] - limit.astype(np.float32)),
        picked - medians["times_picked"],
        np.log((finished + 4.0) / (expected + 4.0)),
    ]
    flags = [
        *(~np.isfinite([get("forecast_p_finish")[:, part], stated[1]])),
        *np.isnan(logs[:2]),
        ~np.isfinite(compared[2]),
    ]
    chances = np.array([*stated, (finished + 1.0) / (finished + failed + 2.0)])
    for names, values in (
        (_LOGITS + _RATIOS, _ratio(np.array([*np.log(chances / (1.0 - chances)), *ratios]))),
        (_AGES, _age(ages)),
        (_FLAGS, flags),
        (("times_picked",), [np.minimum(picked, LIMIT)]),
    ):
        for name, column in zip(names, values, strict=True):
            x[:, part, _PLACE[name]] = column
    utilities = np.where(compared[2] == 0.0, _NONE, logs[2])
    return _scores(stated[0], utilities, logs[:2], picked, medians)


def _context(
    x: Single,
    mask: Mask,
    medians: Mapping[str, Single],
    *,
    k: Array,
    n_in_flight: Array,
    version: Array,
    limit: AnyFloats,
    n_missing: Array,
    n_expected: Array,
) -> Single:
    """Return the context of each choice."""
    n = np.maximum(mask.sum(axis=1, keepdims=True), 1)
    # What is no candidate is 0 in x.
    total = {
        name: x[..., _PLACE[name]].sum(axis=1, keepdims=True, dtype=np.float64) / n
        for name in ("utility_unknown", "forecast_unknown", "p_finish_logit")
    }
    some = np.minimum(mask.sum(axis=1, keepdims=True), 1)
    forecast = medians["forecast_duration_s"]
    middle = np.where(np.isnan(forecast), medians["duration_s"], forecast)
    missing = np.log1p(n_missing)
    pairs = missing - np.log1p(k), np.log1p(n_expected) - missing
    context = np.concatenate(
        [
            np.log(np.maximum(k, 1) / n),
            n_in_flight / np.maximum(n_in_flight + k, 1.0),
            np.log1p(np.maximum(version, 0.0)),
            some - total["utility_unknown"],
            some - total["forecast_unknown"],
            total["p_finish_logit"],
            _ratio(np.concatenate([middle - limit, *pairs], axis=1)),
        ],
        axis=1,
    )
    return np.minimum(np.maximum(context, -LIMIT), LIMIT).astype(np.float32)


def heuristic_scores(candidates: Candidates, mask: Mask) -> Array:
    """Return the logarithm of the score of `ExpectedUtility(BALANCED)`, up to a constant; (b, n).

    Args:
        candidates: n clients of each choice, choice after choice; b x n of them.
        mask: which of them may be picked; the others score 0; shape (b, n).
    """

    def column(name: str) -> Array:
        return np.asarray(getattr(candidates, name), dtype=np.float64).reshape(mask.shape)

    with np.errstate(divide="ignore", invalid="ignore"):
        utility = column("utility")
        logs = _log(utility)
        stated, observed = (_log(column(name)) for name in _COMPARED[:2])
        medians = {
            "largest": _largest(np.where(mask, utility, np.nan)),
            "utility": row_medians(logs, mask),
            "expected": row_medians(_expected(stated, observed), mask),
        }
        utilities, picked = np.where(utility == 0.0, _NONE, logs), np.log1p(column("times_picked"))
        durations = stated, observed
        found = _scores(column("p_finish"), utilities, durations, picked, medians)
    return np.where(mask, found, 0.0)


def _scores(
    p_finish: AnyFloats,
    utilities: AnyFloats,
    durations: Sequence[AnyFloats] | AnyFloats,
    picked: AnyFloats,
    medians: Mapping[str, AnyFloats],
) -> AnyFloats:
    """Return the scores of `BALANCED`, from logarithms of all but chances."""
    largest, middle = medians["largest"], medians["utility"]
    utilities = np.where(np.isnan(utilities), largest, utilities)
    base = np.where(np.isnan(middle), largest, middle)
    # What is not known is the median.
    longer = _expected(*durations) - medians["expected"]
    p_finish = np.where(np.isnan(p_finish), 0.5, p_finish)
    chances = np.log(np.minimum(np.maximum(p_finish, _LEAST_P), 1.0))
    found = (
        BALANCED.chance * chances
        + BALANCED.utility * (utilities - base)
        - BALANCED.duration * np.where(np.isnan(longer), 0.0, longer)
        - BALANCED.picked * picked
    )
    return np.minimum(np.maximum(found, -HEURISTIC_LIMIT), HEURISTIC_LIMIT)


def _expected(stated: AnyFloats, observed: AnyFloats) -> AnyFloats:
    """Return the duration that a device states, or else has taken."""
    return np.where(np.isnan(stated), observed, stated)


def _log(x: AnyFloats) -> AnyFloats:
    """Return logarithms; NaN for what is unknown, infinite or not positive."""
    logs = np.log(x)
    return np.where(np.isfinite(logs), logs, np.nan)


def _ratio(x: AnyFloats) -> AnyFloats:
    # np.clip takes four times as long for a few.
    return np.where(np.isnan(x), 0.0, np.minimum(np.maximum(x, -_RATIO), _RATIO))


def _age(x: AnyFloats) -> AnyFloats:
    """Return log(1 + age), 0 where unknown; a clock that went backwards gives 0."""
    return (
        np.where(np.isnan(x), 0.0, np.minimum(np.log(1.0 + np.maximum(x, 0.0)), 2.0 * LIMIT)) / 2.0
    )


def row_medians(x: AnyFloats, mask: Mask) -> Array:
    """Return the median of each row over what is known of candidates, NaN if nothing; (b, 1)."""
    if not x.size:
        return np.full((len(x), 1), np.nan)
    known = mask & ~np.isnan(x)
    # NaN sorts last.
    ordered = np.where(known, x, np.nan)
    ordered.sort(axis=1)
    n = known.sum(axis=1)
    each = np.arange(len(x))
    middle = 0.5 * (ordered[each, np.maximum(n - 1, 0) // 2] + ordered[each, n // 2])
    return np.where(n > 0, middle, np.nan)[:, None]


def _rank(x: Single, mask: Mask) -> AnyFloats:
    """Return the share of candidates with less, ties counting half, in [0, 1]."""
    if x.shape[1] <= _SHORT:
        lower = np.where(mask, x, np.inf)[:, None, :]
        n = np.maximum(mask.sum(axis=1, keepdims=True), 1)
        less, same = (f(lower, x[:, :, None]).sum(axis=2) for f in (np.less, np.equal))
        return np.asarray((less + 0.5 * same) / n)
    place = _place if x.shape[1] <= _CHUNK else _placed
    return np.stack([place(np.sort(_sample(r[m])), r) for r, m in zip(x, mask, strict=True)])


def _sample(x: npt.NDArray[_T]) -> npt.NDArray[_T]:
    """Return a part of a long row, evenly spread over it."""
    return x[:: max(1, x.size // _SAMPLED)]


def _place(ordered: AnyFloats, x: AnyFloats) -> Array:
    if not ordered.size:
        return np.zeros(x.shape)
    low = np.searchsorted(ordered, x)
    high, tied = low.copy(), ordered[np.minimum(low, ordered.size - 1)] == x
    high[tied] = np.searchsorted(ordered, x[tied], side="right")
    return np.asarray(0.5 * (low + high) / ordered.size)


def _placed(ordered: AnyFloats, x: AnyFloats) -> Single:
    """Return `_place` from a table: a search for each of a million takes longer than all else."""
    edges = np.linspace(-HEURISTIC_LIMIT, HEURISTIC_LIMIT, _BINS + 1)
    low, high = np.searchsorted(ordered, edges[:-1]), np.searchsorted(ordered, edges[1:])
    table = (0.5 * (low + high) / ordered.size).astype(np.float32)
    bins = (x + HEURISTIC_LIMIT) * (_BINS / (2.0 * HEURISTIC_LIMIT))
    return table[np.minimum(bins.astype(np.int32), _BINS - 1)]
