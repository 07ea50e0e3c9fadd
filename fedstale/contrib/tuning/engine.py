"""Configurations run side by side by Ray Tune, in a process that has Ray for itself.

The runs of a configuration are ordinary run folders, which pause at each rung. What they have come
to there is kept beside them, so that nothing is run or measured twice, whatever ends the search.
Ray keeps nothing that is needed again. This file imports Ray, which reads the environment then.

Reference:
    Liaw, Liang, Nishihara, Moritz, Gonzalez, Stoica. Tune: A Research Platform for Distributed
    Model Selection and Training. ICML AutoML Workshop 2018.
"""

import json
import logging
import math
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray import tune
from ray.tune.execution.placement_groups import PlacementGroupFactory
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from fedstale.cluster import Bundles, joined
from fedstale.comparison import ClusterPool, PlannedRun, RunJob, bundles_of, state_of
from fedstale.contrib.tuning.search import WORST, Proposals, Report, SearchJob, Trial
from fedstale.contrib.tuning.space import Space, Stop
from fedstale.errors import ConfigError, FedstaleError
from fedstale.files import is_held
from fedstale.flower import command_line
from fedstale.reports import Run
from fedstale.runs import LOCK
from fedstale.simulation import simulate
from fedstale.traces import TraceSet

TRIALS = "trials"
TIME, SCORE, _REPORT = "rung_time", "score", "report"
"""Keys of a result: a power of ASHA's reduction factor, and what is to be large."""
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
    space, bundles = task.space, None
    with _ray(task) as (workers, storage):
        if task.address is not None:
            plan = space.plan({"trial": {}}, held_out=False, reference="trial")
            bundles = bundles_of([plan.config("trial", space.seeds[0])])
        runs = tune.with_parameters(_Runs, space=space, folder=task.folder, bundles=bundles)
        if bundles is not None:
            runs = tune.with_resources(runs, _here())
        with Proposals(replace(task, workers=workers)) as proposals:
            proposals.take_up()
            searcher = _Searcher(proposals, notify)
            tune.Tuner(
                runs,
                tune_config=tune.TuneConfig(
                    search_alg=searcher,
                    scheduler=scheduler_of(space, task.stop, proposals.trials),
                    num_samples=-1,
                    # Importing everything takes seconds.
                    reuse_actors=True,
                    trial_dirname_creator=lambda trial: str(trial.trial_id),
                ),
                run_config=tune.RunConfig(
                    name="trials",
                    storage_path=storage,
                    verbose=0,
                    stop=lambda trial_id, result: bool(searcher.refusal),
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                ),
            ).fit()
    if searcher.refusal:
        raise ConfigError(searcher.refusal)


@contextmanager
def _ray(task: SearchJob) -> Iterator[tuple[int, str]]:
    """Start Ray on this machine alone, or join a cluster; yield its workers, and a folder."""
    # Ray's sockets need a short path: the folder of the search may have a long one.
    with tempfile.TemporaryDirectory(prefix="fedstale-", ignore_cleanup_errors=True) as place:
        storage = f"{place}/results"
        if task.address is not None:
            with joined(task.address) as cores:
                yield task.workers or cores or 1, storage
            return
        before = signal.getsignal(signal.SIGTERM)
        ray.init(
            address="local",
            num_cpus=task.workers,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=f"{place}/ray",
        )
        # Ray takes the place of who asked to hear it.
        signal.signal(signal.SIGTERM, before)
        try:
            yield task.workers or 1, storage
        finally:
            ray.shutdown()


