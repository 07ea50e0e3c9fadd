"""Agents that have learnt nothing, and one in a folder."""

import numpy as np

from fedstale.agents.policy import scorer
from fedstale.agents.policy.scorer import initial


def untrained(**changes):
    weights = initial(np.random.default_rng(0))
    return scorer.Agent(weights={**weights, **changes}, provenance={})


def save(folder, **changes):
    scorer.save(untrained(**changes), folder)
    return folder
