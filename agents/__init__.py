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
from fedstale.agents.evaluation import Contender, Evaluation, contenders, evaluate, faults
from fedstale.agents.policy.files import Agent, load, save
from fedstale.agents.policy.selector import AgentSelector
from fedstale.agents.policy.shadow import Choice, Shadow
from fedstale.agents.training.base import Training
from fedstale.agents.training.train import TrainingProgress, train

if TYPE_CHECKING:
    from fedstale.agents.env.gym_env import SelectionEnv
    from fedstale.agents.env.vector_env import VectorSelectionEnv

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
    "contenders",
    "cross_fitted",
    "evaluate",
    "faults",
    "load",
    "save",
    "train",
]

_LAZY = {"SelectionEnv": "gym_env", "VectorSelectionEnv": "vector_env"}


def __getattr__(name: str) -> object:
    """Import an environment on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"fedstale.agents.env.{_LAZY[name]}"), name)
