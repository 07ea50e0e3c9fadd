"""The trace format as a public thing: how uneven devices are, by figures that papers compare."""

from typing import TYPE_CHECKING

from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.contrib.formats.measures import unevenness
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = ["unevenness"]
