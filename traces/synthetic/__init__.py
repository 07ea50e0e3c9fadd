"""Devices made to resemble recorded ones: the population, what is drawn from it, and its fit."""

from typing import TYPE_CHECKING

from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.traces.synthetic.fit import LEVELS, availability_marginal
    from fedstale.traces.synthetic.population import PRESETS, Population, generate
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = [
    "LEVELS",
    "PRESETS",
    "Population",
    "availability_marginal",
    "generate",
]
