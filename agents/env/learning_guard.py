"""What learning constants were fitted to, and which windows lie outside of it.

Constants that were fitted to server steps of three updates say little of steps of three hundred.
The guard compares windows that are to be played with the runs of the fit, and says in sentences
what differs. It stops nothing: whoever plays them decides.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstale.agents.env.episodes import Episodes, JobKinds
from fedstale.errors import ConfigError
from fedstale.traces.arrays import Array, Index

if TYPE_CHECKING:
    from fedstale.agents.env.learning_fit import LearningRun

Range = tuple[float, float]
FACTOR = 2.0
"""From 1 / FACTOR of the least to FACTOR times the most is taken for known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The runs of a fit; pairs are (least, most) over runs."""

    app: str
    """What was trained."""
    runs: int
    """How many."""
    updates: Range
    """Updates of a server step, mean of a run."""
    staleness: Range
    """Staleness of an update, mean of a run."""
    devices: Range
    """Devices of the fleet."""
    steps: Range
    """Server steps."""
    job_s: Range
    """Time of a job from sending to its last byte, median of a run, in s."""
    n_bytes: Range
    """Bytes of the model, each way."""

    @classmethod
    def of(cls, runs: Sequence["LearningRun"]) -> "Fitted":
        """Return what some runs were."""

        def span(values: Sequence[float]) -> Range:
            return float(f"{min(values):.6g}"), float(f"{max(values):.6g}")

        return cls(
            app=runs[0].app,
            runs=len(runs),
            updates=span([float(np.mean([len(m) for m in run.merged])) for run in runs]),
            staleness=span([float(np.mean(run.staleness)) for run in runs]),
            devices=span([run.n_devices for run in runs]),
            steps=span([len(run.merged) for run in runs]),
            job_s=span([run.job_s for run in runs]),
            n_bytes=span([run.n_bytes for run in runs]),
        )

    @classmethod
    def read(cls, path: str | Path) -> "Fitted | None":
        """Return what the constants of a file were fitted to; None if it does not say.

        Raises:
            ConfigError: what it says is not what a fit writes.
        """
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("fitted")
            if table is None:
                return None
            pairs = {
                f.name: (float(table[f.name][0]), float(table[f.name][1]))
                for f in fields(cls)
                if f.name not in {"app", "runs"}
            }
            return cls(app=str(table["app"]), runs=int(table["runs"]), **pairs)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as problem:
            raise ConfigError(
                f"{path}: expected a table [fitted] as `fedstale agent fit-learning` writes it: "
                f"{problem!r}"
            ) from None

    def table(self) -> dict[str, Any]:
        """Return the table that `read` reads."""
        made = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in made.items()}

    def outside(self, episodes: Episodes, kinds: JobKinds) -> list[str]:
        """Return what of some windows the constants were not fitted to, in sentences.

        Args:
            episodes: windows that are to be played.
            kinds: their jobs.
        """
        values: dict[str, tuple[Array | Index, Range, str]] = {
            "updates of a server step": (episodes.buffer_size, self.updates, ""),
            "devices": (episodes.present.sum(axis=1), self.devices, ""),
            "job on the median device": (kinds.median_s[episodes.kind], self.job_s, " s"),
            "size of the model": (kinds.n_bytes[episodes.kind] / 1e6, _mega(self.n_bytes), " MB"),
            "rounds": (episodes.rounds, (0.0, self.steps[1]), ""),
        }
        found = []
        for name, (have, (least, most), unit) in values.items():
            outside = (have < least / FACTOR) | (have > most * FACTOR)
            if outside.any():
                found.append(
                    f"{outside.sum()} of {len(episodes)} windows: {name} "
                    f"{have[outside].min():g} to {have[outside].max():g}{unit}, fitted to "
                    f"{least:g} to {most:g}{unit}"
                )
        keeps = episodes.keeps_stragglers
        if self.staleness[1] == 0 and keeps.any():
            found.append(
                f"{keeps.sum()} of {len(episodes)} windows: stragglers are aggregated later, "
                "fitted to current updates alone"
            )
        return found


def _mega(pair: Range) -> Range:
    return pair[0] / 1e6, pair[1] / 1e6
