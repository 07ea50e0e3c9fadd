"""The buffer: updates of clients come in, and become one server step.

An update takes one way through it: `Checks` limits it, the weighting weighs it, and a reducer
adds it to the others, either to a running mean or to what a robust rule combines. Where nothing has
to wait this happens as it comes, so that the memory of a mean is one model. What waits

- to be limited: early updates, which came before the running medians of `Checks` held. They are
  limited, or rejected, when the medians hold or when the buffer closes, and until then no weighting
  has seen them. Robust rules limit weights by themselves, and nothing waits for them;
- to be weighed: stale updates, if the weighting weighs those of a buffer together.

Stages see an update before and after it is weighed, and a mean before the server optimizer does.

The buffer knows models and weights, but no nodes, clocks and messages. Updates that cannot become a
step are discarded, and the run goes on as if they had not been. What devices measure of a version
they average in `Evaluations`. A metric that is NaN or infinite has no weight in a mean, so that one
device cannot hide what the others measured; a mean of nothing else is NaN.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from operator import attrgetter
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from flwr.app import ArrayRecord, MetricRecord

from fedstale.errors import FedstaleError, ProtocolError
from fedstale.strategies.robust import Median, Rule, aggregate, heaviest
from fedstale.strategies.server.checks import FEW, Checks
from fedstale.strategies.server.runtime import Runtime
from fedstale.strategies.server.versions import Snapshot, Versions
from fedstale.strategies.server_optimizer import ServerOptimizer
from fedstale.strategies.stages import Stage
from fedstale.strategies.types import (
    Array,
    ClientUpdate,
    Model,
    RejectionError,
    State,
    Stateful,
    add_scaled,
    copy_of,
    is_finite,
    numbers,
    scale,
    zeros_like,
)
from fedstale.strategies.weighting import Weighting

if TYPE_CHECKING:
    from fedstale.strategies.server.strategy import StaleStrategy

Normalise = Literal["examples", "buffer_size", "weights", "steps"]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
"""Measures a version on the server, from its number and its model."""
Sums = dict[str, list[float]]
"""Of each metric, the sum of its values times examples, and of these examples."""

MOST_EARLY = 20
"""Updates that wait to be limited at most, where few nodes answer often."""
WEIGHT_CAP = 1.5
"""Largest weight under a robust rule, times the median weight of the buffer."""
_DISCARDS_IN_A_ROW = 100


@dataclass(eq=False)
class Buffer(Stateful):
    """The updates of the next server step, and what turns them into the next version."""

    saved = ("weighting", "optimizer", "_reducer", "_discarded")

    strategy: "StaleStrategy"
    """The settings."""
    weighting: Weighting
    """Of stale updates; learns from every step."""
    optimizer: ServerOptimizer
    """Makes the steps."""
    versions: Versions
    """Of the model."""
    checks: Checks
    """Limits updates."""
    stages: Sequence[Stage] = ()
    """See updates on their way."""
    rejected: list[tuple[ClientUpdate, RejectionError]] = field(default_factory=list)
    """Early updates that were left out of the buffer again, and why; whoever reads them, clears."""

    def __post_init__(self) -> None:
        self._discarded = 0
        """Buffers discarded in a row."""
        self._added: dict[str, float] = {}
        """Metrics of the stages, of the last step."""
        self.open()

    def open(self) -> None:
        """Start empty, on the current version."""
        rule = self.strategy.robust
        self.updates: list[ClientUpdate] = []
        """All that came, in this order; a mean empties the arrays of those that it has summed."""
        self._stale: list[ClientUpdate] = []
        self._early: list[ClientUpdate] = []
        normalise = self.strategy.normalise
        self._reducer: Reducer = (
            RunningMean(normalise)
            if rule is None
            else RobustMean(self.versions.current, normalise, rule)
        )

    @np.errstate(over="ignore", invalid="ignore")  # infinite sums are found by `step`
    def add(self, update: ClientUpdate) -> None:
        """Add an update; the buffer owns its arrays from now on."""
        self.updates.append(update)
        self._early.append(update)
        waits = self.strategy.robust is None and not update.limited
        if not waits or len(self._early) >= MOST_EARLY:
            self._take_early()

    def is_enough(self) -> bool:
        """Return whether a deadline may close the buffer: a robust rule needs some nodes."""
        rule = self.strategy.robust
        return rule is None or len({update.node_id for update in self.updates}) >= rule.least

    @np.errstate(over="ignore", invalid="ignore")
    def step(self) -> Snapshot:
        """Close the buffer and return the model after its step; open the next one afterwards.

        Raises:
            ProtocolError: the updates cannot become a step, and are discarded; or none is left,
                since all of them came early and were rejected.
            FedstaleError: they were discarded too often in a row.
        """
        if self._early:
            self._take_early()
        if not self.updates:
            raise ProtocolError("none of its updates is left")
        before = self.versions.current
        try:
            if self._stale:
                self._weigh_stale()
            delta, counts = self._reducer.result()
            self._added = {}
            for stage in self.stages:
                self._added |= stage.step(delta, self.updates)
            floats = copy_of(before.floats)
            staleness = max(map(attrgetter("staleness"), self.updates))
            self.optimizer.step(floats, delta, staleness=staleness)
            after = before.stepped(floats, counts)
            if not is_finite(after.floats):
                raise ProtocolError("its server step left the finite range")
        except ProtocolError as problem:
            self._discard(str(problem))
            raise
        self.weighting.observe(before.floats, after.floats, self.optimizer.rate)
        self._discarded = 0
        return after

    def metrics(self) -> dict[str, float]:
        """Return metrics of clients, reduced as their updates are, and those of stages."""
        return self._reducer.metrics() | self._added

    def _take_early(self) -> None:
        """Limit the updates that wait for it, and reduce all but those rejected now."""
        early, self._early = self._early, []
        for update in early:
            try:
                if self.strategy.robust is None:
                    self.checks.limit(update, few=FEW)
            except RejectionError as problem:
                self.updates.remove(update)
                self.rejected.append((update, problem))
            else:
                self._take(update)

    def _take(self, update: ClientUpdate) -> None:
        """Weigh and reduce an update, or let it wait for the others that are stale."""
        if self.strategy.update == "model" and update.staleness:
            # A change against the base becomes one against the current model.
            add_scaled(update.delta, update.base, 1.0)
            add_scaled(update.delta, update.current, -1.0)
        for stage in self.stages:
            stage.accepted(update)
        if update.staleness and self.weighting.needs_whole_buffer:
            self._stale.append(update)
        else:
            self._reduce(update, self.weighting.weigh(update))

    def _weigh_stale(self) -> None:
        """Weigh the stale updates that wait; they are reduced last, and listed last."""
        stale, self._stale = self._stale, []
        self.updates.sort(key=stale.__contains__)
        weights = self.weighting.weigh_stale(stale, self._reducer.mean())
        for update, weight in zip(stale, weights, strict=True):
            self._reduce(update, weight)

    def _reduce(self, update: ClientUpdate, weight: float) -> None:
        update.weight = weight
        for stage in self.stages:
            stage.accepted(update)
        update.base, update.current = {}, {}
        self._reducer.add(update)

    def _discard(self, reason: str) -> None:
        """Forget the updates; the optimizer may have seen infinity, and forgets everything."""
        self.optimizer.reset()
        self.weighting.discard()
        self._discarded += 1
        if self._discarded >= _DISCARDS_IN_A_ROW:
            raise FedstaleError(
                f"{self._discarded} buffers in a row were discarded, the last one because {reason}:"
                f" lower the server's rate, see what {self.weighting!r} does, or raise buffer_size"
            )

    def state_dict(self) -> State:
        """Return the state for a checkpoint."""
        return super().state_dict() | {
            "updates": [update.state_dict() for update in self.updates],
            "stale": [self.updates.index(update) for update in self._stale],
            "early": [self.updates.index(update) for update in self._early],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, on the same current version."""
        self.open()
        super().load_state_dict(state)
        current = self.versions.current.floats
        self.updates = [ClientUpdate.from_state(update, current) for update in state["updates"]]
        self._stale = [self.updates[i] for i in state["stale"]]
        self._early = [self.updates[i] for i in state["early"]]
        waiting = {*state["stale"], *state["early"]}
        reduced = [update for i, update in enumerate(self.updates) if i not in waiting]
        self._reducer.continue_after(reduced)


