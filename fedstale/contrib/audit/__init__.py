"""Whether devices keep what they state of themselves, and a server what it has recorded."""

from typing import TYPE_CHECKING

from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.contrib.audit.forecasts import ForecastAudit, audited
    from fedstale.contrib.audit.record import AuditRecord
    from fedstale.contrib.audit.selectors import Credits, Probing
    from fedstale.contrib.audit.verdict import Verification, verify
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = [
    "AuditRecord",
    "Credits",
    "ForecastAudit",
    "Probing",
    "Verification",
    "audited",
    "verify",
]
