"""Configurations run side by side by Ray Tune, each in an actor that runs one after the other.

Ray keeps nothing that is needed again: run folders and the ledger have all. So a search that was
killed is a new one to Ray, which begins with what was not over. This file imports Ray, and is
imported once everything has been checked.

Reference:
    Liaw, Liang, Nishihara, Moritz, Gonzalez, Stoica. Tune: A Research Platform for Distributed
    Model Selection and Training. ICML AutoML Workshop 2018.
"""

import json
import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # of Cython
from ray.tune import (
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    Stopper,
    Trainable,
    TuneConfig,
    Tuner,
    with_parameters,
    with_resources,
)
from ray.tune.execution.placement_groups import PlacementGroupFactory
from ray.tune.search import Searcher

from fedstale.cluster import Bundles
from fedstale.comparison import ClusterPool, bundles_of
from fedstale.config import SimulationConfig
from fedstale.contrib.tuning.space import Plain, Space
from fedstale.contrib.tuning.trials import SCORE, Proposals, Report, Trial, reach, result_of
from fedstale.errors import ConfigError
from fedstale.files import hold, is_held
from fedstale.flower import command_line
from fedstale.reports import write_text

Watch = Callable[[Trial], None]
"""Called whenever a configuration has begun, has reported, or is over."""

_REPORT = "report"
_PLACE, _HELD, _PREFIX = ".ray", ".lock", "fedstale-"
"""Where a search remembers its temporary folder; a file that is locked in it; how it is called."""
_QUIET = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray lets its workers wait for everything else, as 15 less important.
    "RAY_worker_niceness": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # An interrupt is ours to hear.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    # Nothing of Ray's own state is needed again.
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",
}


def run_trials(
    proposals: Proposals, folder: Path, watch: Watch, address: str | None = None
) -> None:
    """Try configurations until there are enough.

    Args:
        proposals: what to try.
        folder: of the search, as a whole path; it exists.
        watch: is told of each configuration.
        address: of the cluster that is joined, whose nodes carry out runs; None of this machine.

    Raises:
        ConfigError: no configuration can be judged by the objective.
        KeyboardInterrupt: it was asked to stop; the same call goes on.
    """
    searcher = _Searcher(proposals, folder, watch)
    with _quiet_ray(proposals.how.workers, folder) as storage:
        bundles = None if address is None else bundles_of(_configs(proposals.space))
        actor = with_parameters(_Actor, space=proposals.space, folder=folder, bundles=bundles)
        if bundles is not None:
            actor = with_resources(actor, _here())
        Tuner(
            actor,
            tune_config=TuneConfig(
                search_alg=searcher,
                scheduler=proposals.scheduler,
                num_samples=-1,
                # Importing everything takes seconds.
                reuse_actors=True,
                trial_dirname_creator=lambda trial: str(trial.trial_id),
            ),
            run_config=RunConfig(
                name="trials",
                storage_path=storage,
                verbose=0,
                stop=_Refused(searcher),
                checkpoint_config=CheckpointConfig(checkpoint_at_end=False),
                failure_config=FailureConfig(max_failures=0),
            ),
        ).fit()
    if searcher.refusal:
        raise ConfigError(searcher.refusal)


class _Actor(Trainable):
    """Runs a configuration from rung to rung; Ray ends it where ASHA says so."""

    # Both arguments come by `with_parameters`.
    def setup(  # type: ignore[override]
        self, config: dict[str, Any], *, space: Space, folder: Path, bundles: Bundles | None
    ) -> None:
        """Begin with the first configuration; on a cluster this actor only asks and waits."""
        self._space, self._folder = space, folder
        self._pool = None if bundles is None else ClusterPool(bundles)
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take another configuration in the same process."""
        command_line.console().setLevel(logging.ERROR)
        self._number = int(new_config["number"])
        self._rung = 0
        self._parameters: dict[str, Plain] = json.loads(new_config["parameters"])
        return True

    def step(self) -> dict[str, Any]:
        """Go on to the next rung, whose folders are whole before it is reported."""
        report = reach(
            self._space, self._number, self._parameters, self._folder, self._rung, pool=self._pool
        )
        done = self._rung == len(self._space.rungs_s) or bool(report.failure)
        self._rung += 1
        found = json.dumps(report.table())
        return {**result_of(self._space, report), _REPORT: found, "done": done}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save nothing: run folders have it."""

    def cleanup(self) -> None:
        """Let the worker on the cluster go, if there is one."""
        if self._pool is not None:
            self._pool.__exit__()


