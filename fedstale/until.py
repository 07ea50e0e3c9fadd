"""`Until`, the rule that ends a run: a time, a number of rounds, or a metric and its target."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite, nan

from fedstale.errors import ConfigError

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_LOWER_IS_BETTER = ("loss", "error", "perplexity")


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    """When a run ends before its app does; at most one limit is set."""

    time_s: float = inf
    """Virtual time in s."""
    rounds: int | None = None
    """Number of aggregations."""
    metric: str | None = None
    """Name of a metric, from a central evaluation if there is one."""
    target: float = nan
    """Value that the metric has to reach: at most for losses and errors, at least for the rest."""

    @classmethod
    def parse(cls, text: str | None, *, name: str = "until") -> "Until":
        """Read a limit such as "2d", "90m", "100 rounds" or "accuracy 0.9".

        Args:
            text: None sets no limit.
            name: of the setting, for the message.

        Raises:
            ConfigError: it is none of these.

        Example:
            >>> Until.parse("2h").time_s
            7200.0
            >>> Until.parse("accuracy 0.9").metric
            'accuracy'
        """
        if text is None:
            return cls()
        if not isinstance(text, str):
            raise ConfigError(f"{name} = {text!r}: expected a text such as '2d' or '100 rounds'")
        if time := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", text):
            return cls(time_s=float(time[1]) * _UNITS_S[time[2]])
        if rounds := re.fullmatch(r"\s*(\d+)\s*rounds?\s*", text):
            return cls(rounds=int(rounds[1]))
        if metric := re.fullmatch(r"\s*([A-Za-z][\w.-]*)\s+(-?\d+(?:\.\d+)?(?:e-?\d+)?)\s*", text):
            return cls(metric=metric[1], target=float(metric[2]))
        raise ConfigError(
            f"{name} = {text!r}: expected a virtual time such as 2d or 90m, '100 rounds', or a "
            "metric and its target such as 'accuracy 0.9'"
        )

    def share(self, now: float, rounds: int) -> float | None:
        """Return how much of a run is done, in [0, 1]; None where nothing limits it but the app.

        Args:
            now: virtual instant in s.
            rounds: aggregations so far.
        """
        if self.rounds is not None:
            return min(1.0, rounds / self.rounds) if self.rounds else 1.0
        return min(1.0, now / self.time_s) if self.time_s < inf else None

    def goes_beyond(self, before: "Until") -> bool:
        """Return whether a run that has come to an earlier limit can go on to this one.

        Both are of one kind: whether an accuracy comes after an hour, no one knows before.
        """
        if self.metric is not None and self.metric == before.metric:
            # What reaches this target has reached the other before.
            is_harder = before.is_reached(0, {self.metric: self.target})
            return is_harder and self.target != before.target
        if self.rounds is not None and before.rounds is not None:
            return self.rounds > before.rounds
        return before.time_s < self.time_s < inf

    def is_reached(self, rounds: int, metrics: Mapping[str, float]) -> bool:
        """Return whether a round, or a metric just measured, ends the run; infinity never does."""
        if self.rounds is not None and rounds >= self.rounds:
            return True
        value = metrics.get(self.metric) if self.metric is not None else None
        if value is None or self.metric is None or not isfinite(value):
            return False
        if is_lower_better(self.metric):
            return value <= self.target
        return value >= self.target


def is_lower_better(metric: str) -> bool:
    """Return whether a metric is a loss or an error, by its name.

    Example:
        >>> is_lower_better("eval_loss"), is_lower_better("accuracy")
        (True, False)
    """
    return any(word in metric.lower() for word in _LOWER_IS_BETTER)
