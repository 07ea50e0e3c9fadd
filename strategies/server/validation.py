"""Validation: the one place where a reply is checked, and turned from records into an update.

An update that passes has the names, shapes and dtypes of the model, only finite numbers and a
sensible number of examples; nothing checks it again. A reply holds the whole weights, as stock
ClientApps send them, or the change alone if one of its ConfigRecords says
`"fedstale.update": "delta"`. Checks that depend on earlier replies, such as caps by running
medians, are in `reputation`.

Replies come from clients that are not trusted: sizes are compared before anything is parsed or
allocated, of the whole reply (`Validation.check_size`) and of each array. An array may be quantised
if its job asked for it (`fedstale.strategies.messages`): here it becomes numbers again, before
anything else looks at it. All others are in NumPy's file format, of which `header_of` reads the one
form that `numpy.save` writes for plain numbers.
"""

from collections.abc import ItemsView, Iterable
from dataclasses import dataclass
from itertools import chain
from math import isfinite
from typing import Annotated, Literal, NamedTuple, TypeVar

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedstale.errors import ProtocolError
from fedstale.flower import MOST_HEADER_BYTES, NO_HEADER, STYPE, header_of
from fedstale.strategies.messages import LEAST, decode, form_of, is_quantised
from fedstale.strategies.server.metrics import numbers
from fedstale.strategies.server.versions import Snapshot, Versions
from fedstale.strategies.types import (
    MOST_METRICS,
    MOST_NAME,
    Array,
    AtLeastOne,
    ClientUpdate,
    Count,
    FormatName,
    Job,
    Model,
    Positive,
    RejectionError,
    Whole,
    add_scaled,
    as_float,
    check_fields,
    is_finite,
    norm_of,
    require,
)

_HALF = np.dtype(np.float16)
_QUANTISED = {name: np.dtype(name) for name in ("float16", "float32", "float64")}
_CAST = '; Validation(dtypes="cast") converts it'


def read(
    stored: FlowerArray,
    name: str,
    like: Array,
    dtypes: tuple[np.dtype[np.generic], ...] | None,
    to: np.dtype[np.generic],
) -> Array:
    """Return a stored array of known shape, in memory of its own and C order.

    Args:
        stored: as it came.
        name: of the array, for error messages.
        like: the model's array of that name.
        dtypes: accepted, in native byte order, the usual one first; None accepts all real numbers,
            also smaller and larger ones.
        to: dtype to convert to; numbers beyond it become infinite.

    Raises:
        RejectionError: it is not such an array.
    """
    data = stored.data
    if stored.stype != STYPE:
        raise RejectionError(
            "format", f"arrays[{name!r}] is stored as {stored.stype[:40]!r}: {STYPE!r}?"
        )
    # A float64 in place of each element is the most that any accepted dtype takes.
    most = like.size * max(like.itemsize, 8) + MOST_HEADER_BYTES
    if len(data) > most:
        raise RejectionError(
            "bytes", f"arrays[{name!r}] takes {len(data):,} bytes: at most {most:,} fit"
        )
    header = header_of(data)
    if header is None:
        raise RejectionError("format", f"arrays[{name!r}] cannot be read: {NO_HEADER}")
    dtype, shape, is_fortran, begin, n_bytes = header
    if shape != like.shape:
        raise RejectionError("shape", f"arrays[{name!r}] has shape {shape}: expected {like.shape}")
    native = dtype.newbyteorder("=")
    if native not in dtypes if dtypes is not None else native.kind not in "fiub":
        expected = dtypes[0] if dtypes else f"real numbers such as {like.dtype}"
        can_cast = dtypes is not None and native.kind in "fiub"
        raise RejectionError(
            "dtype",
            f"arrays[{name!r}] has dtype {native}: expected {expected}{_CAST if can_cast else ''}",
        )
    if len(data) - begin != n_bytes:
        raise RejectionError(
            "bytes",
            f"arrays[{name!r}] has {len(data) - begin:,} bytes of numbers: expected {n_bytes:,}",
        )
    flat = np.frombuffer(data, dtype, offset=begin)
    array = flat.reshape(shape[::-1]).transpose() if is_fortran else flat.reshape(shape)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array(array, to, order="C")


