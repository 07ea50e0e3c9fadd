"""Population-based training: at each rung the worst configurations become forks of the best.

All configurations come to a rung before anything is decided there. Then the worst quarter stops,
and each is replaced by a fork: it goes on from the run folders of one of the best quarter, drawn at
random, with other numbers. What comes out is a schedule of settings, and is judged as one.

Numbers are times .8 or 1.2, a step or a neighbour, and one in four is drawn anew; texts and
switches are the parent's, because another strategy cannot go on from its state. Ray has a scheduler
of this name, but it draws from the streams of the whole process and cannot be told what happened
before it was killed. Here decisions depend on the seed and on the values alone, with any number of
workers.

Reference:
    Jaderberg, Dalibard, Osindero, Czarnecki, Donahue, Razavi, Vinyals, Green, Dunning, Simonyan,
    Fernando, Kavukcuoglu. Population Based Training of Neural Networks. arXiv 1711.09846, 2017.
"""

import math
from pathlib import Path

import numpy as np

from fedstale.tuning.proposals import How, Proposals, Steps
from fedstale.tuning.space import Choices, Plain, Range, Space
from fedstale.tuning.trials import Ledger, Status, Trial, fork

CUT = 0.25
"""Share of the population that is replaced at a rung, and that is forked."""
_DRAWN_ANEW, _FACTORS = 0.25, (0.8, 1.2)
_STREAM = 1


class PopulationBasedTraining(Proposals):
    """Configurations of a population, and the forks that replace its worst."""

    def __init__(self, space: Space, how: How, ledger: Ledger, folder: Path) -> None:
        """Begin with what a search of this kind draws, or go on.

        Args:
            space: that is searched.
            how: it is searched.
            ledger: remembers all; one that is not over is made again from the reports beside the
                runs, which need not be run again.
            folder: of the whole search.
        """
        self._is_done = bool(ledger.trials) and not ledger.unfinished
        if not self._is_done:
            ledger.trials.clear()
        self._rung, self._queue = 0, list[Trial]()
        super().__init__(space, how, ledger)
        self._folder = folder

    @property
    def is_over(self) -> bool:
        """Whether all have come to the end."""
        return self._is_done

    def next(self) -> Trial | None:
        """Return what goes on to the rung of this generation; None while it waits for others."""
        if self._queue:
            return self._queue.pop(0)
        return super().next() if self._rung == 0 else None

    def steps(self, trial: Trial) -> Steps:
        """Return the rung of this generation."""
        return Steps(first=self._rung, last=self._rung)

    def ended(self, trial: Trial, failure: str = "") -> None:
        """Keep how a configuration came to its rung; replace the worst if it was the last."""
        report = trial.last
        trial.reason = failure or (report.failure if report else "")
        if trial.reason or self._rung == len(self.space.rungs_s):
            self._close(trial, "failed" if trial.reason else "complete")
        mine = [each for each in self.ledger.trials if self._is_here(each)]
        n_begun = len(self.ledger.trials) >= self._size
        if n_begun and not self._queue and all(self._has_come(each) for each in mine):
            self._breed(mine)
        self.ledger.write()

    @property
    def _size(self) -> int:
        return len(self._grid) if self._grid is not None else int(self.space.trials or 0)

    def _is_here(self, trial: Trial) -> bool:
        """Whether a configuration is of the generation that comes to this rung."""
        return trial.status == "open" or self._has_come(trial)

    def _has_come(self, trial: Trial) -> bool:
        last = trial.last
        return trial.failed_at == self._rung or (last is not None and last.rung == self._rung)

    def _breed(self, mine: list[Trial]) -> None:
        """Replace the worst by forks of the best, and let all go on to the next rung."""
        rung, self._rung = self._rung, self._rung + 1
        if rung == len(self.space.rungs_s):
            self._is_done = True
            return
        order = sorted(mine, key=lambda trial: (self._cost(trial), trial.number))
        n = max(round(CUT * len(order)), 1)
        best = [trial for trial in order[:n] if trial.status == "open"]
        if not best:
            for trial in order:
                if trial.status == "open":
                    self._close(trial, "stopped")
            self._is_done = True
            return
        n_failed = sum(trial.status == "failed" for trial in order)
        for place, worst in enumerate(order[-max(n, n_failed) :]):
            if worst.status == "open":
                self._close(worst, "stopped")
            sequence = np.random.SeedSequence(self.how.seed, spawn_key=(_STREAM, rung, place))
            rng = np.random.default_rng(sequence)
            parent = best[int(rng.integers(len(best)))]
            self.ledger.trials.append(self._forked(parent, rung, rng))
        self._queue = self.ledger.unfinished

    def _forked(self, parent: Trial, rung: int, rng: np.random.Generator) -> Trial:
        before = parent.now
        after = {
            key: perturbed(domain, before[key], rng) for key, domain in self.space.domains.items()
        }
        changed = {key: value for key, value in after.items() if value != before[key]}
        child = Trial(
            number=len(self.ledger.trials),
            parameters=parent.parameters,
            changes=[*parent.changes, *([(rung, changed)] if changed else [])],
            parent=parent.number,
            began=len(self.ledger.ended),
        )
        fork(self.space, parent, child, self._folder)
        return child

    def _close(self, trial: Trial, status: Status) -> None:
        trial.ended = len(self.ledger.ended)
        trial.status = status
        if status == "failed":
            trial.failed_at = self._rung

    def _cost(self, trial: Trial) -> float:
        """Return what is to be small, of a report at this rung."""
        last = trial.last
        if trial.status == "failed" or last is None or math.isnan(last.values[0]):
            return math.inf
        is_lower_better = self.space.objectives[0].is_lower_better
        return last.values[0] if is_lower_better else -last.values[0]


def perturbed(domain: Choices | Range, value: Plain, rng: np.random.Generator) -> Plain:
    """Return another value of a key: near the one that it has, or one in four times any.

    Args:
        domain: the values that it may have.
        value: that it has.
        rng: draws.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> perturbed(Choices(values=("fedbuff", "refl")), "refl", rng)
        'refl'
        >>> perturbed(Range(low=0.01, high=1.0), 0.5, rng) in (0.4, 0.6)
        True
    """
    if not domain.is_numeric:
        return value
    is_anew, is_up = rng.random() < _DRAWN_ANEW, bool(rng.integers(2))
    if isinstance(domain, Choices):
        values = sorted(domain.values, key=float)
        place = values.index(value) + (1 if is_up else -1)
        anew = int(rng.integers(len(values)))
        return values[anew if is_anew else min(max(place, 0), len(values) - 1)]
    if is_anew:
        return domain.at_share(float(rng.random()))
    number = float(value)
    moved = number * _FACTORS[is_up]
    least = domain.step or (1.0 if domain.is_whole else 0.0)
    if abs(moved - number) < least:
        moved = number + (least if is_up else -least)
    return domain.nearest(moved)
