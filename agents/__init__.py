"""Whom to pick: selection of devices that is learnt on traces."""

from fedstale.agents.env.episodes import Episodes, EpisodeSettings, JobKinds
from fedstale.agents.env.learning_proxy import Proxy
from fedstale.agents.env.scenario import Stage, Stages, cross_fitted, stages
from fedstale.agents.env.simulator import Reward, World
from fedstale.agents.policy.selector import AgentSelector
from fedstale.agents.policy.shadow import Choice, Shadow

__all__ = [
    "AgentSelector",
    "Choice",
    "EpisodeSettings",
    "Episodes",
    "JobKinds",
    "Proxy",
    "Reward",
    "Shadow",
    "Stage",
    "Stages",
    "World",
    "cross_fitted",
    "stages",
]
