"""Learnt client selection: environments on real traces, the policy, its training and evaluation.

The Gymnasium and Stable-Baselines3 environments are imported on first use, so that a server that
runs a trained agent needs neither.
"""

from typing import TYPE_CHECKING

from fedstale.agents.env import (
    Episodes,
    EpisodeSettings,
    JobKinds,
    LearningProxy,
    Reward,
    Scenario,
    Scenarios,
    Simulator,
    cross_fitted,
)
from fedstale.agents.evaluation import Contender, Evaluation, contenders, evaluate
from fedstale.agents.policy import Agent, AgentPace, AgentSelector, load, observation, save
from fedstale.agents.training import Training, TrainingProgress, train
from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.agents.env import SB3VecEnv, SelectionEnv, VectorSelectionEnv
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = [
    "Agent",
    "AgentPace",
    "AgentSelector",
    "Contender",
    "EpisodeSettings",
    "Episodes",
    "Evaluation",
    "JobKinds",
    "LearningProxy",
    "Reward",
    "SB3VecEnv",
    "Scenario",
    "Scenarios",
    "SelectionEnv",
    "Simulator",
    "Training",
    "TrainingProgress",
    "VectorSelectionEnv",
    "contenders",
    "cross_fitted",
    "evaluate",
    "load",
    "observation",
    "save",
    "train",
]
