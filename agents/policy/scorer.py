"""One small network that scores a candidate, the same for every candidate and any number of them.

    score_i = beta log(p_finish_i x utility_i) + MLP(x_i, c)

with x_i the features of candidate i, and c the state of the round and mean and spread of all x_i.
The last layer starts at zero, so an untrained scorer ranks exactly as `ExpectedUtility` does. There
is no maximum and no sum over candidates, so one set of weights serves ten or a million of them.
Scoring takes NumPy alone.

Reference:
    Zaheer et al. Deep Sets. NeurIPS 2017 (one network for each element, and a pooled context).
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstale.traces.arrays import Index

Floats = npt.NDArray[np.floating[Any]]
Mask = npt.NDArray[np.bool_]
Single = npt.NDArray[np.float32]
Weights = dict[str, Single]
Score = Callable[[Index, Single, Single, Single, Mask], Floats]
"""From rows (m,), features (m, n, f), context (m, g), heuristic (m, n) and mask (m, n) to scores
(m, n); rows are the positions of the episodes."""

HIDDEN = 24
"""Width of the two hidden layers."""
POOLED = 8
"""Numbers that the context is reduced to before it meets the candidates."""

# Candidates are scored this many at a time, so that the hidden layers stay in the cache.
_CHUNK = 8_192


def shapes(n_features: int, n_context: int) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every weight, in the order of the flat vector.

    Example:
        >>> sum(int(np.prod(shape)) for shape in shapes(20, 6).values())
        1697
    """
    return {
        "beta": (1,),
        "pool": (n_context + 2 * n_features, POOLED),
        "pool_bias": (POOLED,),
        "context": (POOLED, HIDDEN),
        "candidate": (n_features, HIDDEN),
        "candidate_bias": (HIDDEN,),
        "hidden": (HIDDEN, HIDDEN),
        "hidden_bias": (HIDDEN,),
        "last": (HIDDEN, 1),
    }


def initial(n_features: int, n_context: int, rng: np.random.Generator) -> Weights:
    """Return weights that rank as the heuristic does, whatever is drawn for the rest.

    Args:
        n_features: features of a candidate.
        n_context: features of a round.
        rng: of the layers before the last.
    """
    weights: Weights = {}
    for name, shape in shapes(n_features, n_context).items():
        if len(shape) == 2 and name != "last":
            drawn = rng.standard_normal(shape) / np.sqrt(shape[0])
            weights[name] = drawn.astype(np.float32)
        else:
            weights[name] = np.zeros(shape, dtype=np.float32)
    weights["beta"][:] = 1.0
    return weights


def sizes(weights: Mapping[str, npt.NDArray[Any]]) -> tuple[int, int]:
    """Return the number of features of a candidate and of a round that weights are for."""
    n_features = weights["candidate"].shape[-2]
    return n_features, weights["pool"].shape[-2] - 2 * n_features


def flat(weights: Weights) -> Single:
    """Return all weights in one vector."""
    return np.concatenate([weights[name].ravel() for name in shapes(*sizes(weights))])


def unflat(vectors: Floats, n_features: int, n_context: int) -> Weights:
    """Return the weights that vectors hold.

    Args:
        vectors: one vector of all weights, or many; shape (..., number of weights).
        n_features: features of a candidate.
        n_context: features of a round.

    Returns:
        Arrays whose leading axes are those of `vectors`.
    """
    weights: Weights = {}
    at = 0
    for name, shape in shapes(n_features, n_context).items():
        size = int(np.prod(shape))
        part = vectors[..., at : at + size]
        weights[name] = part.reshape(*vectors.shape[:-1], *shape).astype(np.float32)
        at += size
    return weights


def pooled(features: Floats, mask: Mask | None = None) -> Floats:
    """Return mean and standard deviation of each feature over the candidates.

    Args:
        features: shape (..., n, f).
        mask: which columns are candidates; shape (..., n); None means all.

    Returns:
        Shape (..., 2 f); zeros without candidates.
    """
    n = features.shape[-2]
    here = np.ones((1, n), features.dtype) if mask is None else mask[..., None, :]
    here = here.astype(features.dtype, copy=False)
    count = np.maximum(here.sum(axis=-1, dtype=np.float64), 1.0)
    mean = np.zeros((*features.shape[:-2], features.shape[-1]))
    square = np.zeros_like(mean)
    # Sums in 32 bits are exact enough for a chunk, not for a million candidates.
    for start in range(0, n, _CHUNK):
        part, weight = features[..., start : start + _CHUNK, :], here[..., start : start + _CHUNK]
        mean += (weight @ part)[..., 0, :]
        square += (weight @ np.square(part))[..., 0, :]
    mean /= count
    square /= count
    spread = np.sqrt(np.maximum(square - np.square(mean), 0.0))
    return np.concatenate([mean, spread], axis=-1).astype(np.float32)


def score(
    weights: Weights,
    features: Floats,
    context: Floats,
    heuristic: Floats,
    mask: Mask | None = None,
) -> Floats:
    """Return the score of every candidate.

    Args:
        weights: of the network; leading axes, if any, must broadcast with those of the rest.
        features: of the candidates; shape (..., n, f).
        context: of the round; shape (..., g).
        heuristic: log(p_finish x utility) of the candidates; shape (..., n).
        mask: which columns are candidates; shape (..., n); None means all. The scores of the
            others mean nothing.

    Returns:
        Scores; shape (..., n). The highest are to be picked.
    """
    about = np.concatenate([context, pooled(features, mask)], axis=-1)[..., None, :]
    about = np.tanh(about @ weights["pool"] + _row(weights["pool_bias"]))
    offset = about @ weights["context"] + _row(weights["candidate_bias"])
    if features.ndim > 2 or features.shape[0] <= _CHUNK:
        learnt = _learnt(weights, features, offset)
    else:
        parts = range(0, features.shape[0], _CHUNK)
        learnt = np.concatenate([_learnt(weights, features[i : i + _CHUNK], offset) for i in parts])
    return weights["beta"] * heuristic + learnt


def _learnt(weights: Weights, features: Floats, offset: Floats) -> Floats:
    hidden = np.maximum(features @ weights["candidate"] + offset, 0.0)
    hidden = np.maximum(hidden @ weights["hidden"] + _row(weights["hidden_bias"]), 0.0)
    return (hidden @ weights["last"])[..., 0]


def _row(bias: Floats) -> Floats:
    return bias[..., None, :]


def by_heuristic(
    rows: Index, features: Single, context: Single, heuristic: Single, mask: Mask
) -> Floats:
    """Return the heuristic's scores, which pick as `ExpectedUtility` does; a `Score`."""
    del rows, features, context, mask
    return heuristic


def by_agent(weights: Weights) -> Score:
    """Return the scores of one agent."""

    def scores(
        rows: Index, features: Single, context: Single, heuristic: Single, mask: Mask
    ) -> Floats:
        del rows
        return score(weights, features, context, heuristic, mask)

    return scores


def by_population(vectors: Floats, each: int) -> Score:
    """Return the scores of many agents, each of which plays some episodes in a row.

    Args:
        vectors: flat weights of the agents; shape (agents, d).
        each: episodes of an agent.
    """

    def scores(
        rows: Index, features: Single, context: Single, heuristic: Single, mask: Mask
    ) -> Floats:
        weights = unflat(vectors[rows // each], features.shape[-1], context.shape[-1])
        return score(weights, features, context, heuristic, mask)

    return scores
