"""The embedded populations are what fit finds in the published recordings."""

import tomllib
from dataclasses import asdict, replace
from importlib import resources

import numpy as np
import pytest
from places import RECORDINGS

from fedstale.traces import TraceSet
from fedstale.traces.synthetic import population
from populations.fit import fit

pytestmark = pytest.mark.skipif(not RECORDINGS.is_dir(), reason="published recordings are not here")


def embedded(name):
    """Return the file of an embedded population."""
    text = (resources.files("fedstale.traces.synthetic") / name).read_text("utf-8")
    return tomllib.loads(text)


@pytest.fixture(scope="module")
def recordings():
    return {
        "availability": TraceSet.read(RECORDINGS / "flash-days.json"),
        "network": [
            TraceSet.read(RECORDINGS / "uccmisl-5g.zip"),
            TraceSet.read(RECORDINGS / "mahimahi"),
        ],
        "background": TraceSet.read(RECORDINGS / "planetlab-cpu.tar.gz"),
        "compute": TraceSet.read(RECORDINGS / "ai-benchmark-devices.json"),
    }


@pytest.fixture(scope="module")
def fitted(recordings):
    return fit(**recordings)


def test_the_embedded_numbers_are_those_that_fit_finds(fitted):
    found, stored = (np.array(list(_numbers(asdict(p)))) for p in (fitted[0], population.load()))
    assert found.shape == stored.shape
    # The file keeps five digits, of which the last may differ between machines.
    np.testing.assert_allclose(found, stored, rtol=2e-4, atol=1e-6)


def _numbers(value: object):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for v in value:
            yield from _numbers(v)
    elif not isinstance(value, str):
        yield value


def test_the_embedded_targets_are_the_marginals_of_the_recordings(fitted):
    found, stored = fitted[1], embedded("synthetic.toml")["targets"]
    assert found.keys() == stored.keys()
    for part, marginal in found.items():
        for name, numbers in marginal.items():
            np.testing.assert_allclose(numbers, stored[part][name], rtol=1e-4)


def test_the_embedded_desktops_are_what_fit_finds():
    stated = TraceSet.constant(1, compute=3.0, downlink_bit_per_s=1, uplink_bit_per_s=1)
    found, targets = fit(
        availability=TraceSet.read(RECORDINGS / "library-desktops"),
        network=[TraceSet.constant(2, compute=0, downlink_bit_per_s=1e8, uplink_bit_per_s=1e8)],
        background=TraceSet.read(RECORDINGS / "planetlab-cpu.tar.gz"),
        compute=replace(stated, compute_unit="u"),
        cycle="week",
    )
    stored = population.load("desktops")
    assert found.links == stored.links
    assert found.speed == stored.speed == (3.0,)
    pairs = zip(found.availability.groups, stored.availability.groups, strict=True)
    for one, other in pairs:
        assert one.weight == pytest.approx(other.weight, rel=1e-6)
        np.testing.assert_allclose(one.session_s, other.session_s, rtol=2e-4)
        np.testing.assert_allclose(one.gap_s, other.gap_s, rtol=2e-4)
    for name, numbers in targets["availability"].items():
        np.testing.assert_allclose(
            numbers, embedded("desktops.toml")["targets"]["availability"][name], rtol=1e-3
        )
