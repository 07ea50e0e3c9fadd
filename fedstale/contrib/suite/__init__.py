"""Scenarios that never change, one rule of judging, and the scores of standing methods."""

from typing import TYPE_CHECKING

from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.contrib.suite.judging import judge, standing, table
    from fedstale.contrib.suite.scenarios import Scenario, Setting
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = ["Scenario", "Setting", "judge", "standing", "table"]
