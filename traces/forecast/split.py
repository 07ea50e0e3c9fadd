"""Which devices and which time a forecaster may learn from, and which it is tested on.

Devices and time are split together: what is tested happens to devices that were never learnt from,
and later than anything learnt. The split follows from a seed, so training and testing agree on it
without a file.
"""

from dataclasses import dataclass

import numpy as np

from fedstale.errors import ConfigError, TraceError
from fedstale.traces.arrays import Index
from fedstale.traces.forecast.examples import Examples, draw, record_s
from fedstale.traces.forecast.observation import Observer
from fedstale.traces.trace_set import TraceSet

SHORT_HISTORY = 0.2
"""Share of the examples to learn from whose device remembers only a part of its past."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Split:
    """Three sets of devices and the instant between learning and testing."""

    training: Index
    """Positions of the devices to learn from, before `turn`."""
    validation: Index
    """Positions of the devices to stop early and to calibrate on, before `turn`."""
    testing: Index
    """Positions of the devices to test on, from `turn` on."""
    turn: float
    """Instant in s."""
    end: float
    """End of the record in s."""


def split(traces: TraceSet, *, seed: int, turn_share: float = 0.625) -> Split:
    """Return 60, 20 and 20 % of the devices, and the instant that ends the learning.

    Args:
        traces: the devices, at least 5.
        seed: of the draw.
        turn_share: share of the record that may be learnt from, in (0, 1).

    Raises:
        TraceError: there are too few devices.
        ConfigError: the share is not in (0, 1).

    Example:
        >>> parts = split(TraceSet.ideal(10), seed=0)
        >>> parts.training.size, parts.validation.size, parts.testing.size
        (6, 2, 2)
    """
    n = traces.n_devices
    if n < 5:
        raise TraceError(f"{n} devices: expected at least 5 to split by device")
    if not 0.0 < turn_share < 1.0:
        raise ConfigError(f"turn_share = {turn_share}: expected a share in (0, 1)")
    order = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(5,))).permutation(n)
    first, second = round(0.6 * n), round(0.8 * n)
    end = float(record_s(traces).max())
    return Split(
        training=np.sort(order[:first]),
        validation=np.sort(order[first:second]),
        testing=np.sort(order[second:]),
        turn=turn_share * end,
        end=end,
    )


def draw_parts(
    traces: TraceSet, stop_on: TraceSet | None, *, n: int, seed: int
) -> tuple[Examples, Examples]:
    """Return examples to learn from, and a fifth as many to stop early on.

    Args:
        traces: the devices.
        stop_on: other devices to stop early on, out of other recordings; then all devices of
            `traces` are learnt from. None takes the validation devices of the split.
        n: number of examples to learn from.
        seed: of the split and of the draw.
    """
    parts = split(traces, seed=seed)
    observer = Observer(traces)
    learnt, other, stopped = parts.training, observer, parts.validation
    if stop_on is not None:
        learnt, stopped = np.arange(traces.n_devices), np.arange(stop_on.n_devices)
        other = Observer(stop_on)
    training = draw(
        observer, learnt, start=0.0, until=parts.turn, n=n, seed=seed, short_history=SHORT_HISTORY
    )
    held_out = draw(
        other,
        stopped,
        start=0.0,
        until=parts.turn,
        n=max(n // 5, 100),
        seed=seed + 1,
        short_history=SHORT_HISTORY,
    )
    return training, held_out
