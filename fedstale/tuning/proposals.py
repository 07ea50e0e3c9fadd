"""What is tried next, which Optuna proposes, and what is stopped, which ASHA decides at rungs.

ASHA counts time in whatever a report calls time. Here that is a power of its reduction factor for
each rung, so that its milestones are the rungs, whatever instants of device time these are.

A file has all that was proposed and reported. A search that goes on tells it to Optuna and to ASHA
in the order in which it happened; and Optuna draws with a seed of each configuration's own, so that
it proposes what it would have proposed.

References:
    Li, Jamieson, Rostamizadeh, Gonina, Ben-tzur, Hardt, Recht, Talwalkar. A System for Massively
    Parallel Hyperparameter Tuning. MLSys 2020.
    Akiba, Sano, Yanase, Ohta, Koyama. Optuna: A Next-generation Hyperparameter Optimization
    Framework. KDD 2019.
"""

import math
import warnings
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstale.tuning.space import Choices, Parameters, Range, Search, Space, Stop
from fedstale.tuning.trials import Ledger, Report, Trial

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import Trial as Asked
    from ray.tune.schedulers import TrialScheduler

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
