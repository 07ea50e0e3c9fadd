import numpy as np

from agent.exponents import MIDDLE, NAMES, SETTINGS, drawn, least, terms


def test_every_setting_is_of_the_part_that_is_learnt_from():
    assert {run.part for run in SETTINGS} == {"learn"}
    assert len(set(SETTINGS)) == 81


def test_the_least_point_of_noisy_runs_is_found():
    rng = np.random.default_rng(0)
    settings = rng.integers(20, size=1_500)
    tried = [drawn(rng) for _ in settings]
    z = terms(tried)[:, : len(NAMES)]
    # Least where picks count a standard deviation more and the temperature one less.
    bowl = 0.1 * ((z[:, 3] - 1.0) ** 2 + (z[:, 4] + 1.0) ** 2)
    hours = np.exp(bowl + rng.normal(size=20)[settings] + 0.2 * rng.normal(size=settings.size))
    middle = {name: getattr(MIDDLE, name) for name in NAMES}
    found = least(settings, tried, hours, middle)
    at = terms([found.exponents])[0, : len(NAMES)]
    assert np.abs(at[3:] - [1.0, -1.0]).max() < 0.3
    assert np.abs(at[:3]).max() < 0.7
    assert abs(np.log(found.against) + 0.2) < 0.06
    assert 0.17 < found.error < 0.23
