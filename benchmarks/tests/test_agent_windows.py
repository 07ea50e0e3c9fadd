"""What the page of the selection agent says in words is what its result files have."""

import hashlib

import pytest
from published import ROOT, page, rows

PAGE = page("results/agent.md")


@pytest.fixture(scope="module")
def played():
    """Return the row of each fleet and contender, where clients lie as in training."""
    return {
        (row["fleet"], row["contender"]): row
        for row in rows("agent_windows")
        if row.get("liars") == "as in training"
    }


def test_the_embedded_agent_is_the_best_of_the_trainings_that_the_page_shows():
    trained = [row for row in rows("agent_windows") if "training_seed" in row and not row["faults"]]
    best = max(trained, key=lambda row: row["validation"])
    card = (ROOT / "agents/policy/agent.toml").read_text(encoding="utf-8")
    assert f"validation = {best['validation']}" in card
    assert f"seed = {best['training_seed']}\n" in card


def test_real_training_is_of_the_embedded_agent():
    files = sorted((ROOT / "agents" / "policy").glob("agent.*"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    assert {row["agent"] for row in rows("agent_training") if row.get("agent")} == {digest[:12]}


def test_the_page_says_how_far_the_agent_is_ahead_of_the_nearest(played):
    # Others of the table are agents too, or selectors with forecasts of another kind.
    names = {name for _, name in played if not name.startswith("agent") and "forecasts" not in name}
    assert len(names) == 9
    nearest = {
        fleet: min((played[fleet, name] for name in names), key=lambda row: row["difference"])
        for fleet in ("phones", "desktops", "cars", "mixed")
    }
    ahead = [nearest[fleet] for fleet in ("phones", "cars", "mixed")]
    assert all(row["low"] > 0 for row in ahead)
    first, second, third = (f"{row['difference']:.2f}" for row in ahead)
    assert f"{first}, {second} and {third} more than the nearest" in PAGE
    assert nearest["desktops"]["low"] < 0 < nearest["desktops"]["high"]
    assert "**On desktops it is level**" in PAGE


def test_the_page_says_what_forecasts_are_worth(played):
    phones, cars, mixed = (
        f"{played[fleet, 'agent, no forecasts']['difference']:.2f}"
        for fleet in ("phones", "cars", "mixed")
    )
    assert f"worth {phones} on phones, {cars} on cars and {mixed} on mixed fleets" in PAGE
    assert played["desktops", "agent, no forecasts"]["low"] < 0
    for fleet in ("phones", "desktops", "cars", "mixed"):
        row = played[fleet, "agent, persistence"]
        assert row["low"] < 0 < row["high"]


def test_the_page_says_up_to_which_size_the_agent_is_ahead():
    others = [row for row in rows("agent_sizes") if row["who"] != "agent"]
    small = [row for row in others if row["devices"] <= 1024]
    assert {row["devices"] for row in others} == {16, 64, 1024, 100_000}
    assert all(row["low"] > 0 for row in small)
    assert "Up to 1,024 devices it is ahead of all four" in PAGE
    (rule,) = [
        row for row in others if row["devices"] == 100_000 and row["who"] == "p_finish x utility"
    ]
    behind = f"by {-rule['difference']:.2f} [{-rule['high']:.2f}, {-rule['low']:.2f}]"
    assert f"`p_finish x utility` picks better**, {behind} in ten windows" in PAGE
