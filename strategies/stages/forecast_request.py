"""Forecast requests: nodes are asked how their next job would go before any is chosen.

A forecast that came with a node's last reply may be hours old, and a node that was never sent a job
has made none. A query is a message without a model: small, quick, and answered by the device from
its own history (`fedstale.client.ForecastMod`).
"""

from collections.abc import Mapping, Sequence
from math import inf, nan

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from fedstale.strategies.stages.base import Stage
from fedstale.strategies.types import (
    Candidates,
    ClientUpdate,
    Count,
    Job,
    Model,
    NotNegative,
    Positive,
    Seconds,
    require,
)

QUERY = "query.forecast"
"""Type of the messages that request a forecast."""
JOB_RECORD = "fedstale.job"
"""Name of the ConfigRecord that says which job to forecast."""
STATED = ("work", "download_bytes", "upload_bytes", "deadline_s")


class ForecastRequest(Stage):
    """Asks nodes for a forecast, and lets the selector wait for the answers.

    Without it a selector sees the forecasts that came with replies.

    Args:
        job: what the server knows of its next jobs: any of work (units), download_bytes,
            upload_bytes and deadline_s. What is left out is as in the device's last training.
        older_than_s: age in s of a forecast from which on its node is asked again, > 0.
        wait_s: longest wait in s for the answers before nodes are chosen; later answers do not
            count.
        most: nodes asked at a time; of more, those whose forecast is oldest.

    Example:
        >>> ForecastRequest(job={"work": 300.0, "deadline_s": 1800.0}).wait_s
        30.0
    """

    requires = frozenset({"start"})
    saved = ("requested_at",)
    query = QUERY

    def __init__(
        self,
        *,
        job: Mapping[str, NotNegative] | None = None,
        older_than_s: Seconds = 300.0,
        wait_s: Positive = 30.0,
        most: Count = 1000,
    ) -> None:
        self.job, self.older_than_s, self.wait_s, self.most = job or {}, older_than_s, wait_s, most
        self.requested_at: dict[int, float] = {}
        self._is_answered = False
        is_known = self.job.keys() <= set(STATED)
        accepted = f"numbers >= 0 under {', '.join(STATED)}"
        require(is_known, "ForecastRequest.job", self.job, accepted)

    def queries(self, candidates: Candidates, now: float) -> list[int]:
        """Return the candidates whose forecast is too old, the oldest first."""
        nodes = candidates.node_ids.tolist()
        requested_at = [self.requested_at.get(node, nan) for node in nodes]
        heard_at = np.fmax(candidates.forecast_at, requested_at)
        age = np.where(np.isnan(heard_at), inf, now - heard_at)
        order = np.argsort(-age, kind="stable")[: self.most]
        due = [nodes[i] for i in order if age[i] >= self.older_than_s]
        self.requested_at.update(dict.fromkeys(due, now))
        return due

    def step(self, mean: Model, updates: Sequence[ClientUpdate]) -> Mapping[str, float]:
        """Hint at a mod that no ClientApp has."""
        forecasts = map(self._run.history.forecast_of, self.requested_at)
        self._is_answered = self._is_answered or any(forecasts)
        if not self._is_answered:
            self._run.hint(
                "ForecastRequest: no device sends a forecast: make the ClientApp by "
                "ForecastMod().client_app(), or leave the stage out"
            )
        return {}

    def outgoing(self, job: Job, content: RecordDict) -> RecordDict:
        """Say in a query which job to forecast."""
        if job.purpose == "query":
            about = ConfigRecord({name: float(value) for name, value in self.job.items()})
            content = RecordDict({**content, JOB_RECORD: about})
        return content
