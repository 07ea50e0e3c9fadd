"""Client reputation: limits by running medians, rejections by kind, and rests of nodes that fail.

`Validation` looks at one reply alone, `Reputation` at a reply among the others of a run. It counts
and logs what is rejected, capped and clipped, and rests nodes that keep failing.

A limit is a multiple of the running median over nodes, each with its last reply only: it bounds the
norm of an update, and caps norms and examples where that is asked for. Such a median stays among
what honest nodes send as long as they are more than half of the nodes heard lately, however often
the others answer. Until enough nodes have been heard it does not hold; the first updates of a run
then wait in the buffer until it does, so that the first reply of a run cannot own the model either.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field
from math import inf, isnan, nan
from statistics import median

from flwr.app import Message

from fedstale.errors import ProtocolError
from fedstale.strategies.server.runtime import Limit
from fedstale.strategies.server.validation import USUAL_KEYS, RecordKeys, Validation
from fedstale.strategies.server.versions import Versions
from fedstale.strategies.stages import WORK
from fedstale.strategies.types import ClientUpdate, Job, RejectionError, Stateful, scale

logger = logging.getLogger(__name__)

FEW = 3
"""Nodes below which a buffer that closes early is not capped: two numbers have no outlier."""


@dataclass(slots=True)
class NodeMedian(Stateful):
    """The median over the nodes heard last, each with its last number."""

    saved = ("_last", "_largest")

    window: int
    """Nodes looked back on, >= 1."""
    enough: int
    """Nodes that must have been heard, from 1 to `window`."""
    _last: dict[int, float] = field(default_factory=dict)
    _largest: float = 0.0

    def hear(self, node_id: int, value: float) -> None:
        """Note a number of a node, in place of the one before."""
        self._last.pop(node_id, None)
        self._last[node_id] = value
        if len(self._last) > self.window:
            del self._last[next(iter(self._last))]
        if len(self._last) >= self.enough:
            self._largest = max(self._largest, median(self._last.values()))

    def __len__(self) -> int:
        """Number of nodes that have been heard."""
        return len(self._last)

    @property
    def holds(self) -> bool:
        """Whether enough nodes have been heard."""
        return len(self._last) >= self.enough

    def times(self, multiple: float | None, *, few: int | None = None, ever: bool = False) -> float:
        """Return a multiple of the median; inf if there is none, or too few have been heard.

        Args:
            multiple: None for no limit.
            few: nodes that are enough for this once; if not given, those of `holds`.
            ever: whether the largest median that has held so far counts in its place.
        """
        if multiple is None or len(self._last) < (few or self.enough):
            return inf
        now = median(self._last.values())
        # Where most numbers are 0, any other would be beyond all multiples.
        return multiple * (max(now, self._largest) if ever else now) or inf


class Reputation(Stateful):
    """What one run knows of the replies of its clients."""

    saved = ("examples", "evaluated", "norms", "steps", "counts", "records")

    def __init__(
        self,
        validation: Validation,
        keys: RecordKeys = USUAL_KEYS,
        *,
        limits: dict[Limit, dict[int, int]] | None = None,
        weighs_examples: bool = True,
        needs_steps: bool = False,
    ) -> None:
        """Start empty.

        Args:
            validation: the settings.
            keys: names of what replies hold.
            limits: counts of the limits that changed a number, by kind and node, to add to.
            weighs_examples: whether updates count by their examples. Where they do not, a cap
                moves means of metrics and what selectors see, and is no warning.
            needs_steps: whether updates are divided by their number of local steps.
        """
        self.validation, self.keys = validation, keys
        self._weighs_examples, self._needs_steps = weighs_examples, needs_steps
        self.limits = {"capped": {}, "clipped": {}} if limits is None else limits
        self.examples, self.evaluated, self.norms, self.steps = (
            NodeMedian(validation.window, validation.enough) for _ in range(4)
        )
        self.counts: Counter[str] = Counter()
        """Replies rejected by kind, as "rejected: KIND"; examples "capped" and norms "clipped"."""
        self.records: dict[int, tuple[int, int, float]] = {}
        """What speaks against a node: its replies rejected in a row, its rests since its last good
        reply, and the instant in s when the last of them ends."""

    def open(self, reply: Message, job: Job, versions: Versions) -> ClientUpdate:
        """Return the update in a training reply, limited if the running medians hold.

        Args:
            reply: with content, matched to its job by the id of the message that it answers.
            job: that it answers.
            versions: of the model.

        Raises:
            RejectionError: a ProtocolError; the reply cannot be used, and why.
        """
        if reply.metadata.src_node_id != job.node_id:
            raise _from_another(reply, job.node_id)
        update = self.validation.open(reply, job, versions, self.keys)
        if self._needs_steps:
            if isnan(update.steps):
                raise RejectionError(
                    "steps",
                    f"no ConfigRecord {WORK!r} states its local steps, which normalise='steps' "
                    "divides by: call fedstale.client.local_steps in the ClientApp, and have a mod "
                    "of fedstale, such as PackMod",
                )
            self.steps.hear(job.node_id, update.steps)
        # Also of what is rejected next: updates may grow a thousandfold if most nodes' do.
        self.norms.hear(job.node_id, update.norm)
        self.examples.hear(job.node_id, update.examples)
        settings = self.validation
        limits = settings.norm_bound, settings.norm_cap, settings.examples_cap
        # Both medians hold at once: they hear the same nodes.
        if self.norms.holds or not any(limits):
            self._limit(update)
        self.records.pop(job.node_id, None)
        return update

    def limit_early(self, update: ClientUpdate) -> None:
        """Limit an update that came before the running medians held, by those of `FEW` nodes.

        Raises:
            RejectionError: its norm is beyond the bound.
        """
        if not update.limited:
            self._limit(update, few=FEW)

    def _limit(self, update: ClientUpdate, *, few: int | None = None) -> None:
        """Clip and bound the norm of an update, and cap its examples; done here alone.

        Raises:
            RejectionError: the norm, or the number of steps, is beyond the bound.
        """
        settings, norm = self.validation, update.norm
        update.limited = True
        if len(self.norms) < (few or settings.enough):
            # The other medians hear the same nodes, and limit nothing either.
            return
        clipped = min(norm, self.norms.times(settings.norm_cap, few=few))
        # Late in training most updates are small, and one with something new may be large.
        if clipped > (most := self.norms.times(settings.norm_bound, few=few, ever=True)):
            raise RejectionError(
                "norm",
                f"the norm of the update is {norm:.3g}: at most {most:.3g}, {settings.norm_bound:g}"
                " times the largest median over nodes, by Validation(norm_bound)",
            )
        # The mean is multiplied by a mean of steps, which one node must not own either.
        if update.steps > (most := self.steps.times(settings.norm_bound, few=few, ever=True)):
            raise RejectionError(
                "steps",
                f"{update.steps:.3g} local steps are stated: at most {most:.3g}, "
                f"{settings.norm_bound:g} times the largest median over nodes, by "
                "Validation(norm_bound)",
            )
        if clipped < norm:
            scale(update.delta, clipped / norm)
        self._note_limit("clipped", update.node_id, norm, clipped)
        examples = min(update.examples, self.examples.times(settings.examples_cap, few=few))
        self._note_limit("capped", update.node_id, update.examples, examples)
        update.examples = examples

    def losses(self, update: ClientUpdate) -> tuple[float, float]:
        """Return the mean loss of a client that selectors see, and its mean squared loss.

        Where devices are not trusted it is the norm of the update, as far as it counts, so that the
        utility |B| ||U|| is that by which Chen et al. sample. A loss costs a device nothing to
        state; its update is what it is paid for. What is not known is NaN.

        Reference:
            Chen, Horvath, Richtarik. Optimal Client Sampling for Federated Learning. TMLR 2022.
        """
        rules = self.validation
        if rules.loss_from == "norm":
            return min(update.norm, self.norms.times(rules.norm_cap)), nan
        stated = update.metrics
        return stated.get(rules.loss_key, nan), stated.get(rules.square_loss_key, nan)

    def measurements(self, reply: Message, *, node_id: int) -> tuple[float, dict[str, float]]:
        """Return the number of examples, capped, and the scalar metrics of an evaluation reply.

        They are capped by the median of evaluation examples, once enough nodes have been heard; the
        first few of a run are not, and weigh a metric and never the model.

        Raises:
            RejectionError: a ProtocolError; the reply cannot be used, and why.
        """
        if reply.metadata.src_node_id != node_id:
            raise _from_another(reply, node_id)
        examples, metrics = self.validation.measurements(reply, self.keys.examples)
        self.evaluated.hear(node_id, examples)
        capped = min(examples, self.evaluated.times(self.validation.examples_cap))
        self._note_limit("capped", node_id, examples, capped)
        return capped, metrics

    def reject(self, node_id: int, problem: ProtocolError, now: float) -> None:
        """Count and log a rejected reply, and rest its node if it keeps failing.

        Args:
            node_id: the node that the job was sent to.
            problem: why.
            now: instant in s.
        """
        self.ignore(problem.kind if isinstance(problem, RejectionError) else "other")
        rejected, rests, until = self.records.get(node_id, (0, 0, 0.0))
        rejected += 1
        logger.info("node %d: reply rejected: %s", node_id, problem)
        settings = self.validation
        if rejected >= settings.strikes:
            rest_s = min(settings.rest_s * 2.0 ** min(rests, 60), settings.most_rest_s)
            rests, until = rests + 1, now + rest_s
            is_first = not any(rests for _, rests, _ in self.records.values())
            logger.log(
                logging.WARNING if is_first else logging.INFO,
                "node %d: %d replies rejected in a row; it rests for %g s",
                *(node_id, rejected, rest_s),
            )
        self.records[node_id] = rejected, rests, until

    def ignore(self, kind: str) -> None:
        """Count a rejected reply by its kind alone, as one that belongs to no open job."""
        self.counts[f"rejected: {kind}"] += 1

    def resting(self, now: float) -> set[int]:
        """Return the nodes that rest, and are not sent jobs, at an instant in s."""
        if not self.records:
            return set()
        return {node_id for node_id, (_, _, until) in self.records.items() if until > now}

    def next_return(self, now: float) -> float:
        """Return the instant in s when the next node comes back from its rest; inf if none."""
        return min((until for _, _, until in self.records.values() if until > now), default=inf)

    def _note_limit(self, kind: Limit, node_id: int, was: float, now: float) -> None:
        # Of updates made by hand the norm may be NaN.
        if not now < was:
            return
        self.counts[kind] += 1
        if kind == "capped":
            what, setting, moves_model = self.keys.examples, "examples_cap", self._weighs_examples
        else:
            what, setting, moves_model = "norm of the update", "norm_cap", True
        # Silent caps would leave a skewed fleet's average unexplained: the first is a warning.
        logger.log(
            logging.WARNING if self.counts[kind] == 1 and moves_model else logging.DEBUG,
            "node %d: %s counts as %.6g, not %.6g, by Validation(%s=%g); the summary of the run "
            "counts how often",
            *(node_id, what, now, was, setting, getattr(self.validation, setting)),
        )
        by_node = self.limits[kind]
        by_node[node_id] = by_node.get(node_id, 0) + 1


def _from_another(reply: Message, node_id: int) -> RejectionError:
    source = reply.metadata.src_node_id
    return RejectionError("source", f"node {source} answers a job that node {node_id} received")
