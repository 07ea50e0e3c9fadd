"""The trace format as a public thing: validated, written as others read it, and measured."""

from typing import TYPE_CHECKING

from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.contrib.formats.exports import export
    from fedstale.contrib.formats.measures import unevenness
    from fedstale.contrib.formats.validation import faults
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = ["export", "faults", "unevenness"]
