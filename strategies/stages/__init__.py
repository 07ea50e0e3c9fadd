"""What happens to messages, replies and steps of a run besides merging, each in one stage."""

from fedstale.strategies.stages.base import Pick, Requirement, SharedContent, Stage, StageRun
from fedstale.strategies.stages.compatibility import (
    Compatibility,
    fault_of_releases,
    state_release,
    stated_release,
)
from fedstale.strategies.stages.compression import Compression
from fedstale.strategies.stages.forecast_request import JOB_RECORD, QUERY, STATED, ForecastRequest
from fedstale.strategies.stages.local_work import (
    WORK,
    LocalWork,
    StepsDone,
    asked_share,
    is_asked,
    steps_of,
)
from fedstale.strategies.stages.older_clients import OlderClients
from fedstale.strategies.stages.privacy import Privacy

__all__ = [
    "JOB_RECORD",
    "QUERY",
    "STATED",
    "WORK",
    "Compatibility",
    "Compression",
    "ForecastRequest",
    "LocalWork",
    "OlderClients",
    "Pick",
    "Privacy",
    "Requirement",
    "SharedContent",
    "Stage",
    "StageRun",
    "StepsDone",
    "asked_share",
    "fault_of_releases",
    "is_asked",
    "state_release",
    "stated_release",
    "steps_of",
]
