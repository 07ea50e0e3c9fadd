"""One small network that scores a candidate, the same for every candidate and any number of them.

    score_i = beta r_i + MLP(x_i, c)

with r_i the logarithm of the score of `ExpectedUtility(BALANCED)`, x_i the features of candidate i,
and c the state of the round and mean and spread of all x_i. The last layer starts at zero, so an
untrained scorer draws exactly as that rule does. There
is no maximum and no sum over candidates, so one set of weights serves ten or a million of them.
Scoring takes NumPy alone.

A round is drawn without replacement by exp(score_i / T), one candidate after another
(Plackett-Luce), in training as when deployed: an agent that learnt so relies on it that its picks
vary, and would pick too few devices if the highest scores were taken.

A trained agent is its weights in two files (`fedstale.traces.io.models`). The description also
names the features that the network expects: an agent that was trained on others is rejected in one
sentence.

Reference:
    Zaheer et al. Deep Sets. NeurIPS 2017 (one network for each element, and a pooled context).
    Yellott. The relationship between Luce's choice axiom, Thurstone's theory of comparative
    judgment, and the double exponential distribution. Journal of Mathematical Psychology, 1977
    (such a draw is the order of scores with Gumbel noise).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstale.agents.policy.features import N_CONTEXT, N_FEATURES, SCHEMA, Inputs, Single
from fedstale.errors import ProtocolError
from fedstale.strategies.selection import BALANCED
from fedstale.traces import Mask
from fedstale.traces.io import ModelFiles

Floats = npt.NDArray[np.floating[Any]]
Weights = dict[str, Single]
Score = Callable[[Inputs, Mask, np.random.Generator], Floats]
"""From inputs of m choices of n candidates, their mask (m, n), and a generator of what is left to
chance, to numbers (m, n) of which the largest are picked."""

FILES = ModelFiles(
    what="agent",
    made_by="fedstale agent train",
    version=("format", 1),
    most_bytes=1_000_000,
    error=ProtocolError,
)

TEMPERATURE = BALANCED.temperature
"""Divisor T of the scores when rounds are drawn."""
HIDDEN = 24
"""Width of the two hidden layers."""
POOLED = 8
"""Numbers that the context is reduced to before it meets the candidates."""
SHAPES: Mapping[str, tuple[int, ...]] = {
    "beta": (1,),
    "pool": (N_CONTEXT + 2 * N_FEATURES, POOLED),
    "pool_bias": (POOLED,),
    "context": (POOLED, HIDDEN),
    "candidate": (N_FEATURES, HIDDEN),
    "candidate_bias": (HIDDEN,),
    "hidden": (HIDDEN, HIDDEN),
    "hidden_bias": (HIDDEN,),
    "last": (HIDDEN, 1),
}
"""Name and shape of every weight."""

# As TOML has it.
_SCHEMA = {k: list(v) if isinstance(v, tuple) else v for k, v in SCHEMA.items()}
# Candidates are scored this many at a time, so that the hidden layers stay in the cache.
_CHUNK = 8_192


def initial(rng: np.random.Generator) -> Weights:
    """Return weights that rank as the heuristic does, whatever is drawn for the rest.

    Args:
        rng: of the layers before the last.
    """
    weights: Weights = {}
    for name, shape in SHAPES.items():
        if len(shape) == 2 and name != "last":
            drawn = rng.standard_normal(shape) / np.sqrt(shape[0])
            weights[name] = drawn.astype(np.float32)
        else:
            weights[name] = np.zeros(shape, dtype=np.float32)
    weights["beta"][:] = 1.0
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


# Numbers that go in are finite. A kernel of BLAS may also compute with what lies beside them, and
# raise the flag for that.
@np.errstate(invalid="ignore")
def score(
    weights: Weights,
    features: Floats,
    context: Floats,
    heuristic: Floats,
    mask: Mask | None = None,
) -> Floats:
    """Return the score of every candidate.

    Args:
        weights: of the network.
        features: of the candidates; shape (..., n, f).
        context: of the round; shape (..., g).
        heuristic: logarithm of the score by `BALANCED`; shape (..., n).
        mask: which columns are candidates; shape (..., n); None means all. The scores of the
            others mean nothing.

    Returns:
        Scores; shape (..., n). Rounds are drawn by them, see `drawn`.
    """
    about = np.concatenate([context, pooled(features, mask)], axis=-1)[..., None, :]
    about = np.tanh(about @ weights["pool"] + weights["pool_bias"])
    offset = about @ weights["context"] + weights["candidate_bias"]
    if features.ndim > 2 or features.shape[0] <= _CHUNK:
        learnt = _learnt(weights, features, offset)
    else:
        parts = range(0, features.shape[0], _CHUNK)
        learnt = np.concatenate([_learnt(weights, features[i : i + _CHUNK], offset) for i in parts])
    return weights["beta"] * heuristic + learnt


def _learnt(weights: Weights, features: Floats, offset: Floats) -> Floats:
    hidden = np.maximum(features @ weights["candidate"] + offset, 0.0)
    hidden = np.maximum(hidden @ weights["hidden"] + weights["hidden_bias"], 0.0)
    return (hidden @ weights["last"])[..., 0]


def drawn(scores: Floats, rng: np.random.Generator) -> Floats:
    """Return numbers of which the k largest, in falling order, are a round that is drawn.

    Args:
        scores: of the candidates; any shape.
        rng: of the draw.
    """
    return scores / TEMPERATURE + rng.gumbel(size=scores.shape)


def by_heuristic(given: Inputs, mask: Mask, rng: np.random.Generator) -> Floats:
    """Draw as `ExpectedUtility(BALANCED)` does; a `Score`."""
    del mask
    return drawn(given.heuristic, rng)


def by_agent(weights: Weights) -> Score:
    """Draw by the scores of an agent's weights; a `Score`."""
    return lambda given, mask, rng: drawn(score(weights, *given, mask), rng)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Agent:
    """A trained network, and what it was trained on."""

    weights: Weights
    """See `fedstale.agents.policy.scorer`."""
    provenance: dict[str, Any]
    """Traces, forecaster, settings, seeds and command of its training."""

    @property
    def advice(self) -> str:
        """What to use instead, if its validation shows no gain over the balanced rule; else ""."""
        gain, error = (self.provenance.get(f"validation{end}") for end in ("", "_error"))
        if gain is None or error is None or gain > (half := 1.96 * error):
            return ""
        told = f"{gain:+.2f} [{gain - half:+.2f}, {gain + half:+.2f}] in reward in validation"
        return f"no better than the rule, with {told}: use selector=ExpectedUtility(BALANCED)"

    def _facts(self) -> dict[str, object]:
        n = sum(array.size for array in self.weights.values())
        return {"parameters": n, "digest": digest(self.weights)[:12], "schema": SCHEMA["version"]}

    def __repr__(self) -> str:
        return f"Agent({', '.join(f'{k}={v!r}' for k, v in self._facts().items())})"

    def _repr_html_(self) -> str:
        """Return the agent and its training, as notebooks show them."""
        import pandas as pd  # noqa: PLC0415 - a server that runs an agent needs none

        return pd.Series({**self._facts(), **self.provenance}).to_frame().to_html(header=False)


