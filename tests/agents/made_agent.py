"""An agent that has learnt nothing, in a folder."""

import numpy as np

from fedstale.agents.policy import files as export
from fedstale.agents.policy.features import N_CONTEXT, N_FEATURES
from fedstale.agents.policy.scorer import initial


def save(folder, **changes):
    weights = initial(N_FEATURES, N_CONTEXT, np.random.default_rng(0))
    export.save(export.Agent(weights={**weights, **changes}, provenance={}), folder)
    return folder
