"""The one place where a reply is checked, and turned from records into an update.

What passes has the names and shapes of the model, only finite numbers and a sensible number of
examples; nothing behind the gate checks again. A reply holds the whole weights, as stock ClientApps
send them, or the change alone if one of its ConfigRecords says `"fedstale.update": "delta"`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Message, RecordDict

from fedstale.errors import ProtocolError
from fedstale.strategies import npy
from fedstale.strategies.arrays import Array, Model, chunks, is_finite
from fedstale.strategies.candidate import Forecast
from fedstale.strategies.versions import Snapshot

UPDATE_KEY = "fedstale.update"
FORECAST_RECORD = "fedstale.forecast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A reply that has passed."""

    delta: Model
    """Change of the float arrays against the version received; memory of its own."""
    counts: Model
    """Change of the integer arrays, in float64."""
    examples: float
    metrics: Mapping[str, float]
    """Scalar metrics, the number of examples left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Checks replies."""

    arrays_key: str = "arrays"
    examples_key: str = "num-examples"
    most_examples: float = 1e9
    """More than this is taken for a mistake, or for an attempt to own the average."""

    def open(self, reply: Message, base: Snapshot) -> Answer:
        """Return the update in a training reply.

        Args:
            reply: with content.
            base: the version that the device received.

        Raises:
            ProtocolError: the reply cannot be used; says why.
        """
        examples, metrics = self.measurements(reply)
        record = self._arrays(reply.content)
        names = set(base.names)
        if set(record) != names:
            missing, extra = sorted(names - set(record)), sorted(set(record) - names)
            raise ProtocolError(f"arrays do not fit the model: missing {missing}, unknown {extra}")
        is_delta = any(
            config.get(UPDATE_KEY) == "delta" for config in reply.content.config_records.values()
        )
        delta = {name: _read(record[name], name, x, x.dtype) for name, x in base.floats.items()}
        counts = {
            name: _read(record[name], name, x, np.dtype(np.float64))
            for name, x in base.counts.items()
        }
        if not is_delta:
            _subtract(delta, base.floats)
            _subtract(counts, base.counts)
        for name, array in (delta | counts).items():
            if not is_finite({name: array}):
                raise ProtocolError(f"arrays[{name!r}] holds NaN or infinity, or left the range")
        return Answer(delta=delta, counts=counts, examples=examples, metrics=metrics)

    def measurements(self, reply: Message) -> tuple[float, dict[str, float]]:
        """Return the number of examples and the scalar metrics of a reply.

        Raises:
            ProtocolError: there is no usable number of examples.
        """
        for record in reply.content.metric_records.values():
            if self.examples_key not in record:
                continue
            examples = record[self.examples_key]
            if isinstance(examples, list) or not 0 < examples <= self.most_examples:
                raise ProtocolError(
                    f"{self.examples_key} = {examples!r}: expected a number above 0, at most "
                    f"{self.most_examples:g}"
                )
            scalars = {
                key: float(value)
                for key, value in record.items()
                if key != self.examples_key and not isinstance(value, list)
            }
            return float(examples), scalars
        raise ProtocolError(f"no MetricRecord holds {self.examples_key!r}")

    def _arrays(self, content: RecordDict) -> ArrayRecord:
        records = content.array_records
        if self.arrays_key in records:
            return records[self.arrays_key]
        if len(records) != 1:
            raise ProtocolError(
                f"{len(records)} ArrayRecords: expected one, or one called {self.arrays_key!r}"
            )
        return next(iter(records.values()))


def forecast_in(reply: Message) -> Forecast:
    """Return the numbers of a device's forecast of itself; empty if it sent none."""
    record = reply.content.config_records.get(FORECAST_RECORD)
    if record is None:
        return {}
    kept: dict[str, float | list[float]] = {}
    for key, value in record.items():
        if isinstance(value, int | float) and isfinite(value):
            kept[key] = float(value)
        elif isinstance(value, list) and all(isinstance(x, int | float) for x in value):
            kept[key] = [float(x) for x in value]
    return kept


def _read(stored: FlowerArray, name: str, like: Array, dtype: np.dtype[np.generic]) -> Array:
    """Return a stored array as writable numbers of a type."""
    try:
        array = npy.read(stored)
    except (ValueError, TypeError, OSError, EOFError) as problem:
        raise ProtocolError(f"arrays[{name!r}] cannot be read: {problem}") from problem
    if array.shape != like.shape:
        raise ProtocolError(f"arrays[{name!r}] has shape {array.shape}: expected {like.shape}")
    if array.dtype.kind not in "fiub":
        raise ProtocolError(f"arrays[{name!r}] has dtype {array.dtype}: expected numbers")
    # What a cast makes infinite is found by the check for finite numbers.
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype, copy=False)


def _subtract(arrays: Model, base: Model) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        for name, array in arrays.items():
            for x, y in chunks(array, base[name]):
                np.subtract(x, y, out=x)