def read_change(
    stored: FlowerArray,
    name: str,
    like: Array,
    dtypes: tuple[np.dtype[np.generic], ...] | None,
    asked: FormatName | None,
) -> Array:
    """Return the change in a quantised array of known shape, in memory of its own.

    Args:
        stored: as it came; `form_of` says that it is quantised.
        name: of the array, for error messages.
        like: the model's array of that name.
        dtypes: accepted; None accepts all that can be quantised.
        asked: format that the job asked for.

    Raises:
        RejectionError: it is not such an array.
    """
    form, shape = form_of(stored), tuple(stored.shape)
    if form is None or form != asked:
        raise RejectionError(
            "format", f"arrays[{name!r}] is in {form}, which its job did not ask for: {asked}?"
        )
    if shape != like.shape:
        raise RejectionError("shape", f"arrays[{name!r}] has shape {shape}: expected {like.shape}")
    known = _QUANTISED.get(stored.dtype)
    fits = known is not None and (dtypes is None or known in dtypes)
    if known is None or not fits or not is_quantised(form, known, shape):
        raise RejectionError(
            "dtype",
            f"arrays[{name!r}] has {like.size} elements of {stored.dtype[:40]!r} in {form}: "
            f"expected at least {LEAST} of {dtypes[0] if dtypes else 'floating point'}"
            + (_CAST if known is not None and not fits else ""),
        )
    try:
        change = decode(stored.data, form, shape, known)
    except ProtocolError as problem:
        raise RejectionError("format", f"arrays[{name!r}] {problem}") from problem
    with np.errstate(over="ignore"):
        return change.astype(like.dtype, copy=False)


UPDATE_KEY = "fedstale.update"

_TIMES_MODEL, _BESIDES = 4, 1_000_000
_TEXTS = (str, bytes)

MOST_NORM = 1e15
"""Largest norm of an update: squares of such, and sums of a million of them times `most_examples`,
stay within the range of float32, so that no update can make a server step infinite."""
_MOST_HALF = float(np.finfo(np.float16).max)

MOST_COUNT = 2.0**64
"""Largest change of an integer; sums of such changes stay far from infinity."""

Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)

_F8, _I8 = np.dtype(np.float64), np.dtype(np.int64)


class RecordKeys(NamedTuple):
    """Names of records and values in replies."""

    arrays: str = "arrays"
    """ArrayRecord with the model; in a reply the only one may have any name."""
    examples: str = "num-examples"
    """Metric with the number of examples behind an update."""


USUAL_KEYS = RecordKeys()
"""Those of Flower's strategies."""