@dataclass(slots=True)
class RunningMean(Stateful):
    """Sums weighed updates as they come, and keeps none of them.

    The sum is divided by the buffer size, by the number of examples behind it, or by the sum of
    weights. The last undoes a penalty that all updates of a buffer share, and at buffer size 1 it
    undoes every penalty. Metrics are averaged by examples.

    By "steps" it is FedNova's mean: with p the shares of examples and tau the numbers of local
    steps, it is (sum of p tau) x (sum of p delta / tau). Where all took as many it is the mean by
    examples but for rounding. A device of plain SGD is meant, whose update grows with its steps.

    Reference:
        Wang, Liu, Liang, Joshi, Poor. Tackling the Objective Inconsistency Problem in Heterogeneous
        Federated Optimization. NeurIPS 2020.
    """

    saved = ("_sum", "_counts", "_total", "_steps", "_count_total", "_metrics")
    normalise: Normalise
    _sum: Model = field(default_factory=dict)
    _counts: Model = field(default_factory=dict)
    _total: float = 0.0
    _steps: float = 0.0
    _count_total: float = 0.0
    _metrics: Sums = field(default_factory=dict)

    def add(self, update: ClientUpdate) -> None:
        """Add an update to the sums, and empty its arrays."""
        if self._count_total == 0.0:
            self._sum = zeros_like(update.delta)
            self._counts = zeros_like(update.counts) if update.counts else {}
        share = update.examples if self.normalise in ("examples", "steps") else 1.0
        tau = update.steps if self.normalise == "steps" else 1.0
        add_scaled(self._sum, update.delta, share / tau)
        if self._counts:
            add_scaled(self._counts, update.counts, share)
        self._steps += share * tau
        self._total += _mass(update, self.normalise)
        self._count_total += share
        add_metrics(self._metrics, update.examples, update.metrics)
        update.delta, update.counts = {}, {}

    def mean(self) -> Model:
        """Return the mean of what was added so far; empty if nothing was."""
        mean = copy_of(self._sum)
        if self._total > 0.0:
            scale(mean, self._factor)
        return mean

    def result(self) -> tuple[Model, dict[str, Array]]:
        """Return the mean change of float arrays and of integer arrays, and keep neither.

        Where every weight is 0 the model does not move.
        """
        delta, counts, self._sum, self._counts = self._sum, self._counts, {}, {}
        scale(delta, self._factor if self._total > 0.0 else 0.0)
        if counts:
            scale(counts, 1.0 / self._count_total)
        return delta, counts

    @property
    def _factor(self) -> float:
        """What makes a mean of the sum."""
        per_update = 1.0 / self._total
        return per_update * (self._steps / self._total) if self.normalise == "steps" else per_update

    def metrics(self) -> dict[str, float]:
        """Return the mean of each metric over the clients that sent it, by examples."""
        return means_of(self._metrics)

    def continue_after(self, added: Sequence[ClientUpdate]) -> None:
        """Do nothing: the sums hold what was added before a checkpoint."""


