"""Configurations that are tried: what is proposed, what is stopped, and their file.

The runs of a configuration are ordinary run folders, which pause at each rung. What they have come
to there is kept beside them, so that nothing is run or measured twice, whatever ends the search.

Optuna proposes, and ASHA decides at rungs. ASHA counts time in whatever a report calls time. Here
that is a power of its reduction factor for each rung, so that its milestones are the rungs,
whatever instants of virtual time these are. A search that goes on tells Optuna and ASHA from the
file, in its order, what has happened; and Optuna draws with a seed of each configuration's own, so
that it proposes what it would have proposed.

References:
    Li, Jamieson, Rostamizadeh, Gonina, Ben-tzur, Hardt, Recht, Talwalkar. A System for Massively
    Parallel Hyperparameter Tuning. MLSys 2020.
    Akiba, Sano, Yanase, Ohta, Koyama. Optuna: A Next-generation Hyperparameter Optimization
    Framework. KDD 2019.
"""

import json
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from fedstale.comparison import PlannedRun, state_of
from fedstale.contrib.tuning.space import Choices, Parameters, Range, Search, Space, Stop
from fedstale.errors import ConfigError, FedstaleError
from fedstale.files import is_held
from fedstale.reports import Run, write_text
from fedstale.runs import LOCK
from fedstale.simulation import simulate
from fedstale.traces import TraceSet

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import Trial as Asked
    from ray.tune.schedulers import TrialScheduler

    from fedstale.comparison import ClusterPool


TRIALS, REPORTS = "trials", "reports.json"
STATE = "trials.json"
_FORMAT = 1
_RELEASED_S, _LOOK_S = 60.0, 0.2

