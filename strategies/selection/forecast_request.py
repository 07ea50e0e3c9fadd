"""Forecast requests: nodes are asked how their next job would go before any is chosen.

A forecast that came with a node's last reply may be hours old, and a node that was never sent a job
has made none. A query is a message without a model: small, quick, and answered by the device from
its own history (`fedstale.client.ForecastMod`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from fedstale.strategies.types import Floats, require, require_count

QUERY = "query.forecast"
"""Type of the messages that request a forecast."""
JOB_RECORD = "fedstale.job"
"""Name of the ConfigRecord that says which job to forecast."""
STATED = ("work", "download_bytes", "upload_bytes", "deadline_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastRequest:
    """Which nodes to ask for a forecast, and how long to wait for the answers.

    Example:
        >>> ForecastRequest(job={"work": 300.0, "deadline_s": 1800.0}).wait_s
        30.0
    """

    job: Mapping[str, float] = field(default_factory=dict)
    """What the server knows of its next jobs: any of work (units), download_bytes, upload_bytes
    and deadline_s. What is left out is as in the device's last training."""
    older_than_s: float = 300.0
    """Age in s of a forecast from which on its node is asked again, > 0."""
    wait_s: float = 30.0
    """Longest wait in s for the answers before nodes are chosen; later answers do not count."""
    most: int = 1000
    """Nodes asked at a time; of more, those whose forecast is oldest."""

    def __post_init__(self) -> None:
        for name, value in self.job.items():
            accepted = f"a number >= 0 under one of {', '.join(STATED)}"
            require(name in STATED and value >= 0, f"forecast_request.job.{name}", value, accepted)
        oldest, wait_s = self.older_than_s, self.wait_s
        require(oldest > 0, "forecast_request.older_than_s", oldest, "seconds > 0")
        require(0 < wait_s < inf, "forecast_request.wait_s", wait_s, "seconds > 0")
        require_count("forecast_request.most", self.most)

    def content(self) -> RecordDict:
        """Return the content of a query."""
        return RecordDict({JOB_RECORD: ConfigRecord({k: float(v) for k, v in self.job.items()})})

    def due(self, nodes: Sequence[int], heard_at: Floats, now: float) -> list[int]:
        """Return the nodes to ask now.

        Args:
            nodes: those that may be asked, n.
            heard_at: instants of their last forecasts, or of the last requests, in s; NaN for
                never; shape (n,).
            now: the instant in s.
        """
        age = np.where(np.isnan(heard_at), inf, now - heard_at)
        order = np.argsort(-age, kind="stable")[: self.most]
        return [nodes[i] for i in order if age[i] >= self.older_than_s]