class _Searcher(Searcher):
    """Hands out what is proposed, and takes in what comes of it."""

    def __init__(self, proposals: Proposals, folder: Path, watch: Watch) -> None:
        super().__init__(metric=SCORE, mode="max")
        self._proposals, self._folder, self._watch = proposals, folder, watch
        self._running: dict[str, Trial] = {}
        self.refusal = ""
        """Why no configuration can be judged; empty if they can."""

    def __getstate__(self) -> dict[str, object]:
        """Return what Ray Tune writes down and nobody reads; a watch need not be picklable."""
        return {key: value for key, value in vars(self).items() if key != "_watch"}

    def set_search_properties(
        self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: object
    ) -> bool:
        """Take what Ray says; it is known already."""
        return True

    def suggest(self, trial_id: str) -> Any:  # noqa: ANN401 - a text ends it, whatever Ray says
        """Return the next configuration; None while all workers are busy."""
        if len(self._running) >= self._proposals.how.workers:
            return None
        trial = None if self.refusal else self._proposals.next()
        if trial is None:
            is_over = self.refusal or self._proposals.is_over
            return Searcher.FINISHED if is_over else None
        self._running[trial_id] = trial
        self._watch(trial)
        # As a text: Ray takes inner tables and lists for searches of its own.
        return {"number": trial.number, "parameters": json.dumps(dict(trial.parameters))}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Take in a report of a configuration that goes on."""
        trial, report = self._running[trial_id], Report.from_table(json.loads(result[_REPORT]))
        self.refusal = self.refusal or report.refusal
        self._proposals.reported(trial, report)
        self._watch(trial)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Take in the last report, and that a configuration is over."""
        trial = self._running.pop(trial_id)
        if self.refusal:
            return
        if error:
            self._proposals.ended(trial, "its process ended")
        else:
            assert result is not None
            report = Report.from_table(json.loads(result[_REPORT]))
            self.refusal = report.refusal
            if self.refusal:
                return
            self._proposals.reported(trial, report)
            self._proposals.ended(trial)
        self._watch(trial)

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: the ledger has it."""

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing."""


class _Refused(Stopper):
    """Ends all once nothing can be judged."""

    def __init__(self, searcher: _Searcher) -> None:
        self._searcher = searcher

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        """Return whether to end all."""
        return bool(self._searcher.refusal)


def _configs(space: Space) -> list[SimulationConfig]:
    """Return settings that name all that the runs of a space need."""
    plan = space.plan({"trial": {}}, held_out=False, reference="trial")
    return [plan.config("trial", space.seeds[0])]


def _here() -> PlacementGroupFactory:
    """Return what keeps an actor on the node of this process, and takes none of its cores."""
    own = {"ray.io/node-id": str(ray.get_runtime_context().get_node_id())}
    # Of nothing at all there is no bundle.
    return PlacementGroupFactory([{"memory": 1}], bundle_label_selector=[own])


@contextmanager
def _quiet_ray(workers: int, folder: Path | None = None) -> Iterator[str]:
    """Start Ray on this machine alone and without a word, unless this process is connected to one.

    Args:
        workers: cores.
        folder: of the search, which remembers where Ray's files are as long as they are there.

    Yields:
        A folder for the files of Ray Tune.
    """
    log, is_ours = logging.getLogger("ray"), not ray.is_initialized()
    # Ray's ports are open to the network, and whom they let in may run code.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    own = {**_QUIET, **token} if is_ours else _QUIET
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    level, terminated = log.level, signal.getsignal(signal.SIGTERM)
    in_main = threading.current_thread() is threading.main_thread()
    with _temporary(folder) as place:
        try:
            if is_ours:
                _read_settings()
                ray.init(
                    address="local",
                    num_cpus=workers,
                    include_dashboard=False,
                    logging_level=logging.CRITICAL,
                    log_to_driver=False,
                    _temp_dir=f"{place}/ray",
                )
                # Ray takes the place of who asked to hear it.
                if in_main:
                    signal.signal(signal.SIGTERM, terminated)
            log.setLevel(logging.CRITICAL)
            yield f"{place}/results"
        finally:
            if is_ours:
                ray.shutdown()
            log.setLevel(level)
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            if is_ours:
                _read_settings()


@contextmanager
def _temporary(folder: Path | None) -> Iterator[str]:
    """Yield a temporary folder; if a search in this folder was killed, remove the one that it had.

    Ray's sockets need a short path: the folder of the search may have a long one.
    """
    if folder is not None:
        _remove_left(folder / _PLACE)
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as place,
        Path(place, _HELD).open("w", encoding="utf-8") as lock,
    ):
        hold(lock.fileno())
        if folder is None:
            yield place
            return
        write_text(f"{place}\n", folder / _PLACE)
        try:
            yield place
        finally:
            (folder / _PLACE).unlink(missing_ok=True)


def _remove_left(note: Path) -> None:
    """Remove the temporary folder that a note names, if it is one of ours that nobody uses."""
    with suppress(OSError, ValueError):
        place = Path(note.read_text(encoding="utf-8").removesuffix("\n"))
        is_ours = place.parent == Path(tempfile.gettempdir()) and place.name.startswith(_PREFIX)
        # A search's folder may be a copy, from another machine or of a search that goes on.
        lock = place / _HELD
        if is_ours and lock.stat().st_uid == os.getuid() and not is_held(lock):
            shutil.rmtree(place, ignore_errors=True)


def _read_settings() -> None:
    """Let Ray read its settings anew, which it has read when it was imported."""
    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")
