"""Estimating a generated population from recordings.

Each part is fitted by the module that draws it; this one prepares the recordings and records the
marginals that the generated devices should have. Nothing is tuned by hand.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedstale.errors import TraceError
from fedstale.traces.arrays import Array
from fedstale.traces.series import Series
from fedstale.traces.synthetic import links as regimes
from fedstale.traces.synthetic import load as background_model
from fedstale.traces.synthetic import marginals
from fedstale.traces.synthetic import presence as diurnal
from fedstale.traces.synthetic.population import Links, Population
from fedstale.traces.trace_set import TraceSet

_CLASSES = 10
_MOST_PROCESSORS = 4000


def fit(
    *,
    availability: TraceSet,
    network: Sequence[TraceSet],
    background: TraceSet,
    compute: TraceSet,
) -> Population:
    """Return the population that recordings come from, as well as the generator can tell.

    Args:
        availability: devices that come and go, in records of whole days.
        network: sets of links; all their downlinks count, and at least one set must know the
            uplinks too.
        background: processors, with the share that is left of them, on a regular grid.
        compute: constant speeds of devices.

    Returns:
        Parameters for `synthesise`.

    Raises:
        TraceError: a recording does not know what it is asked for, or holds too little.
    """
    availability.require("availability")
    background.require("compute")
    compute.require("compute")
    assert availability.availability is not None
    assert background.compute is not None
    assert compute.compute is not None
    speeds = np.sort(compute.compute.value_at(np.arange(compute.n_devices), 0.0))
    if speeds[0] <= 0:
        raise TraceError("compute to fit: a device has speed 0; leave it out")
    if compute.compute_unit is None:
        raise TraceError(
            "compute to fit: compute_unit is missing: expected what one unit of work is"
        )
    classes = np.array_split(speeds, min(_CLASSES, speeds.size))
    return Population(
        availability=diurnal.fit(availability.availability, marginals.epoch_s(availability.epoch)),
        links=_fit_links(network),
        background=_fit_background(background.compute),
        # The geometric mean of a class: speeds differ by factors.
        speed=tuple(float(f"{np.exp(np.log(c).mean()):.5g}") for c in classes),
        compute_unit=compute.compute_unit,
    )


def targets(
    *,
    availability: TraceSet,
    network: Sequence[TraceSet],
    background: TraceSet,
    compute: TraceSet,
) -> dict[str, Any]:
    """Return the marginals of the recordings that `fit` takes, named as `of_generated` names them.

    Raises:
        TraceError: a recording does not know what it is asked for.
    """
    availability.require("availability")
    background.require("compute")
    compute.require("compute")
    assert availability.availability is not None
    assert background.compute is not None
    assert compute.compute is not None
    downlinks, uplinks = zip(*_grids(network), strict=True)
    known = [up for up in uplinks if up is not None]
    return {
        "availability": marginals.availability(
            availability.availability, epoch_s=marginals.epoch_s(availability.epoch)
        ),
        "downlink": marginals.links(Series.regular(downlinks, step_s=1.0)),
        "uplink": marginals.links(Series.regular(known, step_s=1.0)),
        "background": marginals.load(background.compute),
        "speed": marginals.speed(compute.compute.value_at(np.arange(compute.n_devices), 0.0)),
    }


def _fit_links(network: Sequence[TraceSet]) -> Links:
    links = _grids(network)
    middle = np.log([regimes.median_of(down) for down, _ in links])
    both = [(down, up) for down, up in links if up is not None]
    if len(both) < 2 or len(links) < 2:
        raise TraceError("network to fit: expected at least 2 links that know their uplink too")
    share = np.log([regimes.median_of(up) / regimes.median_of(down) for down, up in both])
    return Links(
        median_log=_short(middle.mean()),
        median_log_sd=_short(middle.std(ddof=1)),
        uplink_share_log=_short(share.mean()),
        uplink_share_log_sd=_short(share.std(ddof=1)),
        downlink=regimes.fit([down for down, _ in links]),
        uplink=regimes.fit([up for _, up in both]),
    )


def _fit_background(left: Series) -> background_model.Background:
    if left.stored.step_s is None:
        raise TraceError("background to fit: expected loads on a regular grid")
    some = np.unique(np.linspace(0, left.n_devices - 1, _MOST_PROCESSORS).astype(np.int64))
    loads = [1.0 - left.segments(int(device))[1] for device in some]
    return background_model.fit(loads, left.stored.step_s)


def _grids(network: Sequence[TraceSet]) -> list[tuple[Array, Array | None]]:
    """Return downlink and, where it is known, uplink of each link, one rate a second."""
    links: list[tuple[Array, Array | None]] = []
    for traces in network:
        traces.require("downlink")
        assert traces.downlink is not None
        for device in range(traces.n_devices):
            up = None if traces.uplink is None else _grid(traces.uplink, device)
            links.append((_grid(traces.downlink, device), up))
    if not links:
        raise TraceError("network to fit: expected at least one set of links")
    return links


def _grid(series: Series, device: int) -> Array:
    seconds = np.arange(np.floor(series.lengths[series.rows[device]]))
    return series.value_at(np.full(seconds.size, device), seconds + 0.5)


def _short(x: float) -> float:
    return float(f"{x:.6g}")
