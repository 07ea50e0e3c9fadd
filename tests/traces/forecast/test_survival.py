import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstale.traces import Job
from fedstale.traces.forecast import DeviceForecast
from fedstale.traces.forecast.observation import RATE_HORIZONS_S
from fedstale.traces.forecast.sessions import HORIZONS_S
from fedstale.traces.forecast.survival import LONGEST_S, sampled, survival_at


def forecast(rates, *, online=True, survival=None, n=1):
    survival = np.ones(HORIZONS_S.size) if survival is None else survival
    return DeviceForecast(
        online=np.full(n, online),
        survival=np.tile(survival, (n, 1)),
        available=np.full((n, HORIZONS_S.size), 0.5),
        new_session_survival=0.5 ** (HORIZONS_S / 3600.0),
        rates=np.broadcast_to(rates, (n, 3, RATE_HORIZONS_S.size, 3)),
    )


def job(**changes):
    return Job(**({"work": 100.0, "download_bytes": 1000, "upload_bytes": 2000} | changes))


def test_certain_constant_rates_give_the_times_that_trips_gives():
    found = forecast(np.array([2.0, 8000.0, 1600.0])[:, None, None]).of_job(job())
    np.testing.assert_allclose(found.training_s, 50.0)
    np.testing.assert_allclose(found.reporting_s, 10.0)
    np.testing.assert_allclose(found.total_s, 61.0)
    np.testing.assert_allclose(found.p_finish, 1.0)


def test_a_dead_link_gives_a_finite_time_and_no_chance():
    found = forecast(np.array([1.0, 0.0, 1.0])[:, None, None]).of_job(job(ttl_s=600.0))
    assert np.isfinite(found.total_s).all()
    assert found.total_s[0, 1] <= LONGEST_S
    np.testing.assert_array_equal(found.p_finish, 0.0)


def test_the_probability_to_finish_is_the_survival_as_long_as_it_takes():
    survival = 0.5 ** (HORIZONS_S / 3600.0)
    found = forecast(np.array([1.0, 1e9, 1e9])[:, None, None], survival=survival).of_job(
        job(work=1800.0)
    )
    assert found.p_finish[0] == pytest.approx(0.5**0.5, rel=1e-3)


def test_a_device_offline_must_come_back_and_stay():
    survival = 0.5 ** (HORIZONS_S / 3600.0)
    offline = forecast(np.full((3, 1, 1), 1e9), online=False, survival=survival)
    soon = offline.of_job(job(work=1.0, ttl_s=3600.0)).p_finish[0]
    never = offline.of_job(job(work=1.0, ttl_s=20.0)).p_finish[0]
    assert 0.4 < soon <= 0.5
    assert never == 0.0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(1e-3, 1e6), min_size=63, max_size=63),
    st.floats(0, 1e9),
    st.floats(0, 1e9),
    st.floats(1, 1e6),
)
def test_any_forecast_gives_ordered_finite_times_and_a_probability(rates, work, size, ttl):
    found = forecast(np.array(rates).reshape(3, 7, 3)).of_job(
        job(work=work, upload_bytes=size, download_bytes=size, ttl_s=ttl)
    )
    for times in (found.training_s, found.reporting_s, found.total_s):
        assert np.all(np.isfinite(times))
        assert np.all(np.diff(times, axis=1) >= 0)
        assert np.all(times >= 0)
    assert 0.0 <= found.p_finish[0] <= 1.0


def test_survival_has_the_values_of_the_grid_on_the_grid_and_falls():
    survival = np.minimum.accumulate(np.random.default_rng(0).random((HORIZONS_S.size, 5)), axis=0)
    at = survival_at(survival, np.tile(HORIZONS_S[:, None], 5))
    np.testing.assert_allclose(at, survival, rtol=1e-9)
    fine = survival_at(survival, np.tile(np.linspace(0, 2e5, 500)[:, None], 5))
    assert np.all(np.diff(fine, axis=0) <= 1e-12)
    np.testing.assert_array_equal(fine[0], 1.0)


def test_samples_have_the_quantiles_that_they_were_made_from():
    drawn = sampled(np.array([[10.0], [20.0], [80.0]]))[:, 0]
    assert np.median(drawn) == pytest.approx(20.0, rel=0.05)
    assert (drawn < 10.0).mean() == pytest.approx(0.1, abs=0.04)
    assert (drawn > 80.0).mean() == pytest.approx(0.1, abs=0.04)


