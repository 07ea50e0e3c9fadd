"""The grids that observations and forecasts live on, and the levels of the quantiles.

A device's past is seen through 24 steps that grow from seconds to hours, so that one short sequence
holds both the last minute and yesterday. What it will do is told on a grid of horizons; anything in
between follows by interpolation, so one forecast serves jobs of every size.
"""

import numpy as np

from fedstale.traces.arrays import Array

RATES = ("compute", "downlink", "uplink")
"""Channels with a rate, in the order of every array that has an axis of channels."""

LEVELS: Array = np.array([0.1, 0.5, 0.9])
"""Levels of the quantiles."""

HORIZONS_S: Array = np.array(
    [60.0, 300.0, 900.0, 1800.0, 3600.0, 7200.0, 14400.0, 28800.0, 57600.0, 86400.0]
)
"""Horizons of staying online, or of staying away, in s."""

RATE_HORIZONS_S: Array = np.array([10.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 7200.0])
"""Horizons over which a mean rate is forecast, in s."""

EDGES_S: Array = np.concatenate(
    [
        [0, 10, 60, 120, 180, 240, 300],
        [600, 900, 1200, 1800, 2400, 3600],
        [5400, 7200, 10800, 14400, 18000, 21600],
        [28800, 36000, 43200, 57600, 72000, 90000],
    ]
).astype(np.float64)
"""How long ago the steps of the past end and begin, in s, the newest first; shape (steps + 1,)."""

STEPS = EDGES_S.size - 1
"""Number of steps of the past."""

DAY_S = 86_400.0
