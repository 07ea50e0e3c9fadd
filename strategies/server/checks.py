"""Checks: the one place where a reply is checked, and turned from records into an update.

An update that passes has the names, shapes and dtypes of the model, only finite numbers and a
sensible number of examples; nothing checks it again. A reply holds the whole weights, as stock
ClientApps send them, or the change alone if one of its ConfigRecords says
`"fedstale.update": "delta"`.

Replies come from clients that are not trusted: sizes are compared before anything is parsed or
allocated, of the whole reply (`Checks.check_size`) and of each array (`versions.read`).

Then a reply is compared with the others of the run. A limit is a multiple of the running median
over nodes, each with its last reply only: it bounds the norm of an update, and caps norms and
examples where that is asked for. Such a median stays among what honest nodes send as long as they
are more than half of the nodes heard lately, however often the others answer. Until enough nodes
have been heard it does not hold; the first updates of a run then wait in the buffer until it does,
so that the first reply of a run cannot own the model either. What is rejected, capped and clipped
is counted and logged, and nodes that keep failing are rested.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, isnan, nan
from statistics import median
from typing import Annotated, Any, Literal

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord

from fedstale.errors import ProtocolError, quoted
from fedstale.flower import STYPE
from fedstale.strategies.messages import form_of
from fedstale.strategies.server.runtime import Limit
from fedstale.strategies.server.versions import (
    Snapshot,
    Versions,
    arrays_in,
    is_delta,
    read,
    read_change,
)
from fedstale.strategies.stages import WORK
from fedstale.strategies.types import (
    MOST_EXAMPLES,
    MOST_METRICS,
    MOST_NAME,
    AtLeastOne,
    ClientUpdate,
    Count,
    Job,
    Model,
    Positive,
    RejectionError,
    Stateful,
    Whole,
    add_scaled,
    as_float,
    check_fields,
    is_finite,
    norm_of,
    numbers,
    require,
    scale,
)

logger = logging.getLogger(__name__)

_HALF = np.dtype(np.float16)
_TIMES_MODEL, _BESIDES = 4, 1_000_000
_TEXTS = (str, bytes)

MOST_NORM = 1e15
"""Largest norm of an update: squares of such, and sums of a million of them times `most_examples`,
stay within the range of float32, so that no update can make a server step infinite."""
_MOST_HALF = float(np.finfo(np.float16).max)

MOST_COUNT = 2.0**64
"""Largest change of an integer; sums of such changes stay far from infinity."""

_F8, _I8 = np.dtype(np.float64), np.dtype(np.int64)


Cap = Annotated[AtLeastOne, "a finite number >= 1, such as 1.5"]
Staleness = Annotated[Whole, "an integer >= 0 (0 takes no stale update)"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """The settings of `Checks`."""

    most_examples: Positive = MOST_EXAMPLES
    """More than this is taken for a mistake, or for an attempt to own the average."""
    examples_cap: Cap | None = None
    """No reply counts for more than this times the running median of examples, >= 1; None trusts
    every number up to `most_examples`, as FedAvg does. 1.5 where devices are not trusted."""
    norm_cap: Cap | None = None
    """Updates are scaled down to this times the running median of their norms, >= 1; None never."""
    norm_bound: Cap | None = 100.0
    """Updates beyond this times the largest running median of norms so far are rejected, >= 1,
    unless a `norm_cap` scales them down; None trusts every norm up to `MOST_NORM`. An update grows
    with the steps of its training, at most in proportion, so there is room for clients with many
    examples. `Privacy`, which clips to its own norm, and robust rules, which need a number of
    updates and withstand large ones, do without."""
    max_staleness: Staleness | None = None
    """An update with a larger staleness is rejected, >= 0: it fills no buffer, and its device may
    start again at once. None for no limit. FLSim and FedScale have the same rule under the same
    name. In Ringmaster ASGD (Maranjyan, Tyurin, Richtarik. ICML 2025) an update counts if it is
    less than R versions behind, so R = max_staleness + 1, with every update a step and a rate that
    is constant. Of its two forms this is the one that lets jobs finish: Flower cannot recall a
    message, so a job that has become too stale is not stopped, and costs its device the time until
    it would have ended."""
    loss_key: str = "train_loss"
    """Metric with a device's mean training loss."""
    square_loss_key: str = "square_loss"
    """Metric with the mean of its squared per-example losses over the round."""
    loss_from: Literal["stated", "norm"] = "stated"
    """What selectors take for the loss of a client: what it states, or the norm of its update, up
    to the `norm_cap`. No client gains by stating another loss than it has under "norm", which tells
    about as much of how badly its data are learnt; see docs/validation.md for what it costs."""
    most_bytes: Count | None = None
    """Bytes of a reply, >= 1: of arrays, names, text and numbers. None for four times those of the
    model and a million: there is room for a second model, in float64, and for what is measured."""
    most_records: Count = 100
    """Records of a reply, >= 1."""
    most_metrics: Count = MOST_METRICS
    """Values of all its MetricRecords and ConfigRecords, >= 1; a list is one value."""
    most_elements: Count = 10_000
    """Elements of all lists among them, >= 1."""
    most_names: Count = 256
    """Names of metrics that are kept in a run, >= 1, besides those of losses. One node brings in at
    most a quarter of what the others have left, so that a few cannot take all."""
    dtypes: Literal["same", "cast"] = "same"
    """Whether a reply must have the model's dtypes, or is converted from any real numbers."""
    window: Count = 100
    """Nodes that running medians look back on, each with its last reply."""
    enough: Count = 5
    """Nodes that must have been heard before a running median holds."""
    strikes: Count = 3
    """Rejected replies in a row after which a node is rested."""
    rest_s: Positive = 60.0
    """First rest in s; each further one is twice as long, until a good reply."""
    most_rest_s: Positive = 3600.0
    """Longest rest in s."""

    def __post_init__(self) -> None:
        check_fields(self)
        accepted = "at most Validation.window"
        require(self.enough <= self.window, "Validation.enough", self.enough, accepted)
        accepted = "seconds > 0, at most Validation.most_rest_s"
        require(self.rest_s <= self.most_rest_s, "Validation.rest_s", self.rest_s, accepted)

    def most_bytes_of(self, model_bytes: int) -> int:
        """Return the bytes of a reply at most, for a model of some bytes."""
        return self.most_bytes or _TIMES_MODEL * model_bytes + _BESIDES


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


