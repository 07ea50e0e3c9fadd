"""What the page of attacks and kills says in words stands in the results of its benchmarks."""

import pytest
from published import page, rows

SETTINGS = "on time", "late"


@pytest.fixture(scope="module")
def found():
    return {
        (row["setting"], row["rule"], row["attack"]): row["accuracy"] for row in rows("attacks")
    }


@pytest.fixture(scope="module")
def lost(found):
    """Return how much less than the plain mean without attack; positive is a loss."""
    return {key: found[key[0], "mean", "none"] - accuracy for key, accuracy in found.items()}


def test_who_over_reports_owns_a_plain_mean(found):
    assert all(
        found[setting, "mean, examples uncapped", "lying examples"] < 0.11 for setting in SETTINGS
    )
    assert "(0.187)" in page("results/robustness.md")
    assert found["on time", "mean", "lying examples"] == pytest.approx(0.187, abs=0.0005)


def test_what_rules_cost_without_an_attack(lost):
    assert lost["on time", "Krum", "none"] == pytest.approx(0.13, abs=0.005)
    for rule in ("median", "Bulyan"):
        early, late = (lost[setting, rule, "none"] for setting in SETTINGS)
        assert 0.015 < early < late < 0.055


def test_four_rules_withstand_every_attack(lost):
    rules = "Multi-Krum", "CTMA", "geometric median", "centred clipping"
    under = {key: by for key, by in lost.items() if key[1] in rules}
    assert len(under) == len(rules) * (9 + 8)
    assert max(under.values()) <= 0.04
    others = {rule for (_, rule, attack), by in lost.items() if by > 0.04 and attack != "none"}
    assert others == {rule for _, rule, _ in lost} - set(rules)


def test_bulyan_discards_buffers_that_are_too_small():
    discarded = {}
    for row in rows("attacks"):
        if row["merges_dropped"]:
            discarded[row["setting"], row["rule"], row["attack"]] = row["merges_dropped"]
    assert discarded == {
        ("on time", "Bulyan", "NaN"): 45,
        ("late", "Bulyan", "NaN"): 43,
        ("on time", "Bulyan", "lying forecasts"): 37,
    }
    text = page("results/robustness.md")
    assert "on time all 45 steps of three seeds, late 43." in text
    assert "finish in 37 of 45." in text


def test_clipped_norms_do_much_and_nothing_against_alie(found):
    for setting in SETTINGS:
        plain, clipped = (
            {name: found[setting, rule, name] for name in ("sign flip", "lying examples", "ALIE")}
            for rule in ("mean", "mean, norms clipped")
        )
        assert clipped["sign flip"] > plain["sign flip"] + 0.4
        assert clipped["lying examples"] > plain["lying examples"] + 0.4
        assert clipped["ALIE"] == pytest.approx(plain["ALIE"], abs=0.001)


def test_lying_forecasts_are_measured_on_time_only(found):
    assert {setting for setting, _, attack in found if attack == "lying forecasts"} == {"on time"}


def test_no_kill_lost_a_version_or_counted_an_update_twice():
    for row in rows("kills"):
        assert (row["versions"], row["versions_back"]) == (row["versions_asked"], 0)
        assert (row["updates_twice"], row["updates_in_the_model"]) == (0, row["versions"])
        # Of two nodes, at most one job each is in flight at a kill, and one at the end.
        assert 0 < row["trainings"] - row["versions"] <= 2 * row["kills"] + 1