class _Runs(tune.Trainable):
    """Runs a configuration from rung to rung; Ray ends it where ASHA says so."""

    # Both arguments come by `with_parameters`.
    def setup(  # type: ignore[override]
        self, config: dict[str, Any], *, space: Space, folder: Path, bundles: Bundles | None
    ) -> None:
        """Begin with the first configuration; on a cluster this actor only asks and waits."""
        self._space, self._folder = space, folder
        self._bundles = bundles
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Begin another configuration in the same process."""
        command_line.console().setLevel(logging.ERROR)
        self._trial = Trial(number=new_config["number"], parameters=json.loads(new_config["keys"]))
        self._rung = int(new_config["rung"])
        return True

    def step(self) -> dict[str, Any]:
        """Go on to the next rung, whose folders are whole before it is reported."""
        own = self._folder / TRIALS / f"{self._trial.number:03}"
        # On a cluster the worker is let go at each rung, because another may wait for its core.
        with nullcontext() if self._bundles is None else ClusterPool(self._bundles) as pool:
            report = reach(self._space, self._trial, own, self._rung, pool)
        done = self._rung == len(self._space.rungs_s) or bool(report.failure)
        self._rung += 1
        found = json.dumps(report.table())
        return {**result_of(self._space, report), _REPORT: found, "done": done}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save nothing: run folders have it."""


class _Searcher(Searcher):
    """Hands out proposed configurations, and keeps their reports."""

    def __init__(self, proposals: Proposals, notify: Callable[[Trial], object]) -> None:
        super().__init__(metric=SCORE, mode="max")
        self._proposals, self._notify = proposals, notify
        self._running: dict[str, Trial] = {}
        self.refusal = ""
        """Why no configuration can be judged; empty if they can."""

    def __getstate__(self) -> dict[str, object]:
        """Return nothing to write down: the study has it."""
        return {}

    def set_search_properties(
        self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: object
    ) -> bool:
        """Accept what Ray says; it is known already."""
        return True

    def suggest(self, trial_id: str) -> Any:
        """Return the next configuration; None while all workers are busy."""
        if len(self._running) >= (self._proposals.task.workers or 1):
            return None
        trial = None if self.refusal else self._proposals.next()
        if trial is None:
            return Searcher.FINISHED
        self._running[trial_id] = trial
        self._notify(trial)
        # As a text: Ray takes inner tables and lists for searches of its own.
        keys = json.dumps(dict(trial.parameters))
        return {"number": trial.number, "keys": keys, "rung": len(trial.reports)}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Keep a report of a configuration that goes on."""
        trial = self._with(trial_id, result)
        self._proposals.reported(trial)
        self._notify(trial)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Keep the last report, and how a configuration ended."""
        trial = self._running[trial_id] if error else self._with(trial_id, result or {})
        del self._running[trial_id]
        if not self.refusal:
            self._notify(self._proposals.ended(trial, "its process ended" if error else ""))

    def _with(self, trial_id: str, result: dict[str, Any]) -> Trial:
        """Return a configuration with one more report."""
        report, before = Report.from_table(json.loads(result[_REPORT])), self._running[trial_id]
        self.refusal = self.refusal or report.refusal
        self._running[trial_id] = replace(before, reports=(*before.reports, report))
        return self._running[trial_id]

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: the study has it."""

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing."""


def _here() -> PlacementGroupFactory:
    """Keep an actor on the node of this process, where it takes none of its cores."""
    own = {"ray.io/node-id": str(ray.get_runtime_context().get_node_id())}
    # Of nothing at all there is no bundle.
    return PlacementGroupFactory([{"memory": 1}], bundle_label_selector=[own])