def add_metrics(sums: Sums, examples: float, metrics: Mapping[str, float]) -> None:
    """Add what one client measured on some examples.

    Args:
        sums: to add to.
        examples: how much it counts; nothing, unless this is a finite number above 0.
        metrics: by name; those that are not finite do not count.
    """
    weight = examples if isfinite(examples) and examples > 0 else 0.0
    for key, value in metrics.items():
        total = sums.setdefault(key, [0.0, 0.0])
        if isfinite(value):
            total[0] += weight * value
            total[1] += weight


def means_of(sums: Sums) -> dict[str, float]:
    """Return the mean of each metric over the clients that measured it, by examples.

    It is NaN where no client's value counts.
    """
    return {key: total / n if n else nan for key, (total, n) in sums.items()}


@dataclass(slots=True)
class RobustMean(Stateful):
    """Keeps weighed updates, and combines them by a rule when the buffer closes.

    A rule withstands f nodes: several updates of one node are averaged first, by their weights,
    and count as one. The rule's weights are equal for "buffer_size", the examples for "examples",
    and the staleness weights for "weights", which then multiply no update. All are capped at
    `WEIGHT_CAP` times their median, and further where f nodes could still hold half of the weight.

    Integer arrays take the median of each coordinate, and metrics the median over nodes. Stale
    updates are compared with the median of the current ones instead of their mean. Memory is the
    buffer size times the model.
    """

    like: Snapshot
    normalise: Normalise
    rule: Rule
    _kept: list[ClientUpdate] = field(default_factory=list)

    def add(self, update: ClientUpdate) -> None:
        """Keep an update, unless it counts for nothing."""
        if self.normalise == "weights" and update.weight > 0.0:
            scale(update.delta, 1.0 / update.weight)
        if _mass(update, self.normalise) > 0.0:
            self._kept.append(update)

    def mean(self) -> Model:
        """Return the median of what was added so far; empty if nothing was."""
        deltas = [delta for delta, _, _ in self._by_node()]
        return aggregate(Median(f=0), deltas) if deltas else {}

    def result(self) -> tuple[Model, dict[str, Array]]:
        """Return the change of float arrays and of integer arrays, as `RunningMean` does.

        Raises:
            ProtocolError: there are too few nodes for the rule; says how many it needs.
        """
        if not self._kept:
            return zeros_like(self.like.floats), zeros_like(self.like.counts, np.float64)
        deltas, counts, weights = zip(*self._by_node(), strict=True)
        delta = aggregate(self.rule, deltas, capped(np.array(weights), self.rule.f, WEIGHT_CAP))
        medians = {
            name: np.median(np.stack([one[name] for one in counts]), axis=0)
            for name in self.like.counts
        }
        return delta, {name: np.asarray(x) for name, x in medians.items()}

    def metrics(self) -> dict[str, float]:
        """Return the median of each metric over the nodes that sent it."""
        last: dict[str, dict[int, float]] = {}
        for update in self._kept:
            for key, value in update.metrics.items():
                by_node = last.setdefault(key, {})
                if isfinite(value):
                    by_node[update.node_id] = value
        return {k: float(median(of.values())) if of else nan for k, of in last.items()}

    def continue_after(self, added: Sequence[ClientUpdate]) -> None:
        """Keep the updates that were added before a checkpoint, which are in it once."""
        self._kept += [update for update in added if _mass(update, self.normalise) > 0.0]

    def _by_node(self) -> list[tuple[Model, Model, float]]:
        """Return for each node the means of deltas and counts by weight, and the mean weight."""
        found: dict[int, list[ClientUpdate]] = {}
        for update in self._kept:
            found.setdefault(update.node_id, []).append(update)
        return [self._mean_of(updates) for updates in found.values()]

    def _mean_of(self, updates: Sequence[ClientUpdate]) -> tuple[Model, Model, float]:
        weights = [_mass(update, self.normalise) for update in updates]
        delta, counts = updates[0].delta, updates[0].counts
        if updates[1:]:
            delta, counts = copy_of(delta), copy_of(counts)
        for i, update in enumerate(updates[1:], start=1):
            share = weights[i] / (sum(weights[:i]) + weights[i])
            for both, new in ((delta, update.delta), (counts, update.counts)):
                scale(both, 1.0 - share)
                add_scaled(both, new, share)
        return delta, counts, sum(weights) / len(weights)


