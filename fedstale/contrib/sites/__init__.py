"""Few sites with large models: adapters of different ranks, moments and trainers that stay."""

from fedstale.contrib.sites.adapters import Adapters, at_rank
from fedstale.contrib.sites.moments import keeping_moments
from fedstale.contrib.sites.resident import resident

__all__ = ["Adapters", "at_rank", "keeping_moments", "resident"]
