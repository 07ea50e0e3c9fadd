"""The model's side of a run: what accepted replies are merged into, and the step that it becomes.

It knows models and weights; of nodes, clocks and messages it knows nothing. A merge that cannot
become a step is dropped, and the run goes on as if it had not been.
"""

from math import nan
from typing import TYPE_CHECKING

import numpy as np

from fedstale.errors import FedstaleError, ProtocolError
from fedstale.strategies.arrays import Model, add_scaled, copy_of, is_finite
from fedstale.strategies.schedule import AdaSync, SmoothedLoss
from fedstale.strategies.server.caps import Cap, CappedMerge
from fedstale.strategies.server.jobs import SentJob
from fedstale.strategies.server.merge import Merge, Merged
from fedstale.strategies.server.robust_merge import RobustMerge
from fedstale.strategies.server.validation import Answer
from fedstale.strategies.server.versions import Snapshot, Versions
from fedstale.strategies.server_optimizer import ServerOptimizer
from fedstale.strategies.weighting.base import Update, Weighting

if TYPE_CHECKING:
    from fedstale.strategies.strategy import StaleStrategy

_DROPS_IN_A_ROW = 100


class Merging:
    """The merge in the making, and what turns it into the next version."""

    def __init__(
        self,
        strategy: "StaleStrategy",
        weighting: Weighting,
        optimizer: ServerOptimizer,
        *,
        versions: Versions,
        examples: Cap,
        norms: Cap,
    ) -> None:
        """Open the first merge.

        Args:
            strategy: the settings.
            weighting: of late updates; learns from every step.
            optimizer: makes the steps.
            versions: of the model.
            examples: cap on numbers of examples.
            norms: cap on norms of updates.
        """
        self._strategy, self._versions = strategy, versions
        self._examples, self._norms = examples, norms
        self.weighting, self.optimizer = weighting, optimizer
        size = strategy.schedule.buffer_size
        self.loss = SmoothedLoss(size.smoothing if isinstance(size, AdaSync) else 0.0)
        self.dropped = 0
        """Merges dropped in a row."""
        self.merge = self.opened()

    def opened(self) -> Merge:
        """Open a merge on the current version."""
        current, normalise = self._versions.current, self._strategy.normalise
        rule = self._strategy.robust
        if rule is None:
            self.merge = CappedMerge(current, normalise, cap=self._examples, norms=self._norms)
        else:
            self.merge = RobustMerge(current, normalise, rule=rule)
        return self.merge

    @np.errstate(over="ignore", invalid="ignore")  # infinite sums are found by `step`
    def accept(self, job: SentJob, answer: Answer) -> int:
        """Weigh an update and add it to the merge; return its staleness in versions."""
        versions = self._versions
        base, current = versions[job.base_version].floats, versions.current.floats
        staleness = versions.version - job.base_version
        if self._strategy.update == "model" and staleness:
            _relate_to(answer.delta, base, current)
        self.merge.take(
            Merged(job.message_id, job.node_id, job.base_version),
            Update(
                delta=answer.delta,
                base=base,
                current=current,
                staleness=staleness,
                node_id=job.node_id,
            ),
            answer.counts,
            weighting=self.weighting,
            examples=answer.examples,
            metrics=answer.metrics,
        )
        return staleness

    def is_full(self, concurrency: int) -> bool:
        """Return whether there are as many updates as the schedule waits for.

        Args:
            concurrency: jobs that are out at a time.
        """
        size = self._strategy.schedule.buffer_size
        if isinstance(size, AdaSync):
            size = size.size(
                first_loss=self.loss.first, loss=self.loss.now, concurrency=concurrency
            )
        return size is not None and len(self.merge.jobs) >= size

    def is_enough(self) -> bool:
        """Return whether a deadline may close the merge: a robust rule needs some nodes."""
        rule = self._strategy.robust
        return rule is None or len({job.node_id for job in self.merge.jobs}) >= rule.least

    @np.errstate(over="ignore", invalid="ignore")
    def step(self) -> Snapshot:
        """Return the model after the merge, which is used up; open the next one afterwards.

        Raises:
            ProtocolError: the merge cannot become a step, and is dropped.
            FedstaleError: that happened too often in a row.
        """
        merge, before = self.merge, self._versions.current
        try:
            merge.settle(self.weighting)
            delta, counts = merge.finish()
            floats = copy_of(before.floats)
            self.optimizer.step(floats, delta, staleness=merge.staleness)
            if not is_finite(floats):
                raise ProtocolError("its merge left the finite range")
        except ProtocolError as problem:
            self._drop(str(problem))
            raise
        self.weighting.observe(before.floats, floats, self.optimizer.rate)
        self.dropped = 0
        return before.stepped(floats, counts)

    def learn(self, metrics: dict[str, float]) -> None:
        """Take note of the training loss behind a step."""
        self.loss.add(metrics.get(self._strategy.loss_key, nan))

    def _drop(self, reason: str) -> None:
        """Forget a merge; the optimizer may have seen infinity, and forgets everything."""
        self.optimizer.reset()
        self.weighting.drop()
        self.dropped += 1
        if self.dropped >= _DROPS_IN_A_ROW:
            raise FedstaleError(
                f"{self.dropped} merges in a row were dropped, the last one because {reason}: "
                f"lower the server's rate, see what {self.weighting!r} does, or merge more updates"
            )


def _relate_to(delta: Model, base: Model, current: Model) -> None:
    """Turn a change against the base into one against the current model, in place."""
    add_scaled(delta, base, 1.0)
    add_scaled(delta, current, -1.0)
