"""Agents that have learnt nothing, and one in a folder."""

import numpy as np

from fedstale.agents.policy import scorer
from fedstale.agents.policy.features import N_CONTEXT, N_FEATURES
from fedstale.agents.policy.scorer import initial


def untrained(**changes):
    weights = initial(N_FEATURES, N_CONTEXT, np.random.default_rng(0))
    return scorer.Agent(weights={**weights, **changes}, provenance={})


def save(folder, **changes):
    scorer.save(untrained(**changes), folder)
    return folder
