"""The environment that agents are trained in: scenarios, episodes, and the Gymnasium interface."""

from typing import TYPE_CHECKING

from fedstale.agents.env.episodes import Episodes, EpisodeSettings, JobKinds
from fedstale.agents.env.learning_proxy import CONSTANTS, LearningProxy
from fedstale.agents.env.scenario import (
    Scenario,
    Scenarios,
    as_scenarios,
    cross_fitted,
    online_share,
)
from fedstale.agents.env.simulator import Reward, RoundOutcome, Simulator
from fedstale.agents.env.windows import (
    TERMS,
    Action,
    Policy,
    Rollout,
    WindowList,
    picks_of,
    rollout,
    training_picks_of,
)
from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.agents.env.gym_env import SelectionEnv, VectorSelectionEnv
    from fedstale.agents.env.stable_baselines import SB3VecEnv
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = [
    "CONSTANTS",
    "TERMS",
    "Action",
    "EpisodeSettings",
    "Episodes",
    "JobKinds",
    "LearningProxy",
    "Policy",
    "Reward",
    "Rollout",
    "RoundOutcome",
    "SB3VecEnv",
    "Scenario",
    "Scenarios",
    "SelectionEnv",
    "Simulator",
    "VectorSelectionEnv",
    "WindowList",
    "as_scenarios",
    "cross_fitted",
    "online_share",
    "picks_of",
    "rollout",
    "training_picks_of",
]
