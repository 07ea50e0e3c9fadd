"""A trained agent on disk; see `fedstale.traces.io.models`.

The description also names the features that the network expects: an agent that was trained on
others is rejected in one sentence.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedstale.agents.policy.features import N_CONTEXT, N_FEATURES, SCHEMA
from fedstale.agents.policy.scorer import Weights, shapes
from fedstale.errors import ProtocolError
from fedstale.traces.io.models import ModelFiles

FILES = ModelFiles(
    what="agent",
    made_by="fedstale train-agent",
    version=("format", 1),
    most_bytes=1_000_000,
    error=ProtocolError,
)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Agent:
    """A trained network, and what it was trained on."""

    weights: Weights
    """See `fedstale.agents.policy.scorer`."""
    provenance: dict[str, Any]
    """Traces, forecaster, algorithm, seeds and command of its training."""


def save(agent: Agent, folder: str | Path) -> None:
    """Write agent.safetensors and agent.toml, the description last.

    Args:
        agent: a trained one.
        folder: made if it is missing.
    """
    about = {
        "parameters": sum(v.size for v in agent.weights.values()),
        "schema": _plain_schema(),
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
    for name, expected in _plain_schema().items():
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


def _plain_schema() -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in SCHEMA.items()}


def _difference(found: object, expected: object) -> str:
    if isinstance(found, list) and isinstance(expected, list):
        changed = sorted(set(map(str, found)) ^ set(expected))
        return f"differ in {', '.join(changed)}" if changed else "are in another order"
    return f"= {found!r}, expected {expected!r}"


def _weights(folder: Path, about: dict[str, Any]) -> Weights:
    weights: Weights = FILES.arrays(folder, about)
    expected = shapes(N_FEATURES, N_CONTEXT)
    found = {name: array.shape for name, array in weights.items()}
    if found != expected:
        raise ProtocolError(f"{folder / FILES.safetensors}: holds {found}, expected {expected}")
    for name, array in weights.items():
        if array.dtype != np.float32:
            raise ProtocolError(f"{folder / FILES.safetensors}: {name} holds no 32-bit numbers")
    return weights
