"""Fitted numbers describe the recordings, survive their file, and find a known truth again."""

from dataclasses import replace

import numpy as np
import pytest
from shared_fleets import synthetic

from fedstale.errors import TraceError
from fedstale.traces import Series, TraceSet
from fedstale.traces.synthetic import diurnal, population
from fedstale.traces.synthetic import links as regimes
from fedstale.traces.synthetic import load as background
from fedstale.traces.synthetic.fit import availability_marginal, fit
from fedstale.traces.trace_set import numbered


def test_availability_fitted_to_generated_devices_generates_alike():
    truth = TraceSet.synthetic(1000, days=4, seed=1).availability
    again = diurnal.fit(truth)
    starts, ends, counts = diurnal.draw(again, 1000, 4, np.random.default_rng(0))
    from fedstale.traces import Availability

    drawn = Availability.packed(starts, ends, counts, 4 * 86_400.0)
    a, b = availability_marginal(truth), availability_marginal(drawn)
    np.testing.assert_allclose(a["hourly"], b["hourly"], atol=0.03)
    np.testing.assert_allclose(np.log(a["session_s"]), np.log(b["session_s"]), atol=np.log(1.5))


def test_regimes_fitted_to_a_steady_noisy_link_have_its_spread_and_memory():
    rng = np.random.default_rng(0)
    z = np.zeros(20_000)
    for t in range(1, z.size):
        z[t] = 0.8 * z[t - 1] + 0.6 * rng.standard_normal()
    model = regimes.fit([np.exp(0.5 * z)])
    drawn = np.log(regimes.draw(model, 50, 2000, rng))
    assert drawn.std() == pytest.approx(0.5, rel=0.1)
    lagged = [(x[:-1] * x[1:]).mean() / (x * x).mean() for x in drawn - drawn.mean()]
    assert np.mean(lagged) == pytest.approx(0.8, abs=0.1)


def test_a_link_that_is_out_a_tenth_of_the_time_is_drawn_so():
    rng = np.random.default_rng(1)
    link = np.exp(rng.standard_normal(20_000) * 0.3)
    link[rng.random(2000).repeat(10) < 0.1] = 0.0
    drawn = regimes.draw(regimes.fit([link]), 50, 2000, rng)
    assert (drawn == 0).mean() == pytest.approx(0.1, abs=0.02)


def test_background_finds_its_own_frequencies_and_memory_again():
    rng = np.random.default_rng(2)
    truth = population.load().background
    again = background.fit(list(background.draw(truth, 2000, 288, rng)), 300.0)
    np.testing.assert_allclose(again.load, truth.load, atol=0.05)
    assert again.own == pytest.approx(truth.own, abs=0.08)


def test_numbers_survive_their_file(tmp_path):
    known = population.load()
    population.save(known, tmp_path / "p.toml", provenance={"a": "b"}, targets={})
    assert population.load(tmp_path / "p.toml") == known
    assert [p.name for p in tmp_path.iterdir()] == ["p.toml"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("population = [", "not a TOML file"),
        ("a = 1", r"expected a table \[population\]"),
        ("[population]\nspeed = [1.0]", "not the numbers of a population"),
    ],
)
def test_a_file_that_holds_no_population_is_one_clear_error(tmp_path, text, expected):
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(TraceError, match=expected):
        population.load(tmp_path / "p.toml")


def test_a_missing_file_is_one_clear_error(tmp_path):
    with pytest.raises(TraceError, match="cannot be read"):
        population.load(tmp_path / "p.toml")


def test_a_probability_above_one_is_rejected(tmp_path):
    known = population.load()
    group = replace(known.availability.groups[0], another=1.5)
    wrong = replace(known, availability=replace(known.availability, groups=(group,)))
    population.save(wrong, tmp_path / "p.toml", provenance={}, targets={})
    with pytest.raises(TraceError, match=r"another is not in \[0, 1\)"):
        population.load(tmp_path / "p.toml")


def tiny(**changes: object) -> dict:
    some = synthetic(100, days=2).take(np.arange(5))
    speeds = TraceSet(
        device_ids=numbered("m", 3), compute=Series.constant([1.0, 2.0, 3.0]), compute_unit="u"
    )
    idle = TraceSet(
        device_ids=numbered("h", 2), compute=Series.regular(np.full((2, 60), 0.5), step_s=300.0)
    )
    parts = {
        "availability": synthetic(100, days=2),
        "network": [some],
        "background": idle,
        "compute": speeds,
    }
    return parts | changes


def test_generated_recordings_can_be_fitted():
    assert fit(**tiny())[0].speed == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"availability": TraceSet.ideal(3)}, "whole days"),
        (
            {"compute": TraceSet.constant(2, compute=0, downlink_bit_per_s=1, uplink_bit_per_s=1)},
            "speed 0",
        ),
        ({"network": []}, "at least one set of links"),
        ({"background": TraceSet(device_ids=numbered("d", 1))}, "but not compute"),
    ],
)
def test_recordings_that_do_not_suffice_are_named(part, expected):
    with pytest.raises(TraceError, match=expected):
        fit(**tiny(**part))
