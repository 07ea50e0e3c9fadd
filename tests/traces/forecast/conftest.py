import numpy as np
import pytest

from fedstale.traces import TraceSet
from fedstale.traces.forecast import TraceObserver, draw


@pytest.fixture(scope="session")
def fleet():
    return TraceSet.synthetic(60, days=3, seed=0)


@pytest.fixture(scope="session")
def observer(fleet):
    return TraceObserver(fleet)


@pytest.fixture(scope="session")
def training(observer):
    return draw(
        observer, np.arange(40), start=0.0, until=2 * 86_400.0, n=1500, seed=1, short_history=0.2
    )


@pytest.fixture(scope="session")
def held_out(observer):
    return draw(observer, np.arange(40, 60), start=0.0, until=2 * 86_400.0, n=400, seed=2)
