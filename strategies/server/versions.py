"""Model versions: the current one, and older ones for as long as a job in flight needs them.

A version is kept once however many devices hold it, and is dropped with its last job. Past a limit
of memory, the oldest versions are kept on disk, in a file without a name: it is unlinked as soon as
it is open, so its space is free with the last array on it, and no end of the process, not even
kill -9, leaves it behind. It has no format: arrays one after the other, each at a multiple of 64
bytes.

The arrays of a reply are read here against those of a version. They are in NumPy's file format, of
which `header_of` reads the one form that `numpy.save` writes for plain numbers, or quantised where
their job asked for it (`fedstale.strategies.messages`).
"""

import mmap
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedstale.errors import ConfigError, FedstaleError, ProtocolError, ResumeError
from fedstale.flower import MOST_HEADER_BYTES, NO_HEADER, STYPE, header_of
from fedstale.strategies.messages import (
    LEAST,
    bytes_of,
    coarse,
    decode,
    decoded,
    form_of,
    is_quantised,
)
from fedstale.strategies.types import Array, FormatName, Model, RejectionError
from fedstale.traces import outline

Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)
UPDATE_KEY = "fedstale.update"

_ALIGNED = 64
_HALF = np.dtype(np.float16)
_QUANTISED = {name: np.dtype(name) for name in ("float16", "float32", "float64")}
_CAST = '; Validation(dtypes="cast") converts it'