def reach(
    space: Space, trial: Trial, folder: Path, rung: int, pool: ClusterPool | None = None
) -> Report:
    """Continue all runs of a configuration to an instant, and report their values.

    Args:
        space: that the configuration is of.
        trial: the configuration.
        folder: its own.
        rung: number of the instant.
        pool: carries out the runs on a cluster; None of this process.

    Raises:
        RuntimeError: the process of a run on a cluster ended.
    """
    started, at_s = time.perf_counter(), space.instants_s[rung]
    runs: list[Run] = []
    value, n_never, objective = math.nan, 0, space.objective
    failure = refusal = ""
    try:
        for planned in space.runs(trial.parameters, folder):
            run = _at(planned, at_s, pool)
            if run.status == "failed":
                failure = f"seed {run.seed}: {run.reason or 'it failed'}"
                break
            runs.append(run)
    except FedstaleError as problem:
        failure = str(problem)
    if not failure:
        value, n_never = objective.of(runs, at_s, space.until_s)
        if math.isnan(value):
            failure = f"{objective.text} is not a number, or was not measured, at {at_s:,.0f} s"
        try:
            if trial.number == 0:
                objective.require_measured(runs, at_end=rung == len(space.rungs_s))
        except ConfigError as problem:
            refusal = str(problem)
    return Report(
        rung=rung,
        value=value,
        n_never=n_never,
        failure=failure,
        refusal=refusal,
        wall_s=round(time.perf_counter() - started, 3),
    )


def _at(planned: PlannedRun, at_s: float, pool: ClusterPool | None) -> Run:
    """Continue a run to an instant, unless it is over; and return it."""
    # The actor of a search that was killed may need a moment to be gone.
    until = time.monotonic() + _RELEASED_S
    while is_held(planned.folder / LOCK) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    state = state_of(planned)
    if state == "done":
        return Run(planned.folder)
    if pool is not None:
        for _, event, what in pool.work([RunJob(run=planned, begun=state, pause_at=at_s)], 1):
            if event == "rejected":
                raise ConfigError(what)
            if event == "died":
                raise RuntimeError(what)
        return Run(planned.folder)
    spec, seed = planned.config.traces, planned.config.seed
    return simulate(
        planned.config,
        planned.folder,
        traces=_traces(spec, seed if TraceSet.is_synthetic(spec) else 0),
        overwrite=state == "failed",
        resume=state == "half",
        pause_at=at_s,
    )


@lru_cache
def _traces(spec: str, seed: int) -> TraceSet:
    """Load the devices of a run, which the next configuration needs again."""
    return TraceSet.load(spec, seed=seed)


def scheduler_of(space: Space, stop: Stop, tried: Sequence[Trial] = ()) -> TrialScheduler:
    """Make a scheduler whose milestones are exactly the rungs of a space.

    Args:
        space: what is searched.
        stop: whether anything is stopped.
        tried: configurations whose reports count already.
    """
    if stop != "asha" or not space.rungs_s:
        return FIFOScheduler()  # type: ignore[no-untyped-call]
    scheduler = _Asha(
        time_attr=TIME,
        metric=SCORE,
        mode="max",
        reduction_factor=1 / space.keep,
        grace_period=1,
        # Half a power above the end: rounding of logarithms takes away no rung.
        max_t=(1 / space.keep) ** (len(space.rungs_s) + 0.5),
    )
    for trial in tried:
        scheduler.before[trial.number] = [result_of(space, report) for report in trial.reports]
        if trial.status != "open":
            own = SimpleNamespace(
                trial_id=f"before-{trial.number}", config={"number": trial.number}
            )
            scheduler.on_trial_add(None, own)
    return scheduler


class _Asha(AsyncHyperBandScheduler):
    """ASHA, to which a configuration brings what it has reported to a search that ended.

    Under the same id: at a configuration's end, ASHA counts its last score at each rung at which it
    has not reported.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.before: dict[int, list[dict[str, float]]] = {}

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Count what a configuration has reported before."""
        super().on_trial_add(tune_controller, trial)
        for result in self.before.pop(trial.config["number"], ()):
            super().on_trial_result(tune_controller, trial, result)


def result_of(space: Space, report: Report) -> dict[str, float]:
    """Return a report as ASHA wants it: its time, and a score of which more is better."""
    score = -report.value if space.objective.is_lower_better else report.value
    factor = 1 / space.keep
    return {TIME: factor**report.rung, SCORE: -WORST if math.isnan(score) else score}
