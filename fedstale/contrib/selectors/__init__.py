"""Selectors by what nodes say they are; and those and networks of others' papers."""

from typing import TYPE_CHECKING

from fedstale.contrib.selectors.pisces import PISCES
from fedstale.contrib.selectors.properties import Filtered, Quota
from fedstale.contrib.selectors.tifl import TiFL
from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.contrib.selectors.deep_sets import SetExtractor, set_policy
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = ["PISCES", "Filtered", "Quota", "SetExtractor", "TiFL", "set_policy"]
