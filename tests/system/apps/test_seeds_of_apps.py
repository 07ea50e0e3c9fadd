"""A seed is a seed: of every app that comes with the project, by every command and in Python."""

import pytest
from seeded_apps import APPS, WAYS, devices, opened
from short_searches import LEFT_OVERS, collected

__all__ = ["collected"]

pytestmark = LEFT_OVERS


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["recorded", "ideal"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", APPS)
def test_two_seeds_differ_in_events_and_model_and_one_repeats(name, way, kind, tmp_path):
    settings = opened(name, tmp_path) | {"traces": devices(kind, tmp_path)}
    runs = [WAYS[way](settings, seed, tmp_path / str(i)) for i, seed in enumerate((1, 2, 1))]
    (events, model), (other_events, other_model), again = runs
    assert again == (events, model)
    assert model != other_model
    # The older app asks all devices each time, and ideal ones take no time: nothing else is drawn.
    assert events != other_events or name == "older"