def save(agent: Agent, folder: str | Path) -> None:
    """Write agent.safetensors and agent.toml, the description last.

    Args:
        agent: a trained one.
        folder: made if it is missing.
    """
    about = {
        "parameters": sum(v.size for v in agent.weights.values()),
        "schema": _SCHEMA,
        "provenance": agent.provenance,
    }
    FILES.write(folder, agent.weights, about)


def embedded() -> Path:
    """Return the folder of the agent that comes with fedstale; agent.toml says how it was made."""
    return Path(__file__).parent


def load(folder: str | Path) -> Agent:
    """Return the agent in a folder.

    Raises:
        ProtocolError: there is none, or it is of another version, expects other features, or was
            altered or cut short.
    """
    folder = Path(folder)
    about = FILES.describe(folder)
    schema = about.get("schema")
    for name, expected in _SCHEMA.items():
        found = schema.get(name) if isinstance(schema, dict) else None
        if found != expected:
            raise ProtocolError(
                f"{folder / FILES.toml}: schema.{name} {_difference(found, expected)}; train the "
                "agent again with this version of fedstale"
            )
    provenance = about.get("provenance")
    return Agent(
        weights=_weights(folder, about),
        provenance=provenance if isinstance(provenance, dict) else {},
    )


def digest(weights: Weights) -> str:
    """Return the SHA-256 of weights, in hex: of name, shape and bytes of each, in name order."""
    found = sha256()
    for name in sorted(weights):
        array = np.ascontiguousarray(weights[name])
        found.update(f"{name} {array.shape} {array.dtype.str}\n".encode() + array.tobytes())
    return found.hexdigest()


def _difference(found: object, expected: object) -> str:
    if isinstance(found, list) and isinstance(expected, list):
        changed = sorted(set(map(str, found)) ^ set(expected))
        return f"differ in {', '.join(changed)}" if changed else "are in another order"
    return f"= {found!r}, expected {expected!r}"


def _weights(folder: Path, about: dict[str, Any]) -> Weights:
    weights: Weights = FILES.arrays(folder, about)
    found = {name: array.shape for name, array in weights.items()}
    if found != SHAPES:
        raise ProtocolError(f"{folder / FILES.safetensors}: holds {found}, expected {SHAPES}")
    for name, array in weights.items():
        if array.dtype != np.float32:
            raise ProtocolError(f"{folder / FILES.safetensors}: {name} holds no 32-bit numbers")
    return weights
