"""What the embedded agent learns, is validated and is tested on has nothing in common."""

from itertools import combinations

import numpy as np
import pytest
from places import RECORDINGS

PARTS = ("training", "validation", "testing")


@pytest.fixture(scope="module")
def module():
    if not RECORDINGS.is_dir():
        pytest.skip("no published recordings in ../shared/traces")
    from lab import scenarios

    return scenarios


@pytest.mark.parametrize("kind", ["phones", "cars"])
def test_devices_and_days_of_an_agents_windows_are_disjoint(module, kind):
    made = module.recorded_scenarios(RECORDINGS, kind=kind, forecasts="none")
    parts = {name: getattr(made, name) for name in PARTS}
    ids = {name: set(part.traces.device_ids[part.devices]) for name, part in parts.items()}
    for one, other in combinations(PARTS, 2):
        assert not ids[one] & ids[other]
    drawn = {n: part.draw(40, np.random.default_rng(0)) for n, part in parts.items()}
    days = {n: {*np.unique(made.start // 86_400.0)} for n, made in drawn.items()}
    assert all(len(some) > 0 for some in days.values())
    assert parts["training"].end <= parts["validation"].start
    if kind == "phones":
        # All phones have one clock; a car that is tested has a log of its own, of later months.
        assert not (days["training"] | days["validation"]) & days["testing"]
    # Jobs are those of devices that are learnt from.
    assert made.testing.kinds is made.training.kinds


def test_no_device_is_forecast_by_what_it_taught(module, tmp_path, monkeypatch):
    halves = [(np.array([0, 2]), "first"), (np.array([1, 3]), "second")]
    monkeypatch.setattr(
        module, "cross_fitted", lambda *args, **how: [(d, Named(n)) for d, n in halves]
    )
    monkeypatch.setattr(module, "Forecaster", Named)
    made = module.fitted(Four(), 1.0, tmp_path)
    again = module.fitted(Four(), 1.0, tmp_path)
    for (devices, forecaster), (kept, read), (expected, name) in zip(
        made, again, halves, strict=True
    ):
        assert list(devices) == list(kept) == expected.tolist()
        assert forecaster.name == read.name == name


class Four:
    n_devices = 4


class Named:
    """A forecaster that keeps its name in a folder."""

    def __init__(self, name):
        self.name = name

    def save(self, folder, provenance):
        folder.mkdir(parents=True)
        (folder / "name").write_text(self.name)

    @classmethod
    def load(cls, folder):
        return cls((folder / "name").read_text())
