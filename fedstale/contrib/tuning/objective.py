"""What a search makes better: a metric, the time to a target, the devices' time, or traffic.

It is the mean over seeds of what runs have come to at one instant of virtual time. A metric is that
of evaluations, of the server if there is one, in the mean over the last eighth of the time: where
clients have different data, a single evaluation tells who trained last as much as how well it goes.
A run that never reached its target counts with the whole time that it could have had, and is
counted as such.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fedstale.errors import ConfigError, nearest
from fedstale.reports import Run
from fedstale.traces import Array
from fedstale.until import Until, is_lower_better

LATELY = 0.125
"""Share of the time until an instant over which a metric is averaged."""
_TIME_TO = "time to "
_DECIDING = ("server", "evaluate")
_METRIC = re.compile(r"[A-Za-z][\w.-]*")
_HOUR_S = 3600.0

Kind = Literal["metric", "time", "device-hours", "bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One quantity that a search makes larger or smaller."""

    text: str
    """As it was asked for."""
    kind: Kind
    target: Until = field(default_factory=Until)
    """The metric, and of a time the value that it is to reach."""

    @classmethod
    def parse(cls, text: object) -> "Objective":
        """Read an objective.

        Raises:
            ConfigError: it is none.

        Example:
            >>> Objective.parse("time to accuracy 0.8").target.target
            0.8
            >>> Objective.parse("loss").is_lower_better
            True
        """
        if text in ("device-hours", "bytes"):
            return cls(text=str(text), kind="device-hours" if text == "device-hours" else "bytes")
        if isinstance(text, str) and _METRIC.fullmatch(text):
            return cls(text=text, kind="metric", target=Until(metric=text))
        if isinstance(text, str) and text.startswith(_TIME_TO):
            goal = text.removeprefix(_TIME_TO)
            # A limit in time or rounds is a limit, and no goal.
            if re.match(r"\s*[A-Za-z]", goal) and (target := Until.parse(goal)).metric is not None:
                return cls(text=text, kind="time", target=target)
        raise ConfigError(
            f"objective = {text!r}: expected a metric such as 'accuracy', 'time to accuracy 0.8', "
            "'device-hours' or 'bytes'"
        )

    @property
    def is_lower_better(self) -> bool:
        """Whether less is better: of times and costs, and of metrics that are losses by name."""
        return self.kind != "metric" or is_lower_better(str(self.target.metric))

    @property
    def unit(self) -> str:
        """The name with its unit, for axes and tables."""
        return f"{self.text} (s)" if self.kind == "time" else self.text

    @property
    def in_words(self) -> str:
        """What is measured, for sentences."""
        is_mean = self.kind == "metric"
        return f"{self.text} over the last eighth of the time" if is_mean else self.unit

    def of(self, runs: Sequence[Run], at_s: float, until_s: float) -> tuple[float, int]:
        """Return the mean over runs by now, and how many have not reached the target.

        Args:
            runs: of one configuration, one a seed, as far as they are.
            at_s: now, in virtual time; a run that ended before keeps the model that it had.
            until_s: virtual time in s that a run can have at most.

        Returns:
            NaN if a run has no value; runs without the target count with all of their time.
        """
        values = [self.of_run(run, at_s, until_s) for run in runs]
        never = [self.kind == "time" and self._of_run(run, at_s) == np.inf for run in runs]
        # An infinite loss is no number to go by either.
        return float(np.mean(values)) if np.isfinite(values).all() else np.nan, sum(never)

    def of_run(self, run: Run, at_s: float, until_s: float) -> float:
        """Return the value of one run by now; a time that it never came to is `until_s`."""
        value = self._of_run(run, at_s)
        return min(value, until_s) if self.kind == "time" else value

    def require_measured(self, runs: Sequence[Run], *, at_end: bool) -> None:
        """Check that the app measures what is asked for.

        Args:
            runs: of the first configuration.
            at_end: whether nothing more will be measured.

        Raises:
            ConfigError: it measures other things, or nothing at its end.
        """
        if self.target.metric is None or any(_source(run, self.target) for run in runs):
            return
        known = sorted({name for run in runs for source in _DECIDING for name in run.last(source)})
        if known or at_end:
            accepted = nearest(self.target.metric, known) if known else "an app that evaluates"
            raise ConfigError(
                f"objective = {self.text!r}: the app measures no {self.target.metric!r} in an "
                f"evaluation; expected {accepted}"
            )

    def _of_run(self, run: Run, at_s: float) -> float:
        if self.kind == "device-hours":
            return run.costs["device_s"] / _HOUR_S
        if self.kind == "bytes":
            return run.costs["bytes"]
        source = _source(run, self.target)
        if source is None:
            return np.inf if self.kind == "time" else np.nan
        if self.kind == "time":
            return run.time_to(self.target, source=source)
        return recent_mean(*run.curve(str(self.target.metric), source), at_s)


def recent_mean(at: Array, values: Array, until: float) -> float:
    """Return the mean of a metric over the last eighth of the time until an instant.

    A model has what was last measured of it until it is measured again, so measurements count for
    as long as they hold, however often a strategy makes them. Before the first one there is none.

    Args:
        at: rising instants of the measurements; shape (n,).
        values: the measurements; shape (n,).
        until: the instant; NaN comes back of one before all measurements.

    Example:
        >>> recent_mean(np.array([0.0, 75.0]), np.array([0.2, 0.6]), 80.0)  # 5 s and 5 s
        0.4
    """
    n = int(np.searchsorted(at, until, side="right"))
    if n == 0:
        return np.nan
    last = float(values[n - 1])
    lasts = np.diff(np.append(np.maximum(at[:n], until * (1.0 - LATELY)), until))
    held = lasts > 0.0
    if not np.isfinite(last) or not held.any():
        return last
    return float(np.average(values[:n][held], weights=lasts[held]))


def _source(run: Run, target: Until) -> str | None:
    """Return where a run measured a metric, the server first; None if it did not yet."""
    metric = str(target.metric)
    return next((source for source in _DECIDING if len(run.curve(metric, source)[0])), None)
