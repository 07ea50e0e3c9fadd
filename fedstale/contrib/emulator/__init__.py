"""Hours, device-hours, waste and staleness of a run, told in milliseconds without running it."""

from typing import TYPE_CHECKING

from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.contrib.emulator.emulator import Estimate, estimate
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = ["Estimate", "estimate"]