Reducer = RunningMean | RobustMean
"""Takes weighed updates and their arrays with them (`add`), and reduces them to one (`result`).

`mean` is what stale updates are compared with; `metrics` reduces what the clients measured, those
not finite left out.
"""


def _mass(update: ClientUpdate, normalise: Normalise) -> float:
    """Return how much an update counts in a mean."""
    if normalise == "weights":
        return update.weight
    return update.examples if normalise in ("examples", "steps") else 1.0


def capped(weights: Array, f: int, cap: float) -> Array:
    """Return weights of at most `cap` times their median that no f updates dominate.

    The cap falls further until the f largest hold no more than a share (n - 1) / 2n, which is what
    they hold of equal weights in the worst case of n = 2f + 1.

    Args:
        weights: > 0; shape (n,).
        f: adversarial updates.
        cap: >= 1.

    Example:
        >>> capped(np.array([1.0, 1.0, 1.0, 1.0, 1e9]), f=1, cap=1.5)
        array([1. , 1. , 1. , 1. , 1.5])
    """
    n, top = len(weights), cap * float(np.median(weights))
    lowest = float(weights.min())
    while True:
        now = np.minimum(weights, top)
        fits = 2.0 * n * heaviest(now, min(f, n)) <= (n - 1) * float(now.sum()) * (1.0 + 1e-12)
        if fits or top <= lowest:
            return now
        top = max(0.9 * top, lowest)


