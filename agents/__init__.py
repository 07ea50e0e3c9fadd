"""Learnt client selection: environments on real traces, the policy, its training and evaluation.

The Gymnasium and Stable-Baselines3 environments are imported on first use, so that a server that
runs a trained agent needs neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fedstale.agents.env.episodes import Episodes, EpisodeSettings, JobKinds
from fedstale.agents.env.learning_proxy import LearningProxy
from fedstale.agents.env.scenario import Scenario, Scenarios, cross_fitted
from fedstale.agents.env.simulator import Reward, Simulator
from fedstale.agents.env.worlds import Worlds
from fedstale.agents.evaluation import Contender, Evaluation, contenders, evaluate, faults
from fedstale.agents.policy import Agent, AgentSelector, Choice, Shadow, load, save
from fedstale.agents.training import Training, TrainingProgress, train
from fedstale.agents.world_evaluation import WorldEvaluation, evaluate_worlds

if TYPE_CHECKING:
    from fedstale.agents.env.gym_env import SelectionEnv, VectorSelectionEnv

__all__ = [
    "Agent",
    "AgentSelector",
    "Choice",
    "Contender",
    "EpisodeSettings",
    "Episodes",
    "Evaluation",
    "JobKinds",
    "LearningProxy",
    "Reward",
    "Scenario",
    "Scenarios",
    "SelectionEnv",
    "Shadow",
    "Simulator",
    "Training",
    "TrainingProgress",
    "VectorSelectionEnv",
    "WorldEvaluation",
    "Worlds",
    "contenders",
    "cross_fitted",
    "evaluate",
    "evaluate_worlds",
    "faults",
    "load",
    "save",
    "train",
]


def __getattr__(name: str) -> object:
    """Import an environment on first use."""
    if name not in {"SelectionEnv", "VectorSelectionEnv"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("fedstale.agents.env.gym_env"), name)
