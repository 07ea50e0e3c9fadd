"""Apps of the shapes of Flower's examples end with the models of Flower's own engine."""

import numpy as np
import pytest
from flower_engine import final_model
from written_apps import APPS, four_devices, write_app

import fedstale

MODELS = ["older_api", "bagging", "own_start", "state", "mods", "privacy"]


def ours(path, name):
    app = write_app(path / name, name)
    run = fedstale.simulate(app, traces=four_devices(), out=path / "run")
    return list(run.model.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_models_are_those_of_flowers_own_engine_bit_for_bit(tmp_path, name):
    theirs = final_model(APPS / f"{name}.py")
    found = ours(tmp_path, name)
    assert len(found) == len(theirs) > 0
    for mine, other in zip(found, theirs, strict=True):
        if name == "bagging":
            # Replies arrive in another order there.
            assert sorted(mine.tobytes()) == sorted(other.tobytes())
        else:
            assert mine.tobytes() == other.tobytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_secure_aggregation_agrees_with_flowers_own_engine(tmp_path):
    (theirs,) = final_model(APPS / "secure_aggregation.py")
    (found,) = ours(tmp_path, "secure_aggregation")
    np.testing.assert_allclose(found, theirs, atol=1e-3)
