"""The emulator: what a simulation would come to, without one.

A schedule is played on some jobs of measured devices; an ensemble of small networks has learnt from
short runs what that lacks to the truth, and intervals come from runs on fleets that no network has
learnt from (Vovk, Gammerman, Shafer. Algorithmic Learning in a Random World. 2005).
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from fedstale.contrib.emulator.measures import OUTPUTS, SHARES, Sample, Setting
from fedstale.errors import ConfigError, ProtocolError
from fedstale.strategies import StaleStrategy, parse
from fedstale.strategies.schedule import Schedule
from fedstale.strategies.selection import Enough, ExpectedUtility, Random
from fedstale.traces import Array, TraceSet
from fedstale.traces.io import ModelFiles

FILES = ModelFiles(
    what="emulator",
    made_by="python benchmarks/emulator/run.py",
    version=("format", 1),
    most_bytes=1_000_000,
    error=ProtocolError,
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run comes to at its target."""

    spans: dict[str, tuple[float, float, float]]
    """Low end, middle and high end of each of `measures.OUTPUTS`; 90 % of runs lie between."""
    outside: tuple[str, ...]
    """What lies beyond the runs learnt from, in words; where anything does, ends mean nothing."""


class Emulator:
    """Networks, and the scales, ranges and errors of what they have learnt."""

    def __init__(self, arrays: dict[str, Array], names: list[str]) -> None:
        """Set the arrays, as `learnt` uses them, and the names of the measures that they take."""
        self._arrays, self._names = arrays, names

    @classmethod
    @cache
    def load(cls, folder: Path = Path(__file__).parent) -> "Emulator":
        """Read the files in a folder; those that come with fedstale if none is named.

        Raises:
            ProtocolError: they are missing, altered or damaged.
        """
        about = FILES.describe(folder)
        return cls(FILES.arrays(folder, about), about["measures"])

    def learnt(self, x: Array) -> Array:
        """Return what played schedules lack to the truth, from measures; shape (n, outputs)."""
        of = self._arrays
        at = (np.clip(x, of["low"], of["high"]) - of["mean"]) / of["spread"]
        for i in "123":
            at = at @ of[f"weight_{i}"] + of[f"bias_{i}"][:, None]
            at = at if i == "3" else np.maximum(at, 0.0)
        return np.asarray(of["out_mean"] + of["out_spread"] * at.mean(axis=0))

    def estimate(self, measures: dict[str, float], *, keeps: bool) -> Estimate:
        """Return what a run of some measures comes to, and whether late jobs are kept.

        Raises:
            ProtocolError: the networks have learnt from other measures.
        """
        if list(measures) != self._names:
            raise ProtocolError(f"emulator: learnt from other measures; {FILES.made_by}")
        x, margin = np.array(list(measures.values())), self._arrays["margin"][int(keeps)]
        middle = self.learnt(x[None])[0] + [measures[name] for name in OUTPUTS]
        ends = np.array([middle - margin, middle, middle + margin])
        ends[:, :2], ends[:, 2] = np.exp(ends[:, :2]), np.clip(ends[:, 2], 0.0, 1.0)
        ends[:, 3:] = np.maximum(np.expm1(ends[:, 3:]), 0.0) * keeps
        outside, bounds = [], (self._arrays["low"], self._arrays["high"])
        for name, *values in zip(measures, x, *bounds, strict=True):
            if not values[1] - 1e-6 <= values[0] <= values[2] + 1e-6:
                said = values if name in SHARES else np.exp(values)
                outside.append("{}: {:.3g}, learnt from {:.3g} to {:.3g}".format(name, *said))
        spans = [(low, mid, high) for low, mid, high in ends.T.tolist()]
        return Estimate(dict(zip(OUTPUTS, spans, strict=True)), tuple(outside))


def estimate(
    traces: TraceSet,
    strategy: str | StaleStrategy,
    *,
    rounds: float,
    work: float,
    message_bytes: float,
    timeout_s: float,
    skew: float,
) -> Estimate:
    """Return what a run takes on devices, without running it.

    Args:
        traces: complete devices; the run begins at instant 0.
        strategy: with the schedule of `FedBuff` or of `FedAvg`, or a text as `parse` takes it.
        rounds: of ten devices, each with a fresh update, in which the target is reached.
        work: of a job, in work units.
        message_bytes: of a message, and of a reply.
        timeout_s: time in s after which a job is given up.
        skew: concentration of the Dirichlet distribution by which labels are dealt.

    Raises:
        ConfigError: no such strategy was learnt from, or no device can do such a job.
        TraceError: the traces lack a channel.
    """
    made = parse(strategy) if isinstance(strategy, str) else strategy
    plan = made.schedule if isinstance(made, StaleStrategy) else Schedule(deadline_s=1.0)
    selector = getattr(made, "selector", None)
    keeps, balanced = plan.stragglers == "keep", isinstance(selector, Enough)
    whom = selector.then if isinstance(selector, Enough) else selector
    if (
        keeps != (plan.send == "after_reply")
        or plan.deadline_s < np.inf
        or not isinstance(whom, ExpectedUtility if balanced else Random)
        or getattr(made, "run_pace", None) is not None
    ):
        raise ConfigError(
            f"strategy = {strategy!r}: not learnt from; expected the schedule of FedBuff or "
            "FedAvg, with Random() or Enough(ExpectedUtility(BALANCED)), and no pace"
        )
    jobs = plan.concurrency or max(int(plan.fraction_train * traces.n_devices), 1)
    job, sizes = (work, message_bytes, timeout_s), (jobs, plan.buffer_size or jobs)
    of = Setting(*job, rounds, skew, 1.0, *sizes, keeps, balanced)
    return Emulator.load().estimate(Sample(traces, of).measures(of), keeps=keeps)
