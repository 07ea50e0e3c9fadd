"""What a comparison shows, in a sentence a variant; if it shows nothing, how many pairs would.

A ratio or a difference is shown if its interval leaves out 1 or 0, which mean none. Where runs
never reached the target a ratio is a bound, and shows only what the bound does.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedstale.comparison.statistics import LEAST, Estimate, SpeedUp, pairs_needed
from fedstale.until import is_lower_better

_ENOUGH = 5
"""Seeds that are asked for where there are too few for an interval."""
_PART_IS = {"exact": "", "at least": "at most ", "at most": "at least ", "unknown": "~"}
"""What a variant's part of the reference's time is, by what the speed-up is."""


@dataclass(frozen=True, slots=True)
class _Finding:
    """What was seen of one measure."""

    name: str
    text: str
    is_shown: bool
    effects: Estimate | None
    """By pair, what is 0 without a difference; None if it is but a bound."""


def verdict(
    name: str,
    reference: str,
    *,
    n: int,
    target: str | None,
    is_reached: bool,
    time: SpeedUp | None,
    device_time: SpeedUp | None,
    ends: Mapping[str, Estimate],
) -> str:
    """Judge a variant against the reference, in a sentence.

    Args:
        name: of the variant.
        reference: the name of the other.
        n: pairs of runs.
        target: a metric and its value, if times to it are compared.
        is_reached: whether any run of the two reached it.
        time: the reference's time to the target over the variant's.
        device_time: the same of the time that all devices spent.
        ends: by metric, the variant's last value minus the reference's, in pairs.
    """
    takes = [
        _part(words, found)
        for words, found in (("time", time), ("device-hours", device_time))
        if found is not None
    ]
    last = [_end(metric, found) for metric, found in ends.items() if found.n]
    if n == 0:
        return f"{name} and {reference} have no seed in common that both finished."
    if not takes and not last:
        return f"{name} and {reference} measured nothing by which they could be compared."
    never = ""
    if target is not None and not is_reached:
        never = f" No run of either reached {target}: set a nearer target or a later until."
    pairs = "1 pair" if n == 1 else f"{n} pairs"
    if any(found.is_shown for found in takes):
        parts = [found.text + ("" if found.is_shown else " (not shown)") for found in takes]
        told = [f"takes {' and '.join(parts)} to reach {target}"]
    else:
        told = []
    told += [f"ends with {found.text}" for found in last if found.is_shown]
    if told:
        return f"{name} against {reference}, in {pairs}: it {', and '.join(told)}.{never}"
    seen = f"{name} is not shown to differ from {reference} in {pairs}"
    seen = f"{seen}: {', '.join(found.text for found in [*takes, *last])}."
    advice = f"Run {_ENOUGH} seeds or more." if n < LEAST else _advice([*takes, *last])
    return f"{seen} {advice}{never}"


def _part(name: str, found: SpeedUp) -> _Finding:
    """Return which part of the reference's time a variant takes."""
    own, bound = found.ratio, found.bound
    inverse = Estimate(
        mean=1.0 / own.mean,
        low=1.0 / own.high,
        high=1.0 / own.low,
        values=tuple(1.0 / value for value in own.values),
    )
    is_less = own.low > 1.0 and bound in ("exact", "at least")
    is_more = own.high < 1.0 and bound in ("exact", "at most")
    logs = np.log(own.values)
    effects = Estimate(mean=float(logs.mean()), values=tuple(logs.tolist()))
    text = f"{_PART_IS[bound]}{inverse.ends('{:.2f}'.format)} times the {name}"
    return _Finding(name, text, is_less or is_more, effects if bound == "exact" else None)


def _end(metric: str, found: Estimate) -> _Finding:
    """Return by how much a metric is another at the end."""
    is_more, is_less = found.low > 0.0, found.high < 0.0
    kind = "better" if is_more != is_lower_better(metric) else "worse"
    before = f"the {kind} {metric}: " if is_more or is_less else f"{metric} "
    return _Finding(metric, before + found.ends(), is_more or is_less, found)


def _advice(seen: list[_Finding]) -> str:
    """Return how many pairs would show what was seen."""
    judged = [
        (found.name, own)
        for found in seen
        if (own := found.effects) and own.n >= LEAST and np.isfinite(own.mean)
    ]
    if not judged:
        return f"Run {_ENOUGH} seeds or more."
    if not any(any(effects.values) for _, effects in judged):
        return "Both are equal in every pair."
    needed = [(n, name) for name, effects in judged if (n := pairs_needed(effects)) is not None]
    if not needed:
        return "So small a difference takes more than 1,000 pairs to show."
    n, name = min(needed)
    told = f"{n} pairs show it with 80% probability: run {n} seeds."
    return f"If the {name} differs by as much, {told}"
