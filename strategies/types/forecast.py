"""What a device states of its own next job, as the server reads it in a reply.

Nothing of it is trusted to be more than a statement: what cannot be meant is ignored, and never
ends a run.
"""

from collections.abc import Mapping
from math import inf, isfinite, isnan, nan
from typing import NamedTuple

from flwr.app import ConfigRecord, Message, RecordDict

Forecast = Mapping[str, float | list[float]]

FORECAST_RECORD = "fedstale.forecast"
"""Name of the ConfigRecord in a reply that holds a forecast."""
MOST_METRICS, MOST_NAME, MOST_LIST = 256, 200, 1024
"""Values of a reply, and characters of a name; numbers of a list in a forecast, which is ignored if
it has more of any."""


def forecast_in(content: RecordDict) -> Forecast:
    """Return the numbers of a client's forecast of itself in a reply; empty if it sent none.

    Values that are not finite, too long or no number are left out.
    """
    record = content.get(FORECAST_RECORD)
    if not isinstance(record, ConfigRecord) or len(record) > MOST_METRICS:
        return {}
    kept: dict[str, float | list[float]] = {}
    for key, value in record.items():
        if len(key) > MOST_NAME:
            continue
        if isinstance(value, list):
            numbers = [x for x in value[:MOST_LIST] if isinstance(x, int | float)]
            if numbers and len(numbers) == len(value):
                kept[key] = [x if isinstance(x, float) else as_float(x) for x in numbers]
        elif isinstance(value, int | float) and isfinite(number := as_float(value)):
            kept[key] = number
    return kept


class NextJob(NamedTuple):
    """What a client reports of its next job; None for what it does not report."""

    p_finish: float | None = None
    """Chance to finish it."""
    duration_s: float | None = None
    """Time from the sending to the last byte of the reply if nothing interrupts, > 0."""


def next_job_in(reply: Message) -> NextJob:
    """Return what a client reports of its next job, as far as it can be meant."""
    # Asked of every reply, and a look at what is not there takes ten times as long.
    if reply.has_error() or FORECAST_RECORD not in reply.content:
        return NextJob()
    forecast = forecast_in(reply.content)
    p, s = (forecast.get(name) for name in NextJob._fields)
    return NextJob(
        p if isinstance(p, float) and 0.0 <= p <= 1.0 else None,
        s if isinstance(s, float) and s > 0.0 else None,
    )


def median_of(forecast: Forecast, name: str) -> float:
    """Return the median of a time in a forecast, in s; NaN where it has none."""
    levels, times = forecast.get("levels"), forecast.get(name)
    if not isinstance(levels, list) or not isinstance(times, list) or 0.5 not in levels:
        return nan
    place = levels.index(0.5)
    return times[place] if place < len(times) else nan


def forecast_share(forecast: Forecast) -> float:
    """Return the share of a whole job's work that the job of a forecast has, in (0, inf)."""
    share = _number(forecast.get("share", 1.0))
    return share if share > 0.0 else 1.0


def full_job_s(duration_s: float, share: float, forecast: Forecast) -> float:
    """Return how long a job would have taken in full, in s.

    Args:
        duration_s: that it took with a share of the work.
        share: in (0, 1].
        forecast: of its device; where it has no time of training, nothing is added.
    """
    left_s = (1.0 - share) * median_of(forecast, "training_s") / forecast_share(forecast)
    return duration_s + left_s if 0.0 < left_s < inf else duration_s


def whole_duration_s(forecast: Forecast) -> float:
    """Return the duration that a forecast states, for a whole job, in s; NaN for none."""
    duration_s = _number(forecast.get("duration_s"))
    return full_job_s(duration_s, forecast_share(forecast), forecast)


def _number(value: object) -> float:
    known = isinstance(value, int | float) and isfinite(value)
    return float(value) if known else nan  # type: ignore[arg-type]


def chance_of(value: object) -> float:
    """Return a stated chance within [0, 1]; NaN for what is no number."""
    number = _number(value)
    return number if isnan(number) else min(max(number, 0.0), 1.0)


def as_float(value: float) -> float:
    """Return a number as a float; infinity for an integer beyond all floats."""
    try:
        return float(value)
    except OverflowError:
        return float("inf")