class Evaluations(Stateful):
    """Draws the number of evaluators, averages their metrics of a version, and notes all metrics.

    They are noted in the result and the callbacks.
    """

    saved = ("_waiting", "_sums", "is_reached")

    def __init__(
        self,
        strategy: "StaleStrategy",
        runtime: Runtime,
        on_server: EvaluateFn | None,
    ) -> None:
        """Evaluate as a strategy says, and on the server by a function of version and model."""
        self.result, self.runtime, self._until = strategy.result, runtime, strategy.until
        self.is_reached = False
        """Whether a metric has reached the target of the strategy's `until`."""
        self._on_server, self._every = on_server, strategy.evaluate_every
        self._share, self._least = strategy.fraction_evaluate, strategy.min_evaluate_nodes
        self.by_nodes = self._share > 0 or self._least > 0
        """Whether nodes evaluate at all."""
        self._waiting: dict[int, int] = {}
        self._sums: dict[int, Sums] = {}

    def is_due(self, version: int) -> bool:
        """Return whether a version is evaluated, by anybody."""
        return (self.by_nodes or self._on_server is not None) and version % self._every == 0

    def start(self, version: int, n_online: int) -> int:
        """Return how many of the nodes that are online evaluate a version, and wait for them."""
        n = min(max(int(n_online * self._share), self._least), n_online)
        if n:
            self._waiting[version], self._sums[version] = n, {}
        return n

    def add(self, version: int, examples: float, metrics: dict[str, float]) -> None:
        """Add one device's measurements."""
        add_metrics(self._sums[version], examples, metrics)

    def ended(self, version: int) -> None:
        """Count one more device that has answered or failed; after the last, note the averages."""
        self._waiting[version] -= 1
        if self._waiting[version]:
            return
        del self._waiting[version]
        if metrics := means_of(self._sums.pop(version)):
            self.note("evaluate", version, metrics)

    def on_server(self, version: int, record: Callable[[], ArrayRecord]) -> None:
        """Measure a version by the app's own function, if it has one."""
        found = None if self._on_server is None else self._on_server(version, record())
        if found is not None:
            self.note("server", version, numbers(found), found)

    def note(
        self,
        source: Literal["train", "evaluate", "server"],
        version: int,
        metrics: Mapping[str, float],
        record: MetricRecord | None = None,
    ) -> None:
        """Note what was measured of a version, or while devices trained for it.

        Args:
            source: who has measured.
            version: of the model.
            metrics: by name.
            record: as the app returned it; made of the metrics if not given.
        """
        book = {
            "train": self.result.train_metrics_clientapp,
            "evaluate": self.result.evaluate_metrics_clientapp,
            "server": self.result.evaluate_metrics_serverapp,
        }[source]
        book[version] = MetricRecord(dict(metrics)) if record is None else record
        if self._until is not None and self._until.is_reached(version, metrics):
            self.is_reached = True
        self.runtime.metrics(version, source, metrics)
