"""Configurations taken from rung to rung, by processes of this machine or of a cluster.

The runs of a configuration are ordinary run folders, which pause at each rung. What they have come
to there is kept in the study, so that nothing is run or measured twice, whatever ends the search.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedstale.api import LOG
from fedstale.comparison import PlannedRun, RunJob, TracesOf, run_pool, state_of
from fedstale.contrib.tuning.search import Halving, Proposals, Report, SearchJob, Trial
from fedstale.errors import FedstaleError
from fedstale.files import is_held
from fedstale.reports import Run
from fedstale.runs import LOCK

TRIALS = "trials"
_RELEASED_S, _LOOK_S = 60.0, 0.2


def run_trials(task: SearchJob, notify: Callable[[Trial], object]) -> None:
    """Try configurations until there are enough.

    Args:
        task: what to search.
        notify: is given each configuration that has begun, has reported, or is over.

    Raises:
        ConfigError: no configuration can be judged by the objective.
        KeyboardInterrupt: it was asked to stop; the same call goes on.
    """
    # Every configuration has the devices of the first.
    runs = 2 * task.space.runs({}, task.folder)
    with (
        run_pool(runs, workers=task.workers, log=task.folder / LOG, address=task.address) as (
            pool,
            workers,
            traces,
        ),
        Proposals(replace(task, workers=workers)) as proposals,
    ):
        proposals.take_up()
        rungs = _Rungs(proposals, notify, traces)
        for job, event, what in pool.work(rungs, workers):
            if event != "progress":
                rungs.reached(job, f"seed {job.run.config.seed}: {what}" if what else "")


@dataclass(slots=True)
class _Going:
    """A configuration on its way to a rung."""

    trial: Trial
    runs: list[PlannedRun] = field(default_factory=list)
    left: set[Path] = field(default_factory=set)
    """Folders of runs that have not come there."""
    failure: str = ""
    wall_s: float = 0.0


class _Rungs:
    """Hands out runs to the next rung, and decides once all of a configuration are there.

    As an iterator it may have more after it had none: configurations that are busy go on.
    """

    def __init__(
        self, proposals: Proposals, notify: Callable[[Trial], object], traces: TracesOf
    ) -> None:
        self._proposals, self._notify, self._traces = proposals, notify, traces
        self._halving = Halving(proposals.space, proposals.trials)
        self._waiting = deque[RunJob]()
        self._begun_s: dict[Path, float] = {}
        self._going: dict[Path, _Going] = {}
        """By the folder of a run."""

    def __iter__(self) -> "_Rungs":
        return self

    def __next__(self) -> RunJob:
        while not self._waiting:
            trial = self._proposals.next()
            if trial is None:
                raise StopIteration
            self._notify(trial)
            self._go_on(trial)
        job = self._waiting.popleft()
        self._begun_s[job.run.folder] = time.perf_counter()
        return job

    def reached(self, job: RunJob, failure: str) -> None:
        """Hear that a run has come to its rung, or why it has not."""
        folder = job.run.folder
        going = self._going.pop(folder)
        going.left.remove(folder)
        going.wall_s += time.perf_counter() - self._begun_s.pop(folder)
        if failure:
            going.failure = going.failure or failure
            needless = [one for one in self._waiting if one.run.folder in going.left]
            for one in needless:
                self._waiting.remove(one)
                going.left.remove(one.run.folder)
        if not going.left and (trial := self._decided(going)):
            self._go_on(trial)

    def _go_on(self, begun: Trial) -> None:
        """Hand out the runs of a configuration to its next rung that is still to be reached."""
        trial: Trial | None = begun
        while trial is not None:
            going = _Going(trial)
            jobs: list[RunJob] = []
            try:
                own = self._proposals.task.folder / TRIALS / f"{trial.number:03}"
                going.runs = self._proposals.space.runs(trial.parameters, own)
                jobs = [job for run in going.runs if (job := self._job(run, len(trial.reports)))]
            except FedstaleError as problem:
                going.failure = str(problem)
            if jobs:
                going.left = {job.run.folder for job in jobs}
                self._going |= dict.fromkeys(going.left, going)
                self._waiting += jobs
                return
            trial = self._decided(going)

    def _job(self, run: PlannedRun, rung: int) -> RunJob | None:
        """Return what takes a run to a rung; None if it is over."""
        # The process of a search that was killed may need a moment to be gone.
        until = time.monotonic() + _RELEASED_S
        while is_held(run.folder / LOCK) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        state, at_s = state_of(run), self._proposals.space.instants_s[rung]
        if state == "done":
            return None
        return RunJob(run=run, begun=state, traces=self._traces(run), pause_at=at_s)

    def _decided(self, going: _Going) -> Trial | None:
        """Keep what a configuration has come to, and return it if it goes on.

        Raises:
            ConfigError: the app does not measure what is asked for.
        """
        space, trial, rung = self._proposals.space, going.trial, len(going.trial.reports)
        at_s, is_at_end = space.instants_s[rung], rung == len(space.rungs_s)
        value, n_never, failure = math.nan, 0, going.failure
        if not failure:
            runs = [Run(run.folder) for run in going.runs]
            value, n_never = space.objective.of(runs, at_s, space.until_s)
            if trial.number == 0:
                space.objective.require_measured(runs, at_end=is_at_end)
            if math.isnan(value):
                name = space.objective.text
                failure = f"{name} is not a number, or was not measured, at {at_s:,.0f} s"
        report = Report(
            rung=rung,
            value=value,
            n_never=n_never,
            failure=failure,
            wall_s=round(going.wall_s, 3),
        )
        trial = replace(trial, reports=(*trial.reports, report))
        is_behind = self._halving.stops(report) and self._proposals.task.stop == "asha"
        if failure or is_at_end or is_behind:
            self._notify(self._proposals.ended(trial))
            return None
        self._proposals.reported(trial)
        self._notify(trial)
        return trial
