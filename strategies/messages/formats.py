"""Which format a node's messages have: one for all nodes, or one for each by its own forecast."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from fedstale.strategies.messages.codec import FORMATS, FormatName
from fedstale.strategies.types import Forecast, median_of, require

WHOLE_NUMBERS: tuple[FormatName, ...] = ("int8", "int4", "int2")
"""Formats that can be rounded stochastically."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages(ABC):
    """Says which format each message has; the extension point is `up_of`."""

    down: FormatName | None = None
    """Format of the model on its way to devices that train; None sends it in full. The server keeps
    its model in full, and an update is a change of what was sent, so no error adds up. What devices
    evaluate is always in full."""
    stochastic: bool = False
    """Whether replies are rounded up or down by chance, right in the mean, as in QSGD. Else they
    are rounded to the nearest, and what that leaves out goes into the node's next reply."""

    def __post_init__(self) -> None:
        require(self.down in (None, *FORMATS), "messages.down", self.down, _accepted(FORMATS))

    def _require_whole(self, name: str, form: FormatName | None) -> None:
        """Check that replies in a format can be rounded by chance, if they are to be."""
        accepted = f"{_accepted(WHOLE_NUMBERS)} with stochastic=True"
        require(not self.stochastic or form in WHOLE_NUMBERS, name, form, accepted)

    @abstractmethod
    def up_of(
        self,
        forecast: Forecast,
        last: FormatName | None,
        bytes_of: Callable[[FormatName | None], int],
    ) -> FormatName | None:
        """Return the format of a node's next reply; None for in full.

        Args:
            forecast: that the node last reported of itself, see `ForecastMod`; empty if none.
            last: format of the node's last reply, None for in full: the forecast is of a job whose
                reply is as long.
            bytes_of: returns the bytes of the arrays of a reply in a format, None for in full.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Format(Messages):
    """One format for all replies, and one for all models that are sent to be trained.

    Example:
        >>> Format(up="int4", down="int8")
        Format(down='int8', stochastic=False, up='int4')
        >>> Format(up="int3")
        Traceback (most recent call last):
        fedstale.errors.ConfigError: strategy.messages.up = 'int3': expected float16|int8|int4|int2
    """

    up: FormatName | None = None
    """Format of replies; None leaves them in full."""

    def __post_init__(self) -> None:
        Messages.__post_init__(self)
        require(self.up in (None, *FORMATS), "messages.up", self.up, _accepted(FORMATS))
        require(
            self.up is not None or self.down is not None,
            *("messages", self, "up or down to be a format (messages=None sends all in full)"),
        )
        self._require_whole("messages.up", self.up)

    def up_of(
        self,
        forecast: Forecast,
        last: FormatName | None,
        bytes_of: Callable[[FormatName | None], int],
    ) -> FormatName | None:
        """Return the format of every reply."""
        del forecast, last, bytes_of
        return self.up


@dataclass(frozen=True, slots=True, kw_only=True)
class ByForecast(Messages):
    """The finest format with which a node's upload is a small share of its job, by its forecast.

    Of the formats from in full to int2, a reply is asked in the first one whose upload takes at
    most `share` of download and training together, by medians of the forecast that the node last
    sent (`ForecastMod`); the upload is taken to grow with the bytes. Where none does, it is int2.

    Example:
        >>> seconds = {"levels": [0.1, 0.5, 0.9], "reporting_s": [5.0, 9.0, 20.0]}
        >>> forecast = seconds | {"total_s": [15.0, 39.0, 80.0]}
        >>> sizes = {None: 400, "float16": 200, "int8": 101, "int4": 50, "int2": 26}
        >>> ByForecast(share=0.15).up_of(forecast, None, sizes.__getitem__)
        'float16'
        >>> ByForecast(share=0.15).up_of(forecast, "int8", sizes.__getitem__)
        'int4'
    """

    share: float = 0.15
    """Longest upload as a share of download and training, > 0."""
    first: FormatName | None = "int8"
    """Format of a node's replies until it has sent a forecast; None for in full."""

    def __post_init__(self) -> None:
        Messages.__post_init__(self)
        require(0 < self.share < inf, "messages.share", self.share, "a number > 0, such as 0.15")
        require(self.first in (None, *FORMATS), "messages.first", self.first, _accepted(FORMATS))
        self._require_whole("messages.first", self.first)

    def up_of(
        self,
        forecast: Forecast,
        last: FormatName | None,
        bytes_of: Callable[[FormatName | None], int],
    ) -> FormatName | None:
        """Return the format of a node's next reply; None for in full."""
        upload_s, total_s = (median_of(forecast, name) for name in ("reporting_s", "total_s"))
        if not 0.0 <= upload_s <= total_s < inf:
            return self.first
        most_s = self.share * (total_s - upload_s)
        offered = WHOLE_NUMBERS if self.stochastic else (None, *FORMATS)
        for form in offered:
            if upload_s * bytes_of(form) / bytes_of(last) <= most_s:
                return form
        return offered[-1]


def _accepted(formats: tuple[FormatName, ...]) -> str:
    return "|".join(formats)
