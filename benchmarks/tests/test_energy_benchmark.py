"""The benchmark of energy chooses as it says, and its page says what came of it."""

import numpy as np
import pytest

from fedstale.contrib.energy import Intensity
from fedstale.strategies.types import Candidates
from lab.results import read_result

NODES = [7, 8, 9]


def test_eafl_prefers_batteries_that_a_job_leaves_full():
    from energy.eafl import BATTERY_J, EAFL

    rule = EAFL(NODES)
    assert all(0.2 <= level <= 1.0 for level in rule.levels.values())
    rule.levels = {7: 0.9, 8: 0.9, 9: 0.3}
    took = [1000.0, 100.0, 100.0]
    known = Candidates.of(
        NODES, loss=[2.0] * 3, examples=[10.0] * 3, duration_s=took, times_picked=[1] * 3
    )
    # Two jobs of each at 5 W; Oort's own terms are the same for all but the slow one.
    left = np.array([0.9, 0.9, 0.3]) - 2 * np.array(took) * 5.0 / BATTERY_J
    utilities = rule.utilities(known)
    assert utilities[1] - utilities[2] == pytest.approx(0.75 * (left[1] - left[2]))
    assert utilities[1] - utilities[0] >= 0.75 * (left[1] - left[0]) - 1e-12
    assert np.argmax(utilities) == 1


@pytest.fixture
def two_regions(tmp_path):
    """Electricity that is clean in one region for ten hours, and in the other from then on."""
    path = tmp_path / "grid.csv"
    rows = ["time,region,g_per_kwh"]
    rows += [f"{h * 3600},eu,{100 if h < 10 else 500}" for h in range(72)]
    rows += [f"{h * 3600},us,{500 if h < 10 else 100}" for h in range(72)]
    path.write_text("\n".join(rows), encoding="utf-8")
    return Intensity.read(str(path)), {7: "us", 8: "eu", 9: "eu"}


@pytest.mark.parametrize(("now", "clean"), [(0.0, {8, 9}), (11 * 3600.0, {7})])
def test_clean_regions_are_drawn_in_first(two_regions, now, clean):
    from energy.clean import CleanFirst

    chosen = CleanFirst(*two_regions).select(
        Candidates.of(NODES), len(clean), now, np.random.default_rng(0)
    )
    assert set(chosen) == clean


def test_nobody_trains_in_dirty_hours_until_patience_ends(two_regions):
    from energy.clean import CleanHours

    intensity, _ = two_regions
    rule, rng = CleanHours(intensity, dict.fromkeys(NODES, "us")), np.random.default_rng(0)
    rule.patience_s = 3600.0
    chosen = [
        len(rule.select(Candidates.of(NODES), 2, hour * 3600.0, rng)) for hour in (0, 1, 2, 11)
    ]
    assert chosen == [0, 2, 0, 2]


@pytest.mark.parametrize("phones", [300, 100])
def test_fewer_jobs_save_grams_and_choosing_by_carbon_or_battery_does_not(phones):
    found = {row["arm"]: row for row in read_result("energy")["rows"] if row["phones"] == phones}
    for arm in ("FedBuff(5, 5)", "agent, 1 an hour"):
        assert found[arm]["grams_ratio"][2] < 1 < found[arm]["hours_ratio"][0]
    assert found["agent, 1 an hour"]["grams"] < 0.6 * found["FedBuff(5, 5)"]["grams"]
    for arm in ("agent, 20 an hour", "EAFL", "clean first", "clean hours"):
        assert found[arm]["grams_ratio"][2] > 1
    assert all(row["reached"] == 1 for row in found.values())
