"""Models merged, and steps preconditioned, by Kronecker-factored curvature of linear layers."""

from typing import TYPE_CHECKING

from fedstale.contrib.kfac.merge import KroneckerMean, SharedInverses
from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.contrib.kfac.factors import Preconditioner, exchange_inverses, kronecker_factors
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = [
    "KroneckerMean",
    "Preconditioner",
    "SharedInverses",
    "exchange_inverses",
    "kronecker_factors",
]
