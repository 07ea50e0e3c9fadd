import numpy as np
import pytest

from fedstale.traces.forecast.chain import Chain
from fedstale.traces.forecast.grid import HORIZONS_S

HOUR_S = 3600.0


@pytest.fixture
def chain():
    rng = np.random.default_rng(0)
    return Chain(leaving=rng.uniform(1e-5, 1e-3, (2, 24)))


def test_a_constant_rate_is_an_exponential_law():
    chain = Chain(leaving=np.full((2, 24), 1e-4))
    clock = np.array([0.0, 5.5 * HOUR_S, 23.9 * HOUR_S, np.nan])
    stays = chain.staying(np.ones(4, bool), clock)
    np.testing.assert_allclose(stays, np.tile(np.exp(-1e-4 * HORIZONS_S), (4, 1)))


def test_each_hour_and_each_state_has_its_rate():
    leaving = np.zeros((2, 24))
    leaving[1, 0] = 1e-3
    chain = Chain(leaving=leaving)
    # From half past eleven at night, the first half hour is calm.
    stays = chain.staying(np.array([True, False]), np.full(2, 23.5 * HOUR_S))
    half_an_hour, hour = HORIZONS_S.tolist().index(1800.0), HORIZONS_S.tolist().index(3600.0)
    assert stays[0, half_an_hour] == pytest.approx(1.0)
    assert stays[0, hour] == pytest.approx(np.exp(-1e-3 * 1800.0))
    np.testing.assert_allclose(stays[1], 1.0)


def test_log_odds_are_those_of_the_pieces_of_the_horizon_grid(chain):
    online = np.array([True, False, True, True])
    clock = np.array([30.0, 7.0 * HOUR_S + 90.0, np.nan, 24.0 * HOUR_S - 30.0])
    pieces = 1.0 / (1.0 + np.exp(-chain.log_odds(online, clock).astype(np.float64)))
    np.testing.assert_allclose(
        np.cumprod(pieces, axis=1), chain.staying(online, clock), rtol=2e-3, atol=2e-4
    )


def test_rates_are_those_of_the_examples(training):
    chain = Chain.of(training)
    assert chain.leaving.shape == (2, 24)
    assert np.all(chain.leaving > 0.0)
    seen, stays = training.seen, training.targets.stays[:, 1]
    known = ~np.isnan(stays) & seen.online
    said = chain.staying(seen.online, seen.time_of_day_s)[known, 1]
    assert said.mean() == pytest.approx(stays[known].mean(), abs=0.02)
