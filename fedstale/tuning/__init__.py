"""Settings of a run searched on virtual time, and judged on held-out seeds and devices."""

from fedstale.tuning.outcome import BEST, PAGE, Tuning, tune
from fedstale.tuning.trials import Trial

__all__ = ["BEST", "PAGE", "Trial", "Tuning", "tune"]