Cap = Annotated[AtLeastOne, "a finite number >= 1, such as 1.5"]
Staleness = Annotated[Whole, "an integer >= 0 (0 takes no stale update)"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Checks replies; holds the settings of these checks and of `Reputation`."""

    most_examples: Positive = 1e9
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

    def check_size(self, reply: Message, most_bytes: int) -> None:
        """Reject a reply that is too large, by the sizes that it declares: nothing in it is parsed.

        Args:
            reply: with content; to any kind of message.
            most_bytes: of it; see `most_bytes_of`.

        Raises:
            RejectionError: a ProtocolError that names the limit and what exceeds it.
        """
        # Each limit is held before anything of what it limits is looked at.
        content = reply.content
        if len(content) > self.most_records:
            raise _too_large("records", len(content), self.most_records, "most_records")
        arrays: list[ItemsView[str, FlowerArray]] = []
        others: list[ItemsView[str, object]] = []
        for record in content.values():
            if isinstance(record, ArrayRecord):
                arrays.append(record.items())
            else:
                others.append(record.items())
        n_values = sum(map(len, others))
        if n_values > self.most_metrics:
            raise _too_large("metrics and configs", n_values, self.most_metrics, "most_metrics")
        n_bytes, longest, lists = _sizes_of(others)
        n_bytes += 8 * n_values + sum(map(len, content))
        n_elements = sum(map(len, lists))
        if n_elements > self.most_elements:
            raise _too_large("elements of lists", n_elements, self.most_elements, "most_elements")
        n_bytes += 8 * n_elements
        for element in chain.from_iterable(lists):
            if isinstance(element, _TEXTS):
                n_bytes += len(element)
        for name, array in chain.from_iterable(arrays):
            n_bytes += len(name) + len(array.data)
        for what, n, most, setting in (
            ("bytes", n_bytes, most_bytes, "most_bytes"),
            ("characters of a name", longest, MOST_NAME, ""),
        ):
            if n > most:
                raise _too_large(what, n, most, setting)

    def open(
        self, reply: Message, job: Job, versions: Versions, keys: RecordKeys = USUAL_KEYS
    ) -> ClientUpdate:
        """Return the update in a training reply; its arrays have memory of their own.

        Args:
            reply: with content.
            job: that it answers, by the server's own record.
            versions: of the model.
            keys: names of what it holds.

        Raises:
            RejectionError: a ProtocolError; the reply cannot be used, and why.
        """
        examples, metrics = self.measurements(reply, keys.examples)
        base = versions.base(job.base_version, job.down)
        record = _arrays(reply.content, keys.arrays)
        names = set(base.names)
        if len(record) != len(names) or set(record) != names:
            missing, extra = names - set(record), set(record) - names
            raise RejectionError(
                "names",
                f"arrays do not fit the model: missing {_some(missing)}, unknown {_some(extra)}",
            )
        cast = self.dtypes == "cast"
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
            accepted = None if self.dtypes == "cast" else (_HALF if name in halves else x.dtype,)
            if stored.stype != STYPE and form_of(stored):
                arrays[name] = read_change(stored, name, x, accepted, job.up)
            else:
                arrays[name] = whole[name] = read(stored, name, x, accepted, x.dtype)
        return arrays, whole

    def measurements(self, reply: Message, key: str) -> tuple[float, dict[str, float]]:
        """Return the number of examples, which is the metric `key`, and the other metrics.

        Raises:
            RejectionError: a ProtocolError; no usable number of examples.
        """
        for record in reply.content.values():
            if not isinstance(record, MetricRecord) or key not in record:
                continue
            examples = record[key]
            if isinstance(examples, list) or not 0 < examples <= self.most_examples:
                text = "a list" if isinstance(examples, list) else f"{examples!r:.40}"
                raise RejectionError(
                    "examples",
                    f"{key} = {text}: expected a number above 0, at most {self.most_examples:g}",
                )
            scalars: dict[str, float] = {}
            for name, value in record.items():
                if isinstance(value, list):
                    scalars |= numbers({name: value})
                elif name != key:
                    scalars[name] = value if isinstance(value, float) else as_float(value)
            return float(examples), scalars
        raise RejectionError("examples", f"no MetricRecord holds {key!r}")


def _sizes_of(
    records: Iterable[ItemsView[str, object]],
) -> tuple[int, int, list[list[object]]]:
    """Return the bytes of names and texts in records, the longest name, and their lists."""
    n_bytes, longest, lists = 0, 0, []
    for name, value in chain.from_iterable(records):
        n_bytes += len(name)
        longest = max(longest, len(name))
        if isinstance(value, list):
            lists.append(value)
        elif isinstance(value, _TEXTS):
            n_bytes += len(value)
    return n_bytes, longest, lists


def is_delta(content: RecordDict) -> bool:
    """Test if a reply holds changes of the arrays sent, and not whole arrays."""
    for record in content.values():
        if isinstance(record, ConfigRecord) and record.get(UPDATE_KEY) == "delta":
            return True
    return False


def _too_large(what: str, n: int, most: int, setting: str) -> RejectionError:
    by = f", by Validation({setting})" if setting else ""
    return RejectionError("size", f"the reply has {n:,} {what}: at most {most:,}{by}")


def _arrays(content: RecordDict, key: str) -> ArrayRecord:
    found = content.get(key)
    if isinstance(found, ArrayRecord):
        return found
    records = records_in(content, ArrayRecord)
    if len(records) != 1:
        raise RejectionError(
            "names", f"{len(records)} ArrayRecords: expected one, or one called {key!r}"
        )
    return next(iter(records.values()))


def records_in(content: RecordDict, kind: type[Record]) -> dict[str, Record]:
    """Return the records of a kind; Flower's own views take as long as the rest of a check."""
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def _some(names: Iterable[str]) -> str:
    """Return a few of some names, which a client chose, shortened."""
    found = sorted(names)
    return f"{[name[:40] for name in found[:5]]}" + (
        f" and {len(found) - 5} more" if found[5:] else ""
    )
