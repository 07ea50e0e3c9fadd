"""Real devices: a small deployment on one machine, and what to check before there are many.

SuperLink, SuperNodes and runs are Flower's own processes; see docs/deploy.md for the same by hand.
"""

from typing import TYPE_CHECKING

from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.deployment.check import check_app, check_superlink
    from fedstale.deployment.commands import Address
    from fedstale.deployment.control import Control, operators_side, run_streamed, superlinks
    from fedstale.deployment.diagnosis import show_certificate
    from fedstale.deployment.doors import SOCKET, Doors, probe, write_server
    from fedstale.deployment.local import LocalDeployment, run_app
    from fedstale.deployment.run_folder import JobLog, recorded, written_at_end
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = [
    "SOCKET",
    "Address",
    "Control",
    "Doors",
    "JobLog",
    "LocalDeployment",
    "check_app",
    "check_superlink",
    "operators_side",
    "probe",
    "recorded",
    "run_app",
    "run_streamed",
    "show_certificate",
    "superlinks",
    "write_server",
    "written_at_end",
]