def stored(model: Model, folder: Path) -> Model:
    """Return the same arrays, read-only and mapped from an unnamed file.

    Args:
        model: C-contiguous arrays of any shapes and dtypes.
        folder: where the file is; a folder in memory (tmpfs) saves no memory.

    Returns:
        Arrays with the same names, bytes, shapes and dtypes. Their pages are read when they are
        used, and the system takes them back when it needs memory. The file is open until the last
        of them is gone.

    Raises:
        OSError: the disk is full, the folder is not writable, or too many files are open; what was
            written is gone.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     stored({"w": np.arange(3)}, Path(folder))
        {'w': array([0, 1, 2])}
    """
    offsets = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for array in model.values():
            offsets.append(file.seek(-(-file.tell() // _ALIGNED) * _ALIGNED))
            rest = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            while rest:
                rest = rest[file.write(rest) :]
        if file.tell() == 0:
            return model
        data = mmap.mmap(file.fileno(), file.tell(), access=mmap.ACCESS_READ)
    return {
        name: np.ndarray(array.shape, array.dtype, data, offset) if array.size else array
        for (name, array), offset in zip(model.items(), offsets, strict=True)
    }


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version of a model, never written to.

    Half precision has three digits, ends at 65,504, and squares of small steps vanish in it. So the
    server computes with float16 arrays as float32, rounded to numbers of float16 in each version;
    devices see float16. `holding` makes a snapshot of arrays as devices see them.
    """

    floats: Model
    """Arrays that are weighted and stepped: parameters and floating-point buffers."""
    counts: Model
    """Integer and boolean arrays, such as BatchNorm's counters: averaged and rounded, no more."""
    names: tuple[str, ...]
    """All names in the order of the app."""
    halves: frozenset[str] = frozenset()
    """Names of the arrays that are float16 on devices."""

    __repr__ = outline

    @property
    def n_bytes(self) -> int:
        """Size of all arrays together."""
        return sum(array.nbytes for part in (self.floats, self.counts) for array in part.values())

    @classmethod
    def of(cls, record: ArrayRecord) -> "Snapshot":
        """Read a model.

        Raises:
            ConfigError: there is no array, or one is neither real nor integer nor finite.
        """
        arrays = {name: np.array(array.numpy(), order="C") for name, array in record.items()}
        if not arrays:
            raise ConfigError("initial_arrays = {}: expected a model with at least one array")
        for name, array in arrays.items():
            if array.dtype.kind not in "fiub":
                raise ConfigError(
                    f"initial_arrays[{name!r}] has dtype {array.dtype}: expected real, integer or "
                    "boolean numbers; convert it, or leave it out of the model that is sent"
                )
            if not np.isfinite(array).all():
                raise ConfigError(
                    f"initial_arrays[{name!r}] holds NaN or infinity: expected finite"
                )
        floats = {name: x for name, x in arrays.items() if x.dtype.kind == "f"}
        counts = {name: x for name, x in arrays.items() if x.dtype.kind != "f"}
        return cls.holding(floats, counts, tuple(arrays))

    @classmethod
    def holding(cls, floats: Model, counts: Model, names: tuple[str, ...]) -> "Snapshot":
        """Return a version with some arrays, as devices see them."""
        halves = frozenset(name for name, array in floats.items() if array.dtype == _HALF)
        wide = {name: floats[name].astype(np.float32) for name in halves}
        return cls(floats | wide, counts, names, halves)

    def on_devices(self) -> Model:
        """Return the arrays of floating-point numbers as devices see them."""
        return self.floats | {name: self.floats[name].astype(_HALF) for name in self.halves}

    def record(self, *, shares: bool = False) -> ArrayRecord:
        """Return the model as Flower sends it.

        Args:
            shares: whether the arrays are let go of, and read in the record's memory from then on,
                if none is float16 on devices.
        """
        both = (self.on_devices() if self.halves else self.floats) | self.counts
        record = ArrayRecord()
        for name in self.names:
            array, stored = both[name], FlowerArray(both[name])
            record[name] = stored
            if shares and not self.halves:
                # The values are the end of a file of numpy.save.
                begin = len(stored.data) - array.nbytes
                values = np.frombuffer(stored.data, array.dtype, offset=begin)
                part = self.counts if name in self.counts else self.floats
                part[name] = values.reshape(array.shape)
        return record

    def stepped(self, floats: Model, count_steps: Mapping[str, Array]) -> "Snapshot":
        """Return a new version; integer arrays move by the nearest whole number.

        Args:
            floats: new values; those that float16 cannot hold become infinite in its arrays.
            count_steps: movement of the integer arrays, in float64.
        """
        if self.halves:
            with np.errstate(over="ignore"):
                rounded = {name: floats[name].astype(_HALF) for name in self.halves}
            floats = floats | {name: array.astype(np.float32) for name, array in rounded.items()}
        counts = {}
        for name, array in self.counts.items():
            counts[name] = _moved_count(array, count_steps[name])
        return Snapshot(floats, counts, self.names, self.halves)


def _moved_count(array: Array, step: Array) -> Array:
    moved = np.asarray(np.rint(array.astype(np.float64) + step))
    if array.dtype.kind == "b":
        return np.asarray(moved >= 1)
    limits = np.iinfo(array.dtype)
    # The largest 64-bit integers are no float64: clip to one that is.
    top = np.nextafter(float(limits.max), 0.0) if limits.bits == 64 else float(limits.max)
    return np.asarray(np.clip(moved, float(limits.min), top)).astype(array.dtype)


@dataclass(slots=True)
class _Held:
    snapshot: Snapshot
    jobs: int = 0
    on_disk: bool = False
    coarse: dict[FormatName, ArrayRecord] = field(default_factory=dict)
    """The version as it was sent, by format."""


class Versions:
    """The current model and the older ones that jobs still refer to."""

    def __init__(
        self,
        initial: Snapshot,
        *,
        memory_bytes: int | None = None,
        folder: Path | None = None,
    ) -> None:
        """Start with version 0.

        Args:
            initial: its model.
            memory_bytes: what the versions in memory may take together, the current one included,
                which is in memory always; past it the oldest ones are moved to disk, each once.
                None sets no limit.
            folder: where they go; the system's temporary folder if not given.

        Raises:
            ConfigError: the folder is needed and not writable.
        """
        self.version = 0
        self.current = initial
        """The current version's model."""
        self.n_bytes = initial.n_bytes
        """Bytes of one version's arrays."""
        self._held = {0: _Held(initial)}
        self._bytes: dict[FormatName | None, int] = {}
        self._memory_bytes = memory_bytes
        self._folder = Path(tempfile.gettempdir()) if folder is None else folder
        if memory_bytes is not None:
            try:
                tempfile.TemporaryFile(dir=self._folder).close()
            except OSError as problem:
                raise ConfigError(
                    f"strategy.checkpoints.version_memory_bytes = {memory_bytes}: versions cannot "
                    f"be written to {str(self._folder)!r} ({problem.strerror}); expected a "
                    "writable folder: set TMPDIR, or checkpoints, to one"
                ) from None

    def __getitem__(self, version: int) -> Snapshot:
        """Return a version that is current or held by a job."""
        return self._held[version].snapshot

    def sent(self, version: int, form: FormatName) -> ArrayRecord:
        """Return a version as it is sent in a format; it is kept as long as the version.

        Rounding to the nearest makes the same bytes each time, so a checkpoint holds none of them.
        """
        held = self._held[version]
        if form not in held.coarse:
            held.coarse[form] = coarse(held.snapshot.record(), form)
        return held.coarse[form]

    def bytes_in(self, form: FormatName | None) -> int:
        """Return the bytes of the numbers of the current model in a format; None for in full."""
        if form not in self._bytes:
            arrays = self.current.on_devices() | self.current.counts
            self._bytes[form] = bytes_of(arrays.values(), form)
        return self._bytes[form]

    def base(self, version: int, form: FormatName | None = None) -> Snapshot:
        """Return the model that a device trained from: a version, or what a format made of it.

        Args:
            version: that is current or held by a job.
            form: in which it was sent; None for in full.
        """
        if form is None:
            return self[version]
        return Snapshot.of(decoded(RecordDict({"": self.sent(version, form)})).array_records[""])

    def __len__(self) -> int:
        """Number of versions kept."""
        return len(self._held)

    def hold(self, version: int) -> None:
        """Keep a version for one more job."""
        self._held[version].jobs += 1

    def release(self, version: int) -> None:
        """Release a version for one job; the last one drops it, unless it is current."""
        held = self._held[version]
        assert held.jobs > 0, f"version {version} is released more often than held"
        held.jobs -= 1
        self._drop_unused(version)

    def advance(self, snapshot: Snapshot) -> int:
        """Make a model the new current version and return its number.

        Raises:
            FedstaleError: an older version had to go to disk and could not; all of them are still
                there.
        """
        before = self.version
        self.version += 1
        self.current, self._held[self.version] = snapshot, _Held(snapshot)
        self._drop_unused(before)
        if self._memory_bytes is not None:
            self._make_room()
        return self.version

    def replace(self, version: int, snapshot: Snapshot) -> None:
        """Make a model the only version; no job in flight may need another."""
        self.version, self.current, self._held = version, snapshot, {version: _Held(snapshot)}

    def state_dict(self, *, only_current: bool = False) -> dict[str, Any]:
        """Return every version that is kept.

        Args:
            only_current: whether the arrays of older ones are left out, because no job on them
                will be answered after the state is loaded.
        """
        return {
            "version": self.version,
            "names": list(self.current.names),
            "held": {
                str(version): {
                    "jobs": held.jobs,
                    "floats": {} if is_left_out else held.snapshot.on_devices(),
                    "counts": {} if is_left_out else dict(held.snapshot.counts),
                }
                for version, held in self._held.items()
                for is_left_out in [only_current and version != self.version]
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            ResumeError: it holds another model than the one started with.
            FedstaleError: an older version had to go to disk and could not.
        """
        before, names = self.current, tuple(state["names"])
        found = state["held"][str(state["version"])]
        for kind, arrays in (("floats", before.on_devices()), ("counts", before.counts)):
            expected, there = _described(arrays), _described(found[kind])
            if expected != there:
                differing = sorted(set(expected.items()) ^ set(there.items()))[0]
                raise ResumeError(
                    f"the checkpoint holds another model: {differing[0]!r} {differing[1]} is in "
                    "only one of the two; resume with the app and settings that wrote it"
                )
        self.version = int(state["version"])
        self._held = {
            int(version): _Held(
                Snapshot.holding(held["floats"], held["counts"], names), held["jobs"]
            )
            for version, held in state["held"].items()
        }
        self.current = self._held[self.version].snapshot
        self._make_room()

    @staticmethod
    def model_in(state: Mapping[str, Any]) -> ArrayRecord:
        """Return the current model of what `state_dict` returned, as Flower sends it."""
        found = state["held"][str(state["version"])]
        return Snapshot.holding(found["floats"], found["counts"], tuple(state["names"])).record()

    def _make_room(self) -> None:
        """Move the oldest versions to disk until the others keep to the limit."""
        if self._memory_bytes is None:
            return
        in_memory = {v: held for v, held in sorted(self._held.items()) if not held.on_disk}
        too_much = sum(held.snapshot.n_bytes for held in in_memory.values()) - self._memory_bytes
        for version, held in in_memory.items():
            if too_much <= 0 or version == self.version:
                return
            snapshot = held.snapshot
            try:
                both = stored(snapshot.floats | snapshot.counts, self._folder)
            except OSError as problem:
                raise FedstaleError(
                    f"version {version} of the model ({snapshot.n_bytes:,} bytes) cannot be "
                    f"written to {str(self._folder)!r}: {problem.strerror}; make room there, or "
                    "raise checkpoints.version_memory_bytes"
                ) from None
            held.snapshot = replace(
                snapshot,
                floats={name: both[name] for name in snapshot.floats},
                counts={name: both[name] for name in snapshot.counts},
            )
            held.on_disk = True
            too_much -= snapshot.n_bytes

    def _drop_unused(self, version: int) -> None:
        if version != self.version and self._held[version].jobs == 0:
            del self._held[version]


def _described(model: Model) -> dict[str, str]:
    return {name: f"{array.dtype} {array.shape}" for name, array in model.items()}


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
        text = f"arrays[{name!r}] has shape {shape!r:.80}: expected {like.shape}"
        raise RejectionError("shape", text)
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


def arrays_in(content: RecordDict, key: str) -> ArrayRecord:
    """Return the record of a reply with the model; the only one may have any name."""
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


def is_delta(content: RecordDict) -> bool:
    """Test if a reply holds changes of the arrays sent, and not whole arrays."""
    for record in content.values():
        if isinstance(record, ConfigRecord) and record.get(UPDATE_KEY) == "delta":
            return True
    return False
