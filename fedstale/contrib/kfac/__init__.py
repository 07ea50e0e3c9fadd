"""Models merged by the Kronecker-factored curvature of their linear layers."""

from typing import TYPE_CHECKING

from fedstale.contrib.kfac.merge import KroneckerMean
from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.contrib.kfac.factors import kronecker_factors
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = ["KroneckerMean", "kronecker_factors"]
