"""What a run remembers at its gate: running medians, refusals by kind, and nodes at rest.

`Validation` looks at one reply alone, a `Reputation` at a reply among the others of a run. It
counts and logs what is rejected, capped and clipped, and rests nodes that keep failing.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any

from flwr.app import Message

from fedstale.errors import ProtocolError
from fedstale.strategies.arrays import Model, norm_of, scale
from fedstale.strategies.server.caps import Cap
from fedstale.strategies.server.validation import Answer, RejectionError, Validation
from fedstale.strategies.server.versions import Snapshot

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Record:
    """What speaks against a node."""

    refused: int = 0
    """In a row."""
    rests: int = 0
    """Since its last good reply."""
    until: float = 0.0
    """Instant in s when its rest ends."""


class Reputation:
    """One run's gate."""

    def __init__(self, validation: Validation) -> None:
        """Know nobody."""
        self.validation = validation
        self.examples = Cap(validation.examples_cap, validation.window, validation.enough)
        self.evaluated = Cap(validation.examples_cap, validation.window, validation.enough)
        self.norms = Cap(validation.norm_cap, validation.window, validation.enough)
        self.counts: Counter[str] = Counter()
        """Replies rejected by kind, as "rejected: KIND"; examples "capped" and norms "clipped"."""
        self._records: dict[int, _Record] = {}

    def open(self, reply: Message, base: Snapshot, *, node_id: int) -> Answer:
        """Return the update in a training reply.

        Args:
            reply: with content, matched to its job by the id of the message that it answers.
            base: the version that the job carried.
            node_id: the node that the job was sent to.

        Raises:
            RejectionError: a ProtocolError; the reply cannot be used, and why.
        """
        self._check_source(reply, node_id)
        answer = self.validation.open(reply, base)
        if self.validation.norm_cap is not None:
            self._clip(answer.delta, node_id)
        examples = self._capped(self.examples, answer.examples, node_id)
        self._records.pop(node_id, None)
        return answer if examples == answer.examples else replace(answer, examples=examples)

    def measurements(self, reply: Message, *, node_id: int) -> tuple[float, dict[str, float]]:
        """Return the number of examples, capped, and the scalar metrics of an evaluation reply.

        They are capped by the median of evaluation examples, once enough nodes have been heard; the
        first few of a run are not, and weigh a metric and never the model.

        Raises:
            RejectionError: a ProtocolError; the reply cannot be used, and why.
        """
        self._check_source(reply, node_id)
        examples, metrics = self.validation.measurements(reply)
        return self._capped(self.evaluated, examples, node_id), metrics

    def refuse(self, node_id: int, problem: ProtocolError, now: float) -> None:
        """Count and log a refused reply, and rest its node if it keeps failing.

        Args:
            node_id: the node that the job was sent to.
            problem: why.
            now: instant in s.
        """
        self.counts[
            f"rejected: {problem.kind if isinstance(problem, RejectionError) else 'other'}"
        ] += 1
        record = self._records.setdefault(node_id, _Record())
        record.refused += 1
        logger.info("node %d: reply refused: %s", node_id, problem)
        settings = self.validation
        if record.refused >= settings.strikes:
            rest_s = min(settings.rest_s * 2.0 ** min(record.rests, 60), settings.most_rest_s)
            record.rests += 1
            record.until = now + rest_s
            logger.warning(
                "node %d: %d replies refused in a row; it rests for %g s",
                *(node_id, record.refused, rest_s),
            )

    def drop(self, kind: str) -> None:
        """Count a reply that belongs to no open job: a duplicate, a replay or a late one."""
        self.counts[f"rejected: {kind}"] += 1

    def resting(self, now: float) -> set[int]:
        """Return the nodes that rest, and are not sent jobs, at an instant in s."""
        return {node_id for node_id, record in self._records.items() if record.until > now}

    def next_return(self, now: float) -> float:
        """Return the instant in s when the next node comes back from its rest; inf if none."""
        return min((r.until for r in self._records.values() if r.until > now), default=inf)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {
            "examples": self.examples.state_dict(),
            "evaluated": self.evaluated.state_dict(),
            "norms": self.norms.state_dict(),
            "counts": dict(self.counts),
            "records": [
                [node_id, record.refused, record.rests, record.until]
                for node_id, record in self._records.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any], shift_s: float = 0.0) -> None:
        """Continue from a checkpoint.

        Args:
            state: what `state_dict` returned.
            shift_s: how much later every instant is by the clock of today.
        """
        self.examples.load_state_dict(state["examples"])
        self.evaluated.load_state_dict(state["evaluated"])
        self.norms.load_state_dict(state["norms"])
        self.counts = Counter(state["counts"])
        self._records = {
            int(node_id): _Record(int(refused), int(rests), float(until) + shift_s)
            for node_id, refused, rests, until in state["records"]
        }

    def _check_source(self, reply: Message, node_id: int) -> None:
        source = reply.metadata.src_node_id
        if source != node_id:
            raise RejectionError(
                "source", f"node {source} answers a job that node {node_id} received"
            )

    def _capped(self, cap: Cap, examples: float, node_id: int) -> float:
        cap.hear(node_id, examples)
        limit = cap.limit(examples)
        if limit < examples:
            self._note_limit("capped", node_id, self.validation.weighted_by_key, examples, limit)
        return limit

    def _clip(self, delta: Model, node_id: int) -> None:
        norm = norm_of(delta)
        if not isfinite(norm):
            raise RejectionError("norm", "the norm of the update left the range of numbers")
        self.norms.hear(node_id, norm)
        limit = self.norms.limit(norm)
        if limit < norm:
            scale(delta, limit / norm)
            self._note_limit("clipped", node_id, "norm of the update", norm, limit)

    def _note_limit(self, kind: str, node_id: int, what: str, was: float, now: float) -> None:
        self.counts[kind] += 1
        # Silent caps would make a skewed fleet's average a riddle: the first one is a warning.
        level = logging.WARNING if self.counts[kind] == 1 else logging.DEBUG
        logger.log(
            level,
            "node %d: %s counts as %.6g, not %.6g; see Validation.examples_cap and .norm_cap",
            *(node_id, what, now, was),
        )
