"""Generated devices are like the recorded ones that their population was fitted to."""

import tomllib
from importlib import resources

import numpy as np
import pytest

from fedstale.traces import TraceSet
from fedstale.traces.synthetic.diurnal import WEEK_S
from populations.marginals import (
    availability_marginal,
    link_marginal,
    load_marginal,
    speed_marginal,
)


def targets(name):
    """Return the marginals of the recordings that an embedded population was fitted to."""
    text = (resources.files("fedstale.traces.synthetic") / name).read_text("utf-8")
    return tomllib.loads(text)["targets"]


# What "like the recorded ones" means. Of seeds 0 to 11, the worst hour is off by 0.027, the worst
# share by 0.091, quantiles of lengths by a factor of 1.9, of downlinks 1.6, autocorrelations by
# 0.12.
HOURLY_ABS = 0.03
SHARE_ABS = 0.10
FACTOR = 2.0
LOAD_ABS = 0.03
PERSISTENCE_ABS = 0.08
AUTOCORRELATION_ABS = 0.15


def assert_alike(generated: dict, recorded: dict) -> None:
    """Compare marginals; quantiles of lengths and rates within a factor, shares absolutely.

    The lowest quantile of a link is an outage on both sides, and is left to the share of outages.
    The gap's highest quantile is cut by the length of the record, and depends on few devices.
    """
    online, wanted = generated["availability"], recorded["availability"]
    np.testing.assert_allclose(online["hourly"], wanted["hourly"], atol=HOURLY_ABS)
    np.testing.assert_allclose(online["share"], wanted["share"], atol=SHARE_ABS)
    assert online["never"] == pytest.approx(wanted["never"], abs=0.03)
    np.testing.assert_allclose(
        online["autocorrelation"], wanted["autocorrelation"], atol=PERSISTENCE_ABS
    )
    assert_factor(online["session_s"], wanted["session_s"], FACTOR)
    assert_factor(online["gap_s"], wanted["gap_s"], FACTOR)
    assert_factor(generated["downlink"]["bit_per_s"][1:], recorded["downlink"]["bit_per_s"][1:])
    for side in ("downlink", "uplink"):
        link, seen = generated[side], recorded[side]
        assert_factor(link["relative"][1:], seen["relative"][1:], FACTOR)
        assert link["out"] == pytest.approx(seen["out"], abs=0.03)
        np.testing.assert_allclose(
            link["autocorrelation"], seen["autocorrelation"], atol=AUTOCORRELATION_ABS
        )
    load, busy = generated["background"], recorded["background"]
    np.testing.assert_allclose(load["load"], busy["load"], atol=LOAD_ABS)
    np.testing.assert_allclose(load["autocorrelation"], busy["autocorrelation"], atol=0.1)
    assert_factor(generated["speed"]["work_per_s"], recorded["speed"]["work_per_s"], 1.25)


def assert_factor(a: list[float], b: list[float], factor: float = FACTOR) -> None:
    ratio = np.array(a) / np.array(b)
    assert np.all((ratio < factor) & (ratio > 1 / factor)), (a, b)


def marginals_of(traces: TraceSet) -> dict:
    return {
        "availability": availability_marginal(traces.availability),
        "downlink": link_marginal(traces.downlink),
        "uplink": link_marginal(traces.uplink),
        "background": load_marginal(traces.compute),
        "speed": speed_marginal(traces.compute.scales),
    }


def test_generated_devices_have_the_recorded_marginals():
    # As long as most of the recording: lengths of gaps depend on it.
    assert_alike(marginals_of(TraceSet.synthetic(2000, days=5, seed=0)), targets("synthetic.toml"))


def test_generated_desktops_have_the_recorded_marginals():
    desktops = TraceSet.synthetic(400, days=28, seed=0, population="desktops")
    wanted = targets("desktops.toml")["availability"]
    found = availability_marginal(desktops.availability, cycle_s=WEEK_S)
    assert len(wanted["hourly"]) == 168
    error = np.abs(np.subtract(found["hourly"], wanted["hourly"]))
    assert error.max() < 0.1
    assert error.mean() < 0.03
    assert np.corrcoef(found["hourly"], wanted["hourly"])[0, 1] > 0.85
    np.testing.assert_allclose(found["autocorrelation"], wanted["autocorrelation"], atol=0.1)
    assert len(wanted["autocorrelation"]) == 5
    # The upper quantiles of the shares are those of devices that keep one habit for good.
    np.testing.assert_allclose(found["share"][:3], wanted["share"][:3], atol=0.1)
    for lengths in ("session_s", "gap_s"):
        ratio = np.array(found[lengths]) / wanted[lengths]
        assert np.all((ratio > 1 / 1.5) & (ratio < 1.5))
