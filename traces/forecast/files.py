"""Forecasters on disk: arrays in safetensors, everything a person would ask in TOML.

Nothing in the two files can run code. The TOML names the schema, the kind, the checksum of the
arrays and where they came from; a file of another version, altered or cut short is refused in one
sentence.
"""

import hashlib
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import tomli_w

from fedstale.errors import TraceError
from fedstale.traces.forecast.forecaster import Forecaster, State

SCHEMA = 1
"""Version of the files; grows when an old reader would misread a new file."""
_TOML, _ARRAYS = "forecaster.toml", "forecaster.safetensors"
_MOST_BYTES = 64_000_000


def save(forecaster: Forecaster, folder: str | Path, provenance: dict[str, Any]) -> None:
    """Write forecaster.toml and forecaster.safetensors, the description last.

    Args:
        forecaster: a trained one.
        folder: made if it is missing.
        provenance: what it was trained on and how; plain values.
    """
    folder = Path(folder)
    state = {k: np.ascontiguousarray(v) for k, v in forecaster.state_dict().items()}
    data = safetensors.numpy.save(state)
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "schema": SCHEMA,
        "kind": forecaster.kind,
        "sha256": hashlib.sha256(data).hexdigest(),
        "provenance": provenance,
    }
    for name, content in ((_ARRAYS, data), (_TOML, tomli_w.dumps(about).encode())):
        beside = folder / f"{name}.new"
        beside.write_bytes(content)
        beside.replace(folder / name)


def describe(folder: str | Path) -> dict[str, Any]:
    """Return what forecaster.toml says.

    Raises:
        TraceError: it is missing, or is no description of this version.
    """
    path = Path(folder) / _TOML
    try:
        about = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TraceError(
            f"{folder}: no {_TOML} there: expected a folder that `fedstale train-forecaster` wrote"
        ) from None
    except (OSError, ValueError, RecursionError) as problem:
        raise TraceError(f"{path}: cannot be read ({problem})") from None
    if about.get("schema") != SCHEMA:
        raise TraceError(
            f"{path}: schema = {about.get('schema')!r}, expected {SCHEMA}; train the forecaster "
            "again with this version of fedstale"
        )
    return about


def embedded() -> Forecaster:
    """Return the forecaster that comes with fedstale: an LSTM, trained on published recordings.

    Its description says which, and by which command; see docs/forecasting.md for what it is worth.
    """
    return load(Path(__file__).parent)


def load(folder: str | Path) -> Forecaster:
    """Return the forecaster in a folder.

    Raises:
        TraceError: there is none, or it is of another version, altered or cut short.
    """
    from fedstale.traces.forecast.kinds import KINDS  # noqa: PLC0415 - the kinds use this module

    about = describe(folder)
    kind = about.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise TraceError(f"{folder}: kind = {kind!r}, expected one of {', '.join(KINDS)}")
    forecaster = KINDS[kind]()
    state = _arrays(Path(folder) / _ARRAYS, about.get("sha256"))
    try:
        forecaster.load_state_dict(state)
    except (KeyError, IndexError, ValueError) as problem:
        if isinstance(problem, TraceError):
            raise
        raise TraceError(f"{folder}: {_ARRAYS} lacks {problem}: train it again") from None
    return forecaster


def _arrays(path: Path, checksum: object) -> State:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise TraceError(f"{path}: larger than {_MOST_BYTES} bytes, no forecaster is")
        data = path.read_bytes()
    except OSError as problem:
        raise TraceError(f"{path}: cannot be read ({problem.strerror})") from None
    if hashlib.sha256(data).hexdigest() != checksum:
        raise TraceError(
            f"{path}: altered or cut short, its SHA-256 is not the one in {_TOML}; copy both files "
            "again"
        )
    try:
        state: State = safetensors.numpy.load(data)
    except safetensors.SafetensorError as problem:
        raise TraceError(f"{path}: not a safetensors file ({problem})") from None
    for name, array in state.items():
        if np.issubdtype(array.dtype, np.floating) and not np.all(np.isfinite(array)):
            raise TraceError(f"{path}: {name} holds a number that is not finite")
    return state
