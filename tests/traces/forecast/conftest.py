import numpy as np
import pytest
from shared_fleets import synthetic

from fedstale.traces.forecast import TraceObserver, draw


@pytest.fixture(scope="module")
def _one_thread():
    """Let trees this small be grown by one thread: several wait for one another by computing.

    Told how many, scikit-learn does not count the cores, for which it would start a process.
    """
    import sklearn.ensemble  # noqa: F401  # The limit is set on libraries that are loaded.
    from threadpoolctl import threadpool_limits

    with pytest.MonkeyPatch.context() as patch, threadpool_limits(1):
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


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
