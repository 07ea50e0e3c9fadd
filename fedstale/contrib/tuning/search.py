"""Configurations that are tried: Optuna proposes and remembers them, and ASHA decides at rungs.

Optuna's study is a file in the folder of the search. A search that goes on reads it, and asks again
for what was not over; Optuna draws with a seed of each configuration's own, so that it proposes
what it would have proposed.

ASHA counts time in whatever a report calls time. Here that is a power of its reduction factor for
each rung, so that its milestones are the rungs, whatever instants of virtual time these are. It is
told from the study what has been reported already.

References:
    Li, Jamieson, Rostamizadeh, Gonina, Ben-tzur, Hardt, Recht, Talwalkar. A System for Massively
    Parallel Hyperparameter Tuning. MLSys 2020.
    Akiba, Sano, Yanase, Ohta, Koyama. Optuna: A Next-generation Hyperparameter Optimization
    Framework. KDD 2019.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import optuna
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from fedstale.contrib.tuning.space import Parameters, Search, Space, Stop
from fedstale.errors import ConfigError

STUDY = "study.db"
WORST = 1e300
"""What a failure counts as; finite, because ASHA interpolates between scores."""

_GROWING = ("trials", "budget")
"""Keys that may be others when a search goes on: they say only when it is enough."""

Status = Literal["open", "complete", "stopped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a configuration has come to at a rung, or at the end."""

    rung: int
    """Number of the instant: `Space.instants_s` has them."""
    value: float
    """Of the objective; NaN if a run failed."""
    n_never: int = 0
    """Runs that have not reached its target."""
    failure: str = ""
    """Why a run failed; empty if none did."""
    refusal: str = ""
    """Why no configuration can be judged; empty if it can."""
    wall_s: float = 0.0
    """What the way from the rung before took."""

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> "Report":
        """Read a report that was written down; JSON has no NaN."""
        return cls(**{**table, "value": math.nan if table["value"] is None else table["value"]})

    def table(self) -> dict[str, Any]:
        """Return the report as `from_table` reads it."""
        return {**asdict(self), "value": self.value if math.isfinite(self.value) else None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One configuration."""

    number: int
    parameters: Parameters
    """Values of the keys that are searched."""
    reports: tuple[Report, ...] = ()
    status: Status = "open"
    """open while it goes on, complete at the end, stopped at a rung, or failed."""
    reason: str = ""
    """Why it failed."""

    @property
    def last(self) -> Report | None:
        """The last report, if there is one."""
        return self.reports[-1] if self.reports else None

    @property
    def wall_s(self) -> float:
        """Seconds that it took."""
        return sum(report.wall_s for report in self.reports)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchJob:
    """A search, as its process is given it."""

    space: Space
    folder: Path
    """Of the search, as a whole path; it exists."""
    search: Search = "tpe"
    stop: Stop = "asha"
    seed: int = 0
    """Of all proposals."""
    workers: int | None = 1
    """Configurations at a time; with one, the same search gives the same result. None takes one for
    each core of a cluster."""
    address: str | None = None
    """Of the cluster that is joined, whose nodes carry out runs; None of this machine."""


class Proposals:
    """What Optuna proposes and ASHA decides; leaving the context closes the study."""

    def __init__(self, task: SearchJob) -> None:
        """Open the study in the folder of a search, new or the one that is in it.

        Raises:
            ConfigError: its file cannot be read.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.task, self.space = task, task.space
        self._asked: dict[int, optuna.Trial] = {}
        path = task.folder / STUDY
        directions = optuna.study.StudyDirection
        is_lower_better = self.space.objective.is_lower_better
        direction = directions.MINIMIZE if is_lower_better else directions.MAXIMIZE
        try:
            self._storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
            self._study = optuna.create_study(
                study_name="search", storage=self._storage, direction=direction, load_if_exists=True
            )
        except (SQLAlchemyError, RuntimeError, ValueError) as problem:
            raise ConfigError(
                f"{str(path)!r} cannot be read ({type(problem).__name__}): choose another folder, "
                "or remove it to search again; runs that are done are not repeated"
            ) from None

    def __enter__(self) -> "Proposals":
        return self

    def __exit__(self, *problem: object) -> None:
        """Close the file."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    def require_same(self) -> None:
        """Check that the study is of this search, or make it so if it is new.

        Raises:
            ConfigError: it is of another.
        """
        task, kept = self.task, self._study.user_attrs
        how = {"--search": task.search, "--stop": task.stop, "--seed": task.seed}
        asked = {key: json.loads(json.dumps(v)) for key, v in {**how, **self.space.table}.items()}
        changed = [
            f"{key} = {kept.get(key)!r} instead of {asked.get(key)!r}"
            for key in {**kept, **asked}
            if kept and key not in _GROWING and kept.get(key) != asked.get(key)
        ]
        if changed:
            raise ConfigError(
                f"out = {str(task.folder)!r} holds another search, with {', '.join(changed)}: "
                "choose another folder"
            )
        for key, value in asked.items():
            self._study.set_user_attr(key, value)

    @property
    def trials(self) -> list[Trial]:
        """All configurations, by number; of those that were asked for again the last state."""
        kept = (one for one in self._study.trials if "number" in one.user_attrs)
        found = {trial.number: trial for trial in map(_trial, kept)}
        return [found[number] for number in sorted(found)]

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be tried."""
        trials = self.trials
        return self._is_enough(trials) and all(trial.status != "open" for trial in trials)

    def take_up(self) -> None:
        """Ask again for what another process has left open, under its number."""
        waiting = {
            one.user_attrs["number"] for one in self._study.get_trials(states=[TrialState.WAITING])
        }
        for left in self._study.get_trials(states=[TrialState.RUNNING]):
            about = dict(left.user_attrs)
            if about and about["number"] not in waiting:
                self._study.enqueue_trial(left.params, user_attrs=about)
            self._study.tell(left.number, state=TrialState.FAIL)

    def next(self) -> Trial | None:
        """Start the next configuration; None if there are enough."""
        while waiting := self._study.get_trials(states=[TrialState.WAITING]):
            trial = _trial(waiting[0])
            self._ask(trial.number)
            if trial.status == "open":
                return trial
            # The process that left it open was killed before Optuna was told.
            self._tell(trial)
        trials = self.trials
        if self._is_enough(trials):
            return None
        return Trial(number=len(trials), parameters=self._ask(len(trials)))

    def reported(self, trial: Trial) -> None:
        """Keep what a configuration has come to."""
        self._asked[trial.number].set_user_attr("state", _state(trial))

    def ended(self, trial: Trial, failure: str = "") -> Trial:
        """Keep how a configuration ended, and return it with that."""
        last = trial.last
        reason = failure or (last.failure if last else "")
        is_at_end = last is not None and last.rung == len(self.space.rungs_s)
        status: Status = "failed" if reason else "complete" if is_at_end else "stopped"
        trial = replace(trial, status=status, reason=reason)
        self.reported(trial)
        self._tell(trial)
        return trial

    def _ask(self, number: int) -> Parameters:
        """Return the parameters that Optuna proposes."""
        self._study.sampler = self._sampler(number)
        asked = self._asked[number] = self._study.ask(dict(self.space.domains))
        asked.set_user_attr("number", number)
        return asked.params

    def _tell(self, trial: Trial) -> None:
        """Tell Optuna how a configuration ended; a failure is the worst that can be."""
        asked, last = self._asked.pop(trial.number), trial.last
        for report in trial.reports:
            asked.report(report.value, step=report.rung)
        if trial.status == "stopped":
            self._study.tell(asked, state=TrialState.PRUNED)
            return
        worst = WORST if self.space.objective.is_lower_better else -WORST
        self._study.tell(asked, last.value if trial.status == "complete" and last else worst)

    def _is_enough(self, trials: Sequence[Trial]) -> bool:
        if self.space.trials is not None and len(trials) >= self.space.trials:
            return True
        wall_s = sum(trial.wall_s for trial in trials) / (self.task.workers or math.inf)
        return wall_s >= self.space.budget_s

    def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
        """Make the sampler of one configuration, with a seed of its own."""
        sequence = np.random.SeedSequence(self.task.seed, spawn_key=(number,))
        seed = int(sequence.generate_state(1)[0])
        samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
        return samplers[self.task.search](seed=seed)


def _trial(kept: optuna.trial.FrozenTrial) -> Trial:
    """Return a configuration as Optuna keeps it."""
    state: dict[str, Any] = kept.user_attrs.get("state", {})
    reports = tuple(Report.from_table(table) for table in state.pop("reports", ()))
    # Of one that waits to be asked for again, parameters are not drawn yet.
    parameters = kept.params or kept.system_attrs["fixed_params"]
    number: int = kept.user_attrs["number"]
    return Trial(number=number, parameters=parameters, reports=reports, **state)


def _state(trial: Trial) -> dict[str, Any]:
    """Return a configuration's state as `_trial` reads it."""
    tables = [report.table() for report in trial.reports]
    return {"reports": tables, "status": trial.status, "reason": trial.reason}
