"""Settings of a run searched on virtual time, and judged on held-out seeds and devices."""

from typing import TYPE_CHECKING

from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.contrib.tuning.outcome import BEST, HELD_OUT, Tuning, tune
    from fedstale.contrib.tuning.search import Trial
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = ["BEST", "HELD_OUT", "Trial", "Tuning", "tune"]
