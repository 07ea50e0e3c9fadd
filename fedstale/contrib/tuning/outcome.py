"""Tuning as a whole: search, then judge what was found on seeds and devices that did not tune.

The best configuration of the search, its runner-up and the app's own defaults are compared as
`fedstale compare` does it. Only this comparison says what is best.
"""

import html
import logging
import os
import secrets
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import tomli_w

from fedstale.api import LOG, RUNS, compare, result_folder
from fedstale.cluster import check_address
from fedstale.comparison import LEAST, Comparison, Estimate, PlannedRun, difference
from fedstale.config import SimulationConfig, as_options
from fedstale.contrib.tuning.search import STUDY, Proposals, SearchJob, Trial
from fedstale.contrib.tuning.space import Search, Space, Stop
from fedstale.errors import ConfigError, needs
from fedstale.files import hold
from fedstale.flower import command_line
from fedstale.live import progress_line
from fedstale.parallel import WorkerPool
from fedstale.reports import write_text
from fedstale.runs import CONFIG, make_folder
from fedstale.strategies.types import n_cores
from fedstale.traces import outline

CSV, BEST, PLAN, HELD_OUT = "trials.csv", "best.toml", "plan.toml", "held-out"
_LOCK = ".lock"
_BEST, _NEXT, _DEFAULTS = "best", "runner-up", "defaults"
_ONE_SEED = (
    "seeds = [{}]: one seed alone may prefer what diverges on others; three cost three times as "
    "much and are worth it"
)
_ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray lets its workers wait for everything else, as 15 less important.
    "RAY_worker_niceness": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # An interrupt is ours to hear.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # Nothing of Ray's own state is needed again.
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",
}
"""What Ray and Ray Tune read when they are imported."""


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Tuning:
    """What a search found, and how it does on held-out seeds and devices."""

    space: Space
    folder: Path
    tried: tuple[Trial, ...]
    """All configurations, by number."""
    comparison: Comparison
    """On held-out seeds and devices: `best`, `runner-up` and `defaults`, the reference."""

    __repr__ = outline

    @property
    def ranked(self) -> list[Trial]:
        """Configurations that came to the end, best first."""
        return _ranked(self.space, self.tried)

    @property
    def best(self) -> Trial:
        """The configuration that was best in the search; `verdict` says what that is worth."""
        return self.ranked[0]

    @property
    def trials(self) -> pd.DataFrame:
        """One row a configuration, as in trials.csv."""
        return table_of(self.space, self.tried)

    @property
    def gain(self) -> Estimate:
        """Best minus defaults in the objective, paired by held-out seed."""
        end_s, of_run = self.space.until_s, self.space.objective.of_run
        ends = {
            one.name: {run.seed: of_run(run, end_s, end_s) for run in one.runs}
            for one in self.comparison.variants
        }
        known = {n: {s: x for s, x in own.items() if np.isfinite(x)} for n, own in ends.items()}
        return difference(known[_BEST], known[_DEFAULTS])

    @property
    def is_better(self) -> bool:
        """Whether the best configuration is shown to be better than the defaults."""
        return self.gain.high < 0 if self.space.objective.is_lower_better else self.gain.low > 0

    @property
    def options(self) -> str:
        """The best configuration as options of `fedstale simulate`, to paste."""
        return as_options(self.space.settings(self.best.parameters))

    @property
    def answer(self) -> str:
        """The settings to use, and what they cost on held-out seeds and devices."""
        name = _BEST if self.is_better else _DEFAULTS
        use = self.options if self.is_better else "the defaults, with no option,"
        return f"Use {use} for {self.comparison.cost(name)}."

    @property
    def verdict(self) -> str:
        """Whether the best configuration is better than the defaults, in sentences."""
        objective, gain = self.space.objective, self.gain
        name = f"Configuration {self.best.number}"
        if gain.n < LEAST:
            told = f", by {gain.ends()}" if gain.n else ""
            return f"{name} is not judged: {gain.n} of the {LEAST} held-out pairs it takes{told}."
        where = f"on {gain.n} held-out seeds its {objective.in_words} minus the defaults' is "
        where += gain.ends()
        is_bad = gain.low > 0 if objective.is_lower_better else gain.high < 0
        if self.is_better:
            return f"{name} is best: {where}, which leaves out 0."
        if is_bad:
            return f"{name} is worse than the defaults, which are best: {where}."
        return (
            f"{name} was best in the search, and is not shown to be better than the defaults: "
            f"{where}, which holds 0."
        )

    def _repr_html_(self) -> str:
        """Return the verdict and the configurations, as notebooks show them."""
        told = f"<p>{html.escape(self.verdict)}</p><p>{html.escape(self.answer)}</p>"
        return f"{told}{self.trials.to_html(index=False)}"