Status = Literal["open", "complete", "stopped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a configuration has come to at a rung, or at the end."""

    rung: int
    """Number of the instant: `Space.instants_s` has them."""
    values: tuple[float, ...]
    """Of each objective; NaN if a run failed."""
    n_never: tuple[int, ...]
    """Of each objective, how many runs have not reached its target."""
    failure: str = ""
    """Why a run failed; empty if none did."""
    refusal: str = ""
    """Why no configuration can be judged; empty if it can."""
    wall_s: float = 0.0
    """What the way from the rung before took."""
    arrival: int = -1
    """Place among the reports of all configurations; -1 before it has come."""

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> "Report":
        """Return a report that was written down; JSON has no NaN."""
        values = tuple(math.nan if value is None else float(value) for value in table["values"])
        return cls(**{**table, "values": values, "n_never": tuple(table["n_never"])})

    def table(self) -> dict[str, Any]:
        """Return the report as `from_table` reads it."""
        values = [value if math.isfinite(value) else None for value in self.values]
        return {**asdict(self), "values": values}


@dataclass(slots=True, kw_only=True)
class Trial:
    """One configuration."""

    number: int
    parameters: Parameters
    """Values of the keys that are searched."""
    reports: list[Report] = field(default_factory=list)
    status: Status = "open"
    """open while it goes on, complete at the end, stopped at a rung, or failed."""
    reason: str = ""
    """Why it failed."""
    began: int = 0
    """How many were over when it began."""
    ended: int = -1
    """How many were over before it; -1 while it goes on."""

    @property
    def last(self) -> Report | None:
        """The last report, if there is one."""
        return self.reports[-1] if self.reports else None

    @property
    def wall_s(self) -> float:
        """Seconds that it took."""
        return sum(report.wall_s for report in self.reports)


class Ledger:
    """All configurations of a search, in a file that is whole whenever the search is killed."""

    def __init__(self, folder: Path) -> None:
        """Read what an earlier call has done, if there was one.

        Configurations that were not over go on: what they had reported comes again, in the order in
        which they go on.

        Raises:
            ConfigError: the file cannot be read.
        """
        self._path = folder / STATE
        self.trials: list[Trial] = []
        if not self._path.is_file():
            return
        try:
            table = json.loads(self._path.read_text(encoding="utf-8"))
            for one in table["trials"]:
                reports = [Report.from_table(report) for report in one["reports"]]
                is_open = one["status"] == "open"
                self.trials.append(Trial(**{**one, "reports": [] if is_open else reports}))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
            raise ConfigError(
                f"{str(self._path)!r} cannot be read ({type(problem).__name__}): choose another "
                "folder, or remove it to search again; runs that are done are not repeated"
            ) from None

    @property
    def arrivals(self) -> list[tuple[Trial, Report]]:
        """All reports, as they came."""
        pairs = [(trial, report) for trial in self.trials for report in trial.reports]
        return sorted(pairs, key=lambda pair: pair[1].arrival)

    @property
    def unfinished(self) -> list[Trial]:
        """Configurations that are to go on, in the order in which they began."""
        return [trial for trial in self.trials if trial.status == "open"]

    @property
    def ended(self) -> list[Trial]:
        """Configurations that are over, in the order in which they ended."""
        return sorted((t for t in self.trials if t.status != "open"), key=lambda t: t.ended)

    @property
    def wall_s(self) -> float:
        """Seconds that all have taken, one after the other."""
        return sum(trial.wall_s for trial in self.trials)

    def write(self) -> None:
        """Write everything, whole or not at all."""
        trials = [
            {**asdict(trial), "reports": [report.table() for report in trial.reports]}
            for trial in self.trials
        ]
        write_text(json.dumps({"format": _FORMAT, "trials": trials}, indent=1) + "\n", self._path)


def trial_folder(folder: Path, number: int) -> Path:
    """Return where the runs of a configuration are."""
    return folder / TRIALS / f"{number:03}"


def reach(
    space: Space,
    number: int,
    parameters: Parameters,
    folder: Path,
    rung: int,
    *,
    pool: "ClusterPool | None" = None,
) -> Report:
    """Let all runs of a configuration go on to an instant, and return what they have come to.

    What was reached before is read and not run again.

    Args:
        space: that the configuration is of.
        number: of the configuration.
        parameters: of the configuration.
        folder: of the whole search.
        rung: number of the instant.
        pool: carries out the runs on a cluster; None of this process.

    Raises:
        RunLost: the process of a run on a cluster ended.
    """
    own = trial_folder(folder, number)
    known = _reports(own)
    if rung < len(known):
        return known[rung]
    started = time.perf_counter()
    report = _reached(space, number, parameters, own, rung, pool=pool)
    report = replace(report, wall_s=round(time.perf_counter() - started, 3))
    tables = [one.table() for one in (*known, report)]
    write_text(json.dumps(tables, indent=1) + "\n", own / REPORTS)
    return report


def _reached(
    space: Space,
    number: int,
    parameters: Parameters,
    own: Path,
    rung: int,
    *,
    pool: "ClusterPool | None",
) -> Report:
    at_s, is_last = space.instants_s[rung], rung == len(space.rungs_s)
    runs: list[Run] = []
    failure = refusal = ""
    own.mkdir(parents=True, exist_ok=True)
    try:
        for planned in space.runs(parameters, own):
            run = _at(planned, at_s, pool)
            if run.status == "failed":
                failure = f"seed {run.seed}: {run.reason or 'it failed'}"
                break
            runs.append(run)
    except FedstaleError as problem:
        failure = str(problem)
    if failure:
        n = len(space.objectives)
        return Report(rung=rung, values=(math.nan,) * n, n_never=(0,) * n, failure=failure)
    if number == 0:
        try:
            for objective in space.objectives:
                objective.require_measured(runs, at_end=is_last)
        except ConfigError as problem:
            refusal = str(problem)
    found = [objective.of(runs, at_s, space.until_s) for objective in space.objectives]
    pairs = zip(space.objectives, found, strict=True)
    without = [objective.text for objective, one in pairs if math.isnan(one.value)]
    if without:
        failure = f"{without[0]} is not a number, or was not measured, at {at_s:,.0f} s"
    return Report(
        rung=rung,
        values=tuple(one.value for one in found),
        n_never=tuple(one.n_never for one in found),
        failure=failure,
        refusal=refusal,
    )


def _at(planned: PlannedRun, at_s: float, pool: "ClusterPool | None") -> Run:
    """Let a run go on to an instant, unless it is over; and return it."""
    # The actor of a search that was killed may need a moment to be gone.
    until = time.monotonic() + _RELEASED_S
    while is_held(planned.folder / LOCK) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    state = state_of(planned)
    if state == "done":
        return Run(planned.folder)
    if pool is not None:
        return pool.reached(planned, state, at_s)
    return simulate(
        planned.config,
        planned.folder,
        traces=_traces(planned),
        overwrite=state == "failed",
        resume=state == "half",
        pause_at=at_s,
    )


_held: dict[tuple[str, int], TraceSet] = {}


def _traces(planned: PlannedRun) -> TraceSet:
    """Return the devices of a run, which the next configuration needs again."""
    spec, seed = planned.config.traces, planned.config.seed
    key = spec, seed if TraceSet.is_synthetic(spec) else 0
    if key not in _held:
        _held[key] = TraceSet.load(spec, seed=seed)
    return _held[key]


def _reports(own: Path) -> list[Report]:
    """Return the rungs that a configuration has come to, as far as they can be read."""
    try:
        tables = json.loads((own / REPORTS).read_text(encoding="utf-8"))
        return [Report.from_table(table) for table in cast("Sequence[dict[str, Any]]", tables)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


TIME, SCORE = "rung_time", "score"
"""What Ray calls them in a report: a power of the reduction factor, and what is to be large."""
_WORST = 1e300
"""What a failure counts as; finite, because ASHA interpolates between scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How a space is searched."""

    search: Search = "tpe"
    stop: Stop = "asha"
    seed: int = 0
    """Of all proposals."""
    workers: int = 1
    """Configurations at a time; with one, the same search gives the same result."""


class Proposals:
    """What Optuna proposes and ASHA decides, and the file that remembers both."""

    def __init__(self, space: Space, how: How, ledger: Ledger) -> None:
        """Tell Optuna and ASHA what has happened already."""
        import optuna  # noqa: PLC0415 - an extra

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.space, self.how, self.ledger = space, how, ledger
        self.scheduler = scheduler_of(space, how.stop)
        self._grid = space.grid() if how.search == "grid" else None
        self._distributions = {key: _distribution(domain) for key, domain in space.domains.items()}
        self._study = optuna.create_study(
            directions=["minimize" if o.is_lower_better else "maximize" for o in space.objectives]
        )
        self._asked: dict[int, Asked] = {}
        self._waiting = ledger.unfinished
        self._n_arrived = 0
        self._replay()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be tried."""
        return not self._waiting and self._is_enough()

    def next(self) -> Trial | None:
        """Return what is to be tried next; None if that is all."""
        if self._waiting:
            trial = self._waiting.pop(0)
            self._ask(trial.number, trial.parameters)
            return trial
        if self._is_enough():
            return None
        number = len(self.ledger.trials)
        known = None if self._grid is None else self._grid[number]
        parameters = self._ask(number, known)
        trial = Trial(number=number, parameters=parameters, began=len(self.ledger.ended))
        self.ledger.trials.append(trial)
        self.ledger.write()
        return trial

    def reported(self, trial: Trial, report: Report) -> None:
        """Keep what a configuration has come to."""
        trial.reports.append(replace(report, arrival=self._n_arrived))
        self._n_arrived += 1
        self.ledger.write()

    def ended(self, trial: Trial, failure: str = "") -> None:
        """Keep how a configuration ended, after its last report."""
        last = trial.last
        trial.reason = failure or (last.failure if last else "")
        is_at_end = last is not None and last.rung == len(self.space.rungs_s)
        n_ended = len(self.ledger.ended)
        trial.status = "failed" if trial.reason else "complete" if is_at_end else "stopped"
        trial.ended = n_ended
        self._tell(trial)
        self.ledger.write()

    def _is_enough(self) -> bool:
        enough = self.space.trials if self._grid is None else len(self._grid)
        if enough is not None and len(self.ledger.trials) >= enough:
            return True
        return self.ledger.wall_s / self.how.workers >= self.space.budget_s

    def _ask(self, number: int, known: Parameters | None) -> Parameters:
        """Return what Optuna proposes, which is what is known already if it is."""
        self._study.sampler = self._sampler(number)
        if known is not None:
            self._study.enqueue_trial(dict(known))
        asked = self._asked[number] = self._study.ask(self._distributions)
        return {key: asked.params[key] for key in self._distributions}

    def _tell(self, trial: Trial) -> None:
        """Tell Optuna how a configuration ended; a failure is the worst that can be."""
        from optuna.trial import TrialState  # noqa: PLC0415 - an extra

        asked = self._asked.pop(trial.number)
        if trial.status == "stopped":
            for report in trial.reports:
                asked.report(report.values[0], step=report.rung)
            self._study.tell(asked, state=TrialState.PRUNED)
            return
        worst = [_WORST if o.is_lower_better else -_WORST for o in self.space.objectives]
        last = trial.last
        values = list(last.values) if trial.status == "complete" and last is not None else worst
        self._study.tell(asked, values)

    def _replay(self) -> None:
        """Tell all that has happened to configurations that are over, in its order."""
        over = self.ledger.ended
        for n_ended in range(len(over) + 1):
            for trial in sorted(over, key=lambda trial: trial.number):
                if trial.began == n_ended:
                    self._ask(trial.number, trial.parameters)
            if n_ended < len(over):
                self._tell(over[n_ended])
        begun: dict[int, Any] = {}
        # ASHA asks it nothing.
        controller: Any = None
        for trial, report in self.ledger.arrivals:
            if trial.number not in begun:
                begun[trial.number] = SimpleNamespace(trial_id=f"before-{trial.number}")
                self.scheduler.on_trial_add(controller, begun[trial.number])
            result = result_of(self.space, report)
            self.scheduler.on_trial_result(controller, begun[trial.number], result)
            self._n_arrived = report.arrival + 1

    def _sampler(self, number: int) -> "BaseSampler":
        """Return what proposes one configuration, with a seed of its own."""
        from optuna import samplers  # noqa: PLC0415 - an extra

        sequence = np.random.SeedSequence(self.how.seed, spawn_key=(number,))
        seed = int(sequence.generate_state(1)[0])
        if self.how.search != "tpe":
            return samplers.RandomSampler(seed=seed)
        if len(self.space.objectives) > 1:
            return samplers.NSGAIISampler(seed=seed)
        return samplers.TPESampler(seed=seed)


def scheduler_of(space: Space, stop: Stop) -> "TrialScheduler":
    """Return what decides at rungs, with milestones that are exactly the rungs of a space."""
    from ray.tune.schedulers import (  # noqa: PLC0415 - an extra
        AsyncHyperBandScheduler,
        FIFOScheduler,
    )

    if stop != "asha" or not space.rungs_s:
        return FIFOScheduler()  # type: ignore[no-untyped-call]
    return AsyncHyperBandScheduler(
        time_attr=TIME,
        metric=SCORE,
        mode="max",
        reduction_factor=1 / space.keep,
        grace_period=1,
        # Half a power above the end: rounding of logarithms takes away no rung.
        max_t=(1 / space.keep) ** (len(space.rungs_s) + 0.5),
    )


def result_of(space: Space, report: Report) -> dict[str, float]:
    """Return a report as ASHA wants it: its time, and a score of which more is better."""
    value, is_lower_better = report.values[0], space.objectives[0].is_lower_better
    score = -value if is_lower_better else value
    factor = 1 / space.keep
    return {TIME: factor**report.rung, SCORE: -_WORST if math.isnan(score) else score}


def _distribution(domain: Choices | Range) -> "BaseDistribution":
    from optuna import distributions  # noqa: PLC0415 - an extra

    if isinstance(domain, Choices):
        return distributions.CategoricalDistribution(domain.values)
    if domain.is_whole:
        low, high, step = int(domain.low), int(domain.high), int(domain.step or 1)
        return distributions.IntDistribution(low, high, log=domain.is_log, step=step)
    with warnings.catch_warnings():
        # The last value is a step already, but for the last bit.
        warnings.simplefilter("ignore")
        return distributions.FloatDistribution(
            domain.low, domain.high, log=domain.is_log, step=domain.step
        )
