import numpy as np
import pytest
from shared_fleets import synthetic

from fedstale.traces.forecast import TraceObserver, draw


@pytest.fixture(scope="session")
def fleet():
    return synthetic(60, days=3)


@pytest.fixture(scope="session")
def observer(fleet):
    return TraceObserver(fleet)


@pytest.fixture(scope="session")
def training(observer):
    return draw(
        observer, np.arange(40), start=0.0, until=2 * 86_400.0, n=600, seed=1, short_history=0.2
    )


@pytest.fixture(scope="session")
def held_out(observer):
    return draw(observer, np.arange(40, 60), start=0.0, until=2 * 86_400.0, n=400, seed=2)