def slowly(devices, work, down, up, ttl):
    """Return what `of_job` returns for one device, number by number, with numpy's interpolation."""
    amounts = np.maximum(devices.rates[0], 1e-9) * RATE_HORIZONS_S[:, None]
    curves = np.maximum.accumulate(np.maximum.accumulate(amounts, axis=1), axis=2)
    edges = np.append(0.0, RATE_HORIZONS_S)

    def beyond(curve):
        if curve[-1] > curve[-2]:
            return (curve[-1] - curve[-2]) / (edges[-1] - edges[-2])
        return curve[-1] / edges[-1]

    def when(curve, amount):
        if amount >= curve[-1]:
            return edges[-2] + (amount - curve[-2]) / beyond(curve)
        k = np.flatnonzero(curve <= amount)[-1]
        return edges[k] + (amount - curve[k]) / (curve[k + 1] - curve[k]) * (
            edges[k + 1] - edges[k]
        )

    def phase(channel, amount, begins):
        times = []
        for level in range(3):
            curve = np.append(0.0, curves[channel, :, 2 - level])
            begin = begins[level]
            before = np.interp(begin, edges, curve)
            if begin >= edges[-2]:
                before = curve[-2] + (begin - edges[-2]) * beyond(curve)
            later, at_once = when(curve, before + amount) - begin, when(curve, amount)
            times.append((min(later, at_once), later, max(later, at_once))[level])
        return np.maximum.accumulate(np.clip(times, 0.0, LONGEST_S)) * (amount > 0)

    downloaded = phase(1, 8.0 * down, np.zeros(3))
    trained = phase(0, work, downloaded)
    reported = phase(2, 8.0 * up, downloaded + trained)
    total = downloaded + trained + reported
    drawn = sampled(total[:, None])[:, 0]
    grid = np.append(0.0, HORIZONS_S)
    logs = np.log(np.append(1.0, devices.survival[0]))
    new = np.log(np.append(1.0, devices.new_session_survival))
    if devices.online[0]:
        p = np.mean([np.exp(np.interp(t, grid, logs)) * (t <= ttl) for t in drawn])
    else:
        p = 0.0
        for k in range(HORIZONS_S.size):
            middle = (grid[k] + grid[k + 1]) / 2
            share = np.exp(logs[k]) - np.exp(logs[k + 1])
            each = [np.exp(np.interp(t, grid, new)) * (middle + t <= ttl) for t in drawn]
            p += share * np.mean(each)
    return trained, reported, total, p


def test_thousands_at_once_are_forecast_as_a_loop_forecasts_each():
    rng = np.random.default_rng(0)
    n = 2500
    spread = np.sort(rng.normal(0, 0.7, (n, 3, RATE_HORIZONS_S.size, 3)), axis=3)
    devices = DeviceForecast(
        online=rng.random(n) < 0.5,
        survival=np.minimum.accumulate(rng.uniform(0.5, 1.0, (n, HORIZONS_S.size)), axis=1),
        available=np.full((n, HORIZONS_S.size), 0.5),
        new_session_survival=0.5 ** (HORIZONS_S / 3600.0),
        rates=np.exp(spread + rng.normal(0, 1, (n, 3, 1, 1)))
        * np.array([1, 1e6, 2e5])[:, None, None],
    )
    asked = {
        "work": rng.uniform(0, 3000, n) * (rng.random(n) < 0.9),
        "download_bytes": rng.uniform(0, 1e8, n),
        "upload_bytes": rng.uniform(0, 1e7, n),
        "ttl_s": rng.uniform(1, 1e4, n),
    }
    together = devices.of_job(Job(**asked))
    for i in rng.integers(n, size=150):
        one = DeviceForecast(
            online=devices.online[i : i + 1],
            survival=devices.survival[i : i + 1],
            available=devices.available[i : i + 1],
            new_session_survival=devices.new_session_survival,
            rates=devices.rates[i : i + 1],
        )
        trained, reported, total, p = slowly(one, *(asked[k][i] for k in asked))
        np.testing.assert_allclose(together.training_s[i], trained, rtol=1e-9)
        np.testing.assert_allclose(together.reporting_s[i], reported, rtol=1e-9)
        np.testing.assert_allclose(together.total_s[i], total, rtol=1e-9)
        assert together.p_finish[i] == pytest.approx(p, rel=1e-9, abs=1e-12)