class Checks(Stateful):
    """Checks the replies of one run, by themselves and by what it knows of the others."""

    saved = ("examples", "evaluated", "norms", "steps", "counts", "records", "names")

    def __init__(
        self,
        validation: Validation,
        *,
        arrays_key: str = "arrays",
        examples_key: str = "num-examples",
        limits: dict[Limit, dict[int, int]] | None = None,
        most_bytes: float = inf,
        weighs_examples: bool = True,
        needs_steps: bool = False,
    ) -> None:
        """Start empty.

        Args:
            validation: the settings.
            arrays_key: ArrayRecord with the model; in a reply the only one may have any name.
            examples_key: metric with the number of examples behind an update.
            limits: counts of the limits that changed something, by kind and node, to add to.
            most_bytes: of a reply; see `Validation.most_bytes_of`.
            weighs_examples: whether updates count by their examples. Where they do not, a cap
                moves means of metrics and what selectors see, and is no warning.
            needs_steps: whether updates are divided by their number of local steps.
        """
        self.validation, self.most_bytes = validation, most_bytes
        self.arrays_key, self._examples_key = arrays_key, examples_key
        self._weighs_examples, self._needs_steps = weighs_examples, needs_steps
        self.limits = {"capped": {}, "clipped": {}} if limits is None else limits
        self.names: dict[str, int] = {}
        """The names of metrics that are kept, and which node was the first to state each."""
        self.examples, self.evaluated, self.norms, self.steps = (
            NodeMedian(validation.window, validation.enough) for _ in range(4)
        )
        self.counts: Counter[str] = Counter()
        """Replies rejected by kind, as "rejected: KIND"; examples "capped", norms "clipped", and
        replies of which metrics were "dropped"."""
        self.records: dict[int, tuple[int, int, float]] = {}
        """What speaks against a node: its replies rejected in a row, its rests since its last good
        reply, and the instant in s when the last of them ends."""

    def check_size(self, reply: Message) -> None:
        """Reject a reply that is too large, by the sizes that it declares: nothing in it is parsed.

        Args:
            reply: with content; to any kind of message.

        Raises:
            RejectionError: a ProtocolError that names the limit and what exceeds it.
        """
        content, rules = reply.content, self.validation
        n_bytes, n_values, n_elements, longest = sizes_of(content)
        for n, what, most, by in (
            (len(content), "records", rules.most_records, "most_records"),
            (n_values, "metrics and configs", rules.most_metrics, "most_metrics"),
            (n_elements, "elements of lists", rules.most_elements, "most_elements"),
            (n_bytes, "bytes", self.most_bytes, "most_bytes"),
            (longest, "characters of a name", MOST_NAME, ""),
        ):
            if n > most:
                told = f"{n:,} {what}: at most {most:,}{f', by Validation({by})' if by else ''}"
                raise RejectionError("size", f"the reply has {told}")

    def open(self, reply: Message, job: Job, versions: Versions) -> ClientUpdate:
        """Return the update in a training reply, in memory of its own, limited if medians hold.

        Args:
            reply: with content, matched to its job by the id of the message that it answers.
            job: that it answers, by the server's own record.
            versions: of the model.

        Raises:
            RejectionError: a ProtocolError; the reply cannot be used, and why.
        """
        if reply.metadata.src_node_id != job.node_id:
            raise _from_another(reply, job.node_id)
        update = self.read(reply, job, versions)
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
            self.limit(update)
        self.records.pop(job.node_id, None)
        return update

    def read(self, reply: Message, job: Job, versions: Versions) -> ClientUpdate:
        """Return the update in a training reply, checked by itself alone; as `open`."""
        examples, metrics = self._measured(reply)
        base = versions.base(job.base_version, job.down)
        record = arrays_in(reply.content, self.arrays_key)
        names = set(base.names)
        if len(record) != len(names) or set(record) != names:
            missing, extra = names - set(record), set(record) - names
            both = f"missing {quoted(sorted(missing), 200)}, unknown {quoted(sorted(extra), 200)}"
            raise RejectionError("names", f"arrays do not fit the model: {both}")
        cast = self.validation.dtypes == "cast"
        # Counts are averaged in float64 anyway, and the change of an unsigned one may be negative.
        delta, whole = self._floats(record, base, job)
        counts = {}
        for name, x in base.counts.items():
            counts[name] = read(record[name], name, x, None if cast else (x.dtype, _I8, _F8), _F8)
        if not is_delta(reply.content):
            with np.errstate(over="ignore", invalid="ignore"):
                add_scaled(whole, base.floats, -1.0)
                if counts:
                    add_scaled(counts, base.counts, -1.0)
        norm = norm_of(delta)
        if not (isfinite(norm) and (not counts or is_finite(counts))):
            for name, array in (delta | counts).items():
                if not is_finite({name: array}):
                    raise RejectionError(
                        "finite", f"arrays[{name!r}] holds NaN or infinity, or left the range"
                    )
        if norm > MOST_NORM:
            raise RejectionError(
                "norm",
                f"the norm of the update is {norm:.3g}: at most {MOST_NORM:g}, since sums and "
                "squares of more could leave the finite range",
            )
        current = versions.current.floats
        for name in base.halves:
            # A mean of models that are within the range is within it.
            if (np.abs(current[name] + delta[name]) > _MOST_HALF).any():
                raise RejectionError(
                    "finite", f"arrays[{name!r}] would take the model beyond the range of float16"
                )
        for name, array in counts.items():
            if (np.abs(array) > MOST_COUNT).any():
                raise RejectionError("finite", f"arrays[{name!r}] left the range of integers")
        return ClientUpdate(
            delta=delta,
            base=base.floats,
            current=current,
            staleness=versions.version - job.base_version,
            node_id=job.node_id,
            message_id=job.message_id,
            job_id=job.job_id,
            base_version=job.base_version,
            counts=counts,
            examples=examples,
            metrics=metrics,
            norm=norm,
            steps=job.steps,
            share=job.share,
        )

    def _floats(self, record: ArrayRecord, base: Snapshot, job: Job) -> tuple[Model, Model]:
        """Return a reply's floating-point arrays, and those of them that are not quantised."""
        arrays, whole, halves = {}, {}, base.halves
        for name, x in base.floats.items():
            stored = record[name]
            accepted = (
                None
                if self.validation.dtypes == "cast"
                else (_HALF if name in halves else x.dtype,)
            )
            if stored.stype != STYPE and form_of(stored):
                arrays[name] = read_change(stored, name, x, accepted, job.up)
            else:
                arrays[name] = whole[name] = read(stored, name, x, accepted, x.dtype)
        return arrays, whole

    def limit(self, update: ClientUpdate, *, few: int | None = None) -> None:
        """Clip and bound the norm of an update, and cap its examples, once; done here alone.

        Args:
            update: checked by itself.
            few: nodes that are enough, of one that came before the running medians held.

        Raises:
            RejectionError: the norm, or the number of steps, is beyond the bound.
        """
        if update.limited:
            return
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
        examples, metrics = self._measured(reply)
        self.evaluated.hear(node_id, examples)
        capped = min(examples, self.evaluated.times(self.validation.examples_cap))
        self._note_limit("capped", node_id, examples, capped)
        return capped, metrics

    def _measured(self, reply: Message) -> tuple[float, dict[str, float]]:
        """Return the number of examples in a reply, and the other metrics.

        Raises:
            RejectionError: a ProtocolError; no usable number of examples.
        """
        key, most = self._examples_key, self.validation.most_examples
        for record in reply.content.values():
            if not isinstance(record, MetricRecord) or key not in record:
                continue
            examples = record[key]
            if isinstance(examples, list) or not 0 < examples <= most:
                text = "a list" if isinstance(examples, list) else f"{examples!r:.40}"
                raise RejectionError(
                    "examples", f"{key} = {text}: expected a number above 0, at most {most:g}"
                )
            scalars: dict[str, float] = {}
            for name, value in record.items():
                if isinstance(value, list):
                    scalars |= numbers({name: value})
                elif name != key:
                    scalars[name] = value if isinstance(value, float) else as_float(value)
            if not self.names.keys() >= scalars.keys():
                scalars = self._with_room(scalars, reply.metadata.src_node_id)
            return float(examples), scalars
        raise RejectionError("examples", f"no MetricRecord holds {key!r}")

    def _with_room(self, metrics: dict[str, float], node_id: int) -> dict[str, float]:
        """Keep the metrics whose names are known, or have room among those of the run."""
        names, rules = self.names, self.validation
        n_own = sum(node == node_id for node in names.values())
        room = -(-(rules.most_names - len(names) + n_own) // 4) - n_own
        for name in metrics:
            if name not in names and (room > 0 or name in (rules.loss_key, rules.square_loss_key)):
                names[name], room = node_id, room - 1
        kept = {name: value for name, value in metrics.items() if name in names}
        self._note_limit("dropped", node_id, len(metrics), len(kept))
        return kept

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
        logger.info("node %d: reply rejected: %s", node_id, quoted(problem))
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
        return {node_id for node_id, (_, _, until) in self.records.items() if until > now}

    def next_return(self, now: float) -> float:
        """Return the instant in s when the next node comes back from its rest; inf if none."""
        return min((until for _, _, until in self.records.values() if until > now), default=inf)

    def _note_limit(self, kind: Limit, node_id: int, was: float, now: float) -> None:
        # Of updates made by hand the norm may be NaN.
        if not now < was:
            return
        self.counts[kind] += 1
        what, setting, warns = {
            "capped": (self._examples_key, "examples_cap", self._weighs_examples),
            "clipped": ("norm of the update", "norm_cap", True),
            "dropped": ("number of its metrics", "most_names", True),
        }[kind]
        # Silent caps would leave a skewed fleet's average unexplained: the first is a warning.
        logger.log(
            logging.WARNING if self.counts[kind] == 1 and warns else logging.DEBUG,
            "node %d: %s counts as %.6g, not %.6g, by Validation(%s=%g); the summary of the run "
            "counts how often",
            *(node_id, what, now, was, setting, getattr(self.validation, setting)),
        )
        by_node = self.limits.setdefault(kind, {})
        by_node[node_id] = by_node.get(node_id, 0) + 1


def sizes_of(content: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Count what is in some records, of which nothing is parsed.

    Returns:
        Bytes of all names, arrays, texts and numbers; values of metrics and configs; elements of
        the lists among these; and characters of their longest name.
    """
    n, n_values, n_elements, longest = sum(map(len, content)), 0, 0, 0
    for record in content.values():
        if isinstance(record, ArrayRecord):
            for name, array in record.items():
                about = len(array.dtype) + len(array.stype) + 8 * len(array.shape)
                n += len(name) + len(array.data) + about
            continue
        n_values += len(record)
        for name, value in record.items():
            longest = max(longest, len(name))
            n += len(name) + 8
            if isinstance(value, list):
                n_elements += len(value)
                n += 8 * len(value) + sum(len(x) for x in value if isinstance(x, _TEXTS))
            elif isinstance(value, _TEXTS):
                n += len(value)
    return n, n_values, n_elements, longest


def _from_another(reply: Message, node_id: int) -> RejectionError:
    source = reply.metadata.src_node_id
    return RejectionError("source", f"node {source} answers a job that node {node_id} received")
