"""Forecasters on disk; see `fedstale.traces.io.models`."""

from pathlib import Path
from typing import Any

from fedstale.errors import TraceError
from fedstale.traces.forecast.forecaster import Forecaster
from fedstale.traces.io.models import ModelFiles

FILES = ModelFiles(
    what="forecaster",
    made_by="fedstale train-forecaster",
    version=("schema", 1),
    most_bytes=64_000_000,
    error=TraceError,
)


def save(forecaster: Forecaster, folder: str | Path, provenance: dict[str, Any]) -> None:
    """Write forecaster.toml and forecaster.safetensors, the description last.

    Args:
        forecaster: a trained one.
        folder: made if it is missing.
        provenance: what it was trained on and how; plain values.
    """
    about = {"kind": forecaster.kind, "provenance": provenance}
    FILES.write(folder, forecaster.state_dict(), about)


def describe(folder: str | Path) -> dict[str, Any]:
    """Return what forecaster.toml says.

    Raises:
        TraceError: it is missing, or is no description of this version.
    """
    return FILES.describe(folder)


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
    state = FILES.arrays(folder, about)
    try:
        forecaster.load_state_dict(state)
    except (KeyError, IndexError, ValueError) as problem:
        if isinstance(problem, TraceError):
            raise
        raise TraceError(f"{folder}: {FILES.safetensors} lacks {problem}: train it again") from None
    return forecaster
