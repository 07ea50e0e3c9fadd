"""Federated learning on Flower for devices that go offline, slow down and report late."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedstale.api import audit, compare, read_run, simulate
    from fedstale.comparison.analysis import Comparison
    from fedstale.comparison.plan import Plan
    from fedstale.reports.forecast_audit import ForecastAudit
    from fedstale.reports.run import Run
    from fedstale.tuning.outcome import Tuning, tune
    from fedstale.verification import Verification, verify

__all__ = [
    "Comparison",
    "ForecastAudit",
    "Plan",
    "Run",
    "Tuning",
    "Verification",
    "audit",
    "compare",
    "read_run",
    "simulate",
    "tune",
    "verify",
]
__version__ = "0.1.0"

_PLACES = {
    "Comparison": "fedstale.comparison.analysis",
    "ForecastAudit": "fedstale.reports.forecast_audit",
    "Plan": "fedstale.comparison.plan",
    "Run": "fedstale.reports.run",
    "Tuning": "fedstale.tuning.outcome",
    "Verification": "fedstale.verification",
    "tune": "fedstale.tuning.outcome",
    "verify": "fedstale.verification",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever has the name
    """Import a public name when it is first used.

    Nothing may be imported before: importing fedstale.traces runs this file, and a device that only
    records and forecasts has neither flwr nor stable-baselines3.
    """
    if name not in __all__:
        raise AttributeError(f"module 'fedstale' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - nothing is imported eagerly

    return getattr(import_module(_PLACES.get(name, "fedstale.api")), name)
