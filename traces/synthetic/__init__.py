"""Devices made to resemble recorded ones, and in which few numbers both are described."""

from fedstale.traces.synthetic.marginals import LEVELS, availability_marginal
from fedstale.traces.synthetic.population import PRESETS, Population, generate

__all__ = ["LEVELS", "PRESETS", "Population", "availability_marginal", "generate"]