@command_line.quiet_console()
def tune(
    space: str | Path | Mapping[str, Any] | Space,
    *,
    out: str | Path | None = None,
    workers: int | None = None,
    search: Search = "tpe",
    stop: Stop = "asha",
    seed: int = 0,
    address: str | None = None,
    watch: Callable[[Trial], None] | None = None,
    progress: bool | None = None,
) -> Tuning:
    """Search settings on virtual time, and judge them on held-out seeds and devices.

    What is done is kept, so the same call goes on after an interrupt or a kill. Runs are processes
    of their own.

    Args:
        space: what to search, its TOML file or its table.
        out: folder of everything that is written; None takes a temporary one, which goes with the
            returned object.
        workers: configurations at a time; None takes one for each core, of the cluster if there
            is one. With one, the same call gives the same result.
        search: what proposes configurations: tpe or random.
        stop: asha stops those that are behind at the rungs, none stops nothing.
        seed: of all proposals.
        address: auto or HOST:PORT of a Ray cluster whose nodes run configurations; None of this
            machine.
        watch: called whenever a configuration begins, has reported, or is over.
        progress: whether a line on stderr shows how far the search is; None shows it on a terminal
            and in a notebook. With `watch` there is none.

    Raises:
        ConfigError: the space cannot be, the folder has another search, or nothing can be judged.
        KeyboardInterrupt: it was asked to stop; what is done is kept.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"workers = {workers}: expected a number of processes >= 1")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"seed = {seed!r}: expected a whole number >= 0")
    for name, value, kinds in (("search", search, Search), ("stop", stop, Stop)):
        if value not in get_args(kinds):
            raise ConfigError(f"{name} = {value!r}: expected one of {get_args(kinds)}")
    if find_spec("ray") is None:
        raise ConfigError(f"a search {needs('ray')}")
    if address is not None:
        check_address(address)
    space = Space.read(space)
    if len(space.seeds) == 1:
        logging.getLogger(__name__).warning("%s", _ONE_SEED.format(*space.seeds))
    progress = progress if watch is None else False
    workers = workers or (None if address else n_cores())
    with ExitStack() as stack:
        task = SearchJob(
            space=space,
            folder=result_folder(out, stack).resolve(),
            search=search,
            stop=stop,
            seed=seed,
            workers=workers,
            address=address,
        )
        with _taken(task):
            with Proposals(task) as proposals:
                proposals.require_same()
                is_over = proposals.is_over
            if not is_over:
                _search(task, watch, progress)
            with Proposals(task) as proposals:
                trials = proposals.trials
            options = {"workers": workers, "address": address, "progress": progress}
            found = _judged(space, task.folder, trials, options)
        weakref.finalize(found, stack.pop_all().close)
    return found


@contextmanager
def _taken(task: SearchJob) -> Iterator[None]:
    """Hold the folder of a search, which is empty or has one.

    Raises:
        ConfigError: it holds something else, or a search that goes on.
    """
    folder = task.folder
    if folder.is_dir() and any(folder.iterdir()) and not (folder / STUDY).is_file():
        raise ConfigError(
            f"out = {str(folder)!r} holds something that is no search: expected an empty folder "
            "or none"
        )
    make_folder(folder)
    with (folder / _LOCK).open("w", encoding="utf-8") as lock:
        if owner := hold(lock.fileno()):
            raise ConfigError(f"out = {str(folder)!r} is in use by a search, of {owner}: wait")
        yield


def _search(task: SearchJob, watch: Callable[[Trial], None] | None, progress: bool | None) -> None:
    """Try configurations in a process that has Ray for itself."""
    with progress_line(progress) as say, WorkerPool(_searched, task.folder / LOG) as pool:
        for _, event, what in pool.work([task], 1):
            if event in {"rejected", "died"}:
                raise ConfigError(what if event == "rejected" else f"the search ended: {what}")
            if event == "progress" and watch is not None:
                watch(what)
            elif event == "progress" and say is not None:
                say(f"configuration {what.number}: {what.status}")


def _searched(task: SearchJob, notify: Callable[[object], None]) -> None:
    """Try configurations, in a process that has imported nothing of Ray yet."""
    os.environ.update(_ENVIRONMENT)
    if task.address is None:
        # Ray's ports are open to the network, and whom they let in may run code.
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    from fedstale.contrib.tuning.engine import run_trials  # noqa: PLC0415 - imports Ray

    run_trials(task, notify)


def table_of(space: Space, trials: Sequence[Trial]) -> pd.DataFrame:
    """Tabulate the configurations: parameters, values at each rung, and how each ended."""
    objective, rows = space.objective, []
    for trial in trials:
        last, by_rung = trial.last, {report.rung: report.value for report in trial.reports}
        row: dict[str, object] = {"trial": trial.number, **trial.parameters}
        for rung, at_s in enumerate(space.instants_s):
            row[f"{objective.unit} at {at_s:.10g} s"] = by_rung.get(rung, np.nan)
        if objective.kind == "time":
            row["never"] = last.n_never if last else 0
        row["status"] = trial.status
        row["stopped_at_s"] = (
            space.instants_s[last.rung] if last and trial.status == "stopped" else np.nan
        )
        rows.append({**row, "reason": trial.reason, "wall_s": round(trial.wall_s, 3)})
    return pd.DataFrame(rows)


def _judged(
    space: Space, folder: Path, trials: Sequence[Trial], options: Mapping[str, Any]
) -> Tuning:
    """Compare what was found with the defaults, by options of `compare`, and write everything."""
    write_text(table_of(space, trials).to_csv(index=False, lineterminator="\n"), folder / CSV)
    chosen = _chosen(space, trials)
    variants = {n: space.settings(t.parameters) for n, t in chosen.items()}
    plan = space.plan({**variants, _DEFAULTS: {}}, held_out=True, reference=_DEFAULTS)
    write_text(tomli_w.dumps(plan.table()), folder / PLAN)
    own = space.plan(variants, held_out=False, reference=_BEST).config(_BEST, space.seeds[0])
    write_text(tomli_w.dumps(replace(own, executor="auto").table()), folder / BEST)
    forget_others(plan.runs(folder / HELD_OUT / RUNS))
    comparison = compare(plan, out=folder / HELD_OUT, **options)
    return Tuning(space=space, folder=folder, tried=tuple(trials), comparison=comparison)


def forget_others(runs: Sequence[PlannedRun]) -> None:
    """Remove what is in the place of some runs, made with other settings.

    A search that goes on may find another best: what was held out before is not asked for again.
    """
    for run in runs:
        path = run.folder / CONFIG
        if path.is_file() and SimulationConfig.read(path).differing(run.config):
            shutil.rmtree(run.folder)


def _chosen(space: Space, trials: Sequence[Trial]) -> dict[str, Trial]:
    """Return the configurations that are to be judged, by the names of their variants."""
    over = _ranked(space, trials)
    if not over:
        failures = [trial.reason for trial in trials if trial.reason]
        why = f"; the first: {failures[0]}" if failures else ""
        raise ConfigError(
            f"{len(failures)} of {len(trials)} configurations failed and none came to its end{why}"
        )
    objective, n_seeds = space.objective, len(space.seeds)
    if objective.kind == "time" and all(t.reports[-1].n_never == n_seeds for t in over):
        raise ConfigError(
            f"objective = {objective.text!r}: no configuration reached it in any run until "
            f"{space.until_s:,.0f} s; expected a nearer target or a later until"
        )
    return dict(zip((_BEST, _NEXT), over, strict=False))


def _ranked(space: Space, trials: Sequence[Trial]) -> list[Trial]:
    """Rank the configurations that came to the end, best first."""
    over = [trial for trial in trials if trial.status == "complete"]
    sign = 1.0 if space.objective.is_lower_better else -1.0
    return sorted(over, key=lambda trial: (sign * trial.reports[-1].value, trial.number))
