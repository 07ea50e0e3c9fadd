"""The folders of a comparison's runs: what they are called, and how far the run in one has come."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fedstale.config import SimulationConfig
from fedstale.errors import ConfigError
from fedstale.reports.folder import CONFIG, LOCK, SUMMARY

# Changes where and how often something is computed or kept, never what comes out.
_WITHOUT_EFFECT = ("workers", "checkpoint_every")

State = Literal["new", "half", "failed", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run of a comparison."""

    variant: str
    seed: int
    config: SimulationConfig
    """Resolved settings."""
    folder: Path


def folder_name(variant: str) -> str:
    """Return a name for a variant's folder, distinct and safe, whatever the variant is called.

    Example:
        >>> folder_name("Gap-Aware"), folder_name("../b c")
        ('Gap-Aware', 'b-c-2dc68644')
    """
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", variant):
        return variant
    safe = re.sub(r"[^A-Za-z0-9_]+", "-", variant).strip("-")[:40]
    digest = hashlib.blake2b(variant.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{safe}-{digest}" if safe else digest


def state(task: Task) -> State:
    """Return how far a run is, by what its folder holds.

    Raises:
        ConfigError: the folder holds another run, or what is no run.
    """
    if not (task.folder / CONFIG).is_file():
        # A process that is killed while it writes its first file leaves a part of it.
        for part in task.folder.glob(".*.part"):
            part.unlink()
        if task.folder.is_dir() and any(f.name != LOCK for f in task.folder.iterdir()):
            raise ConfigError(
                f"{str(task.folder)!r} holds something that is no run: expected an empty folder "
                "or none; choose another --out"
            )
        return "new"
    before = SimulationConfig.read(task.folder / CONFIG)
    changed = differing(before, task.config)
    if changed:
        raise ConfigError(
            f"{str(task.folder)!r} holds a run with {changed}: choose another --out, or pass "
            "--overwrite to run everything again"
        )
    summary = task.folder / SUMMARY
    if not summary.is_file():
        return "half"
    try:
        status = json.loads(summary.read_text(encoding="utf-8"))["status"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(
            f"{str(summary)!r} cannot be read: remove the folder of that run, or pass --overwrite"
        ) from None
    return {"interrupted": "half", "failed": "failed"}.get(status, "done")  # type: ignore[return-value]


def differing(before: SimulationConfig, now: SimulationConfig) -> str:
    """Return in words which settings differ that results depend on, or nothing."""
    old, new = flat(before), flat(now)
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return ", ".join(f"{key} = {old.get(key)!r} instead of {new.get(key)!r}" for key in keys)


def flat(config: SimulationConfig) -> dict[str, Any]:
    """Return the settings that results depend on, those of tables under `table.key`."""
    found: dict[str, Any] = {}
    for name, value in asdict(config).items():
        if name in ("run_config", "costs"):
            found |= {f"{name.replace('_', '-')}.{key}": inner for key, inner in value.items()}
        elif name == "executor":
            # All others give the same bytes.
            found[name] = "batched" if value == "batched" else "exact"
        elif name not in _WITHOUT_EFFECT:
            found[name.replace("_", "-")] = value
    return found
