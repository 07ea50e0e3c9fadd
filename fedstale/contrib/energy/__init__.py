"""What the jobs of a run took in joules, and the grams of CO2 that came of it."""

from typing import TYPE_CHECKING

from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.contrib.energy.account import Accounts, accounts
    from fedstale.contrib.energy.carbon import Intensity, with_carbon
    from fedstale.contrib.energy.power import Fleet, Power, with_energy
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = [
    "Accounts",
    "Fleet",
    "Intensity",
    "Power",
    "accounts",
    "with_carbon",
    "with_energy",
]
