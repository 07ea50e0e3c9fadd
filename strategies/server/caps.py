"""How much of what nodes claim counts: caps against running medians of what others claim.

A median over nodes, each with its last reply only, does not move for fewer liars than half of the
nodes heard lately, however often they answer. Until enough nodes have been heard there is no such
median; a merge then keeps its few updates until there is, so that the first reply of a run cannot
own the model either.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from statistics import median
from typing import Any

from fedstale.strategies.arrays import Array, Model, norm_of, scale
from fedstale.strategies.server.merge import Merge, Merged
from fedstale.strategies.weighting.base import Weighting

FEW = 3
"""Nodes below which a merge that closes early is not capped: two numbers have no outlier."""
MOST_EARLY = 20
"""Updates that wait at most, where few nodes answer often."""


@dataclass(slots=True)
class Cap:
    """A multiple of the median over the nodes heard last."""

    times: float | None
    """The multiple, >= 1; None for no cap at all."""
    window: int
    """Nodes looked back on, >= 1."""
    enough: int
    """Nodes that must have been heard, from 1 to `window`."""
    _last: dict[int, float] = field(default_factory=dict)
    _median: float = inf

    def hear(self, node_id: int, value: float) -> None:
        """Note what a node says, in place of what it said before."""
        if self.times is None:
            return
        self._last.pop(node_id, None)
        self._last[node_id] = value
        if len(self._last) > self.window:
            del self._last[next(iter(self._last))]
        self._median = median(self._last.values())

    @property
    def settled(self) -> bool:
        """Whether enough nodes have been heard, or there is no cap."""
        return self.times is None or len(self._last) >= self.enough

    def limit(self, value: float, *, few: int | None = None) -> float:
        """Return a value or the cap, whichever is less.

        Args:
            value: what a node says.
            few: nodes that are enough for this once; not given, those of `settled`.
        """
        enough = self.enough if few is None else few
        if self.times is None or len(self._last) < enough:
            return value
        return min(value, self.times * self._median)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {"last": [[node_id, value] for node_id, value in self._last.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._last = {int(node_id): float(value) for node_id, value in state["last"]}
        self._median = median(self._last.values()) if self._last else inf


@dataclass(frozen=True, slots=True)
class _Early:
    job: Merged
    delta: Model
    counts: Model
    examples: float
    metrics: Mapping[str, float]


@dataclass(slots=True)
class CappedMerge(Merge):
    """A merge that trusts numbers of examples, and norms of early updates, up to a cap only.

    Updates that come before both caps have settled wait: at most `MOST_EARLY` of them. They are
    added in their order as soon as they have, or when the merge closes; so where nothing is capped
    the sums are those of `Merge` to the last bit. Later updates have been clipped by the gate.
    """

    cap: Cap = field(kw_only=True)
    norms: Cap = field(kw_only=True, default_factory=lambda: Cap(None, 1, 1))
    _early: list[_Early] = field(default_factory=list)

    def add(
        self,
        job: Merged,
        delta: Model,
        counts: Model,
        *,
        examples: float,
        metrics: Mapping[str, float],
    ) -> None:
        """Add an update, or let it wait; arguments as in `Merge.add`."""
        if self._is_settled and not self._early:
            capped = self.cap.limit(examples, few=FEW)
            Merge.add(self, job, delta, counts, examples=capped, metrics=metrics)
            return
        self._early.append(_Early(job, delta, counts, examples, metrics))
        self.jobs.append(job)
        if self._is_settled or len(self._early) >= MOST_EARLY:
            self._add_early()

    def settle(self, weighting: Weighting) -> None:
        """Add what waits for the cap, then what waits for the whole merge."""
        self._add_early()
        Merge.settle(self, weighting)
        self._add_early()

    def finish(self) -> tuple[Model, dict[str, Array]]:
        """Return the merged updates, as `Merge.finish` does."""
        self._add_early()
        return Merge.finish(self)

    @property
    def _is_settled(self) -> bool:
        return self.cap.settled and self.norms.settled

    def _clip(self, delta: Model) -> None:
        if self.norms.times is None:
            return
        norm = norm_of(delta)
        limit = self.norms.limit(norm, few=FEW)
        if limit < norm:
            scale(delta, limit / norm)

    def _add_early(self) -> None:
        early, self._early = self._early, []
        waiting = {one.job.message_id for one in early}
        if waiting:
            self.jobs = [job for job in self.jobs if job.message_id not in waiting]
        for one in early:
            self._clip(one.delta)
            Merge.add(
                self,
                one.job,
                one.delta,
                one.counts,
                examples=self.cap.limit(one.examples, few=FEW),
                metrics=one.metrics,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what `Merge.state_dict` does, and the updates that wait for the cap."""
        early = [
            {
                "job": asdict(one.job),
                "delta": dict(one.delta),
                "counts": dict(one.counts),
                "examples": one.examples,
                "metrics": dict(one.metrics),
            }
            for one in self._early
        ]
        return Merge.state_dict(self) | {"early": early}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, on the same current version."""
        Merge.load_state_dict(self, state)
        self._early = [_Early(**one | {"job": Merged(**one["job"])}) for one in state["early"]]
