"""A trained agent on disk: weights in safetensors, everything a person would ask in TOML.

Nothing in the two files can run code. The TOML names the features that the network expects, the
checksum of the weights and where they came from. A file of another version or of other features,
altered or cut short, is refused in one sentence.
"""

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import tomli_w

from fedstale.agents.features import N_CONTEXT, N_FEATURES, SCHEMA
from fedstale.agents.scorer import Weights, shapes
from fedstale.errors import ProtocolError

FORMAT = 1
"""Version of the two files; grows when an old reader would misread a new one."""
_TOML, _ARRAYS = "agent.toml", "agent.safetensors"
_MOST_BYTES = 1_000_000


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Agent:
    """A trained network, and what it was trained on."""

    weights: Weights
    """See `fedstale.agents.scorer`."""
    provenance: dict[str, Any]
    """Traces, forecaster, algorithm, seeds and command of its training."""


def save(agent: Agent, folder: str | Path) -> None:
    """Write agent.safetensors and agent.toml, the description last.

    Args:
        agent: a trained one.
        folder: made if it is missing.
    """
    folder = Path(folder)
    data = safetensors.numpy.save({k: np.ascontiguousarray(v) for k, v in agent.weights.items()})
    about = {
        "format": FORMAT,
        "sha256": hashlib.sha256(data).hexdigest(),
        "parameters": sum(v.size for v in agent.weights.values()),
        "schema": _plain_schema(),
        "provenance": agent.provenance,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in ((_ARRAYS, data), (_TOML, tomli_w.dumps(about).encode())):
        beside = folder / f"{name}.new"
        beside.write_bytes(content)
        beside.replace(folder / name)


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
    about = describe(folder)
    said = about.get("schema")
    for name, expected in _plain_schema().items():
        found = said.get(name) if isinstance(said, dict) else None
        if found != expected:
            raise ProtocolError(
                f"{folder / _TOML}: schema.{name} {_difference(found, expected)}; train the agent "
                "again with this version of fedstale"
            )
    provenance = about.get("provenance")
    return Agent(
        weights=_weights(folder / _ARRAYS, about.get("sha256")),
        provenance=provenance if isinstance(provenance, dict) else {},
    )


def describe(folder: str | Path) -> dict[str, Any]:
    """Return what agent.toml says.

    Raises:
        ProtocolError: it is missing, or is no description of this version.
    """
    path = Path(folder) / _TOML
    try:
        about = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ProtocolError(
            f"{folder}: no {_TOML} there: expected a folder that `fedstale train-agent` wrote"
        ) from None
    except (OSError, ValueError, RecursionError) as problem:
        raise ProtocolError(f"{path}: cannot be read ({problem})") from None
    if about.get("format") != FORMAT:
        raise ProtocolError(
            f"{path}: format = {about.get('format')!r}, expected {FORMAT}; train the agent again "
            "with this version of fedstale"
        )
    return about


def _plain_schema() -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in SCHEMA.items()}


def _difference(said: object, expected: object) -> str:
    if isinstance(said, list) and isinstance(expected, list):
        changed = sorted(set(map(str, said)) ^ set(expected))
        return f"differ in {', '.join(changed)}" if changed else "are in another order"
    return f"= {said!r}, expected {expected!r}"


def _weights(path: Path, checksum: object) -> Weights:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ProtocolError(f"{path}: larger than {_MOST_BYTES} bytes, no agent is")
        data = path.read_bytes()
    except OSError as problem:
        raise ProtocolError(f"{path}: cannot be read ({problem.strerror})") from None
    if hashlib.sha256(data).hexdigest() != checksum:
        raise ProtocolError(
            f"{path}: altered or cut short, its SHA-256 is not the one in {_TOML}; copy both files "
            "again"
        )
    try:
        weights: Weights = safetensors.numpy.load(data)
    except safetensors.SafetensorError as problem:
        raise ProtocolError(f"{path}: not a safetensors file ({problem})") from None
    expected = shapes(N_FEATURES, N_CONTEXT)
    found = {name: array.shape for name, array in weights.items()}
    if found != expected:
        raise ProtocolError(f"{path}: holds {found}, expected {expected}")
    for name, array in weights.items():
        if array.dtype != np.float32 or not np.all(np.isfinite(array)):
            raise ProtocolError(f"{path}: {name} is not made of finite 32-bit numbers")
    return weights
