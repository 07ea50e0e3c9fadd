"""A student: the first minutes, a first app and comparison, and an app that is there already."""

import re

import pytest
from places import ROOT
from stock_app import STOCK, TORCH, write_stock_app

MOST_STEPS = 21


@pytest.mark.timeout(600)
def test_a_student_gets_from_the_first_minutes_to_an_app_of_their_own(journey):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    journey.pages.add("README.md")
    journey.run(re.search(r"`(fedstale simulate digits [^`]+)`", readme)[1])
    page = (ROOT / "docs" / "first-app.md").read_text(encoding="utf-8")
    titles = re.findall(r"^## (.+)$", page, re.MULTILINE)
    journey.follow("docs/first-app.md", *titles[: titles.index("From Python")])
    before, after = map(float, journey.printed.splitlines()[-1].split(" -> "))
    assert after < 0.5 * before, "taking the first advice wastes less"
    named = re.findall(r"^\d\. `([^`]+)`", page, re.MULTILINE)
    assert len(named) == 4
    assert all((journey.folder / name).is_file() for name in named)
    # The last of them has the settings: another loss comes of another one.
    again = next(b.commands[0] for b in journey.read("docs/first-app.md", "Run it"))
    journey.put(named[-1], "learning-rate = 0.5\n")
    shown = journey.run(again.replace("runs/first", "runs/changed"))
    assert "report: runs/changed/report.html" in shown
    assert all(
        (journey.folder / "runs" / name / "report.html").is_file() for name in ("first", "changed")
    )

    journey.follow("docs/first-comparison.md")
    assert journey.compared >= 8

    own = journey.folder / "own"
    own.mkdir()
    write_stock_app(own / "my_app", TORCH, STOCK, n=4)
    journey.folder = own
    pyproject = own / "my_app" / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().partition("[tool.fedstale]")[0])
    (other,) = journey.read("docs/strategies.md", "In any app")[0].commands
    said = journey.refused(other)
    journey.put("my_app/pyproject.toml", said[said.rindex("[tool.fedstale]") :])
    assert "Strategy: FedBuff in the place of FedAvg" in journey.run(other)
    journey.follow("docs/flower-apps.md", "Costs by options")
    assert "work-per-example = " in journey.printed
    journey.end(MOST_STEPS)
