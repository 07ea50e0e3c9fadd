"""A researcher: a weighting, a selector, an agent and a policy of their own against fedstale's."""

import json

import pytest

MOST_STEPS = 17


def compared(journey, plan):
    """Return the means that a comparison found, by variant and measure."""
    folder = journey.folder / "comparisons" / plan.removesuffix(".toml")
    found = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    assert (folder / "comparison.html").is_file()
    assert not found["failed"]
    means = {}
    for row in found["table"]:
        means.setdefault(row["variant"], {})[row["measure"]] = row["mean"]
    return means


@pytest.mark.timeout(600)
def test_a_researcher_compares_algorithms_of_their_own_with_those_that_there_are(journey):
    # Whatever the reader installs is theirs alone, and comes from this machine.
    site = journey.folder / "site"
    journey.environment |= {"PIP_TARGET": str(site), "PYTHONPATH": str(site)}
    journey.environment |= {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    for title in ("A weighting", "A selector"):
        code = [each.text for each in journey.read("docs/extend.md", title)]
        journey.put("my_rules/my_rules.py", "".join(code))
    journey.follow("docs/compare.md", "A part of your own")
    assert journey.printed.count("in 5 pairs") == 2
    assert compared(journey, "own.toml").keys() == {"ours", "bounded", "rested"}

    journey.follow("docs/train-agent.md", "A fleet", "Train", "Look at it", "Let it pick")
    assert "agent" in journey.printed.partition(" in 5 pairs")[0]
    found = compared(journey, "picks.toml")
    times = [found[name]["rounds"] for name in ("chance", "agent")]
    assert times[0] != times[1], "the agent picks otherwise"

    journey.follow("docs/train-your-own.md", "Let it pick")
    assert "in 3 pairs" in journey.printed
    journey.end(MOST_STEPS)
