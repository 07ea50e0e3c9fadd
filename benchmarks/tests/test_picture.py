from xml.etree import ElementTree

import pytest
from made_run import HOSTILE, write_run
from places import ROOT

from fedstale.reports.run import Run
from fedstale.traces import TraceSet

PICTURE = ROOT / "docs" / "images" / "phones.svg"


@pytest.fixture
def picture():
    from picture import run

    return run


def test_the_picture_is_a_whole_svg_of_less_than_200_kb_that_asks_for_nothing(picture):
    text = PICTURE.read_text(encoding="utf-8")
    assert len(text) < 200_000
    tags = {element.tag.rsplit("}", 1)[1] for element in ElementTree.fromstring(text).iter()}
    assert tags == {"svg", "title", "style", "rect", "path", "text"}
    assert text.count("://") == 1  # the name space
    assert "prefers-color-scheme:dark" in text
    for name in picture.STRATEGIES:
        assert f">{name} " in text or f">{name}:" in text


def test_a_picture_draws_every_device_and_job_once(tmp_path, picture):
    traces = TraceSet.ideal(7)
    names = [str(name) for name in traces.device_ids]
    runs = {
        name: Run(write_run(tmp_path / kind, names=names, reason=HOSTILE))
        for name, kind in picture.STRATEGIES.items()
    }
    root = ElementTree.fromstring(picture.drawing(runs, traces))
    drawn = {}
    for path in root.iter("{http://www.w3.org/2000/svg}path"):
        kind = path.get("class")
        drawn[kind] = drawn.get(kind, 0) + path.get("d").count("M")
    events = runs["FedAvg"].jobs
    used = (events["status"] == "reported").sum()
    # Each of two panels, and one stroke in the legend.
    assert drawn["s training"] == 2 * used + 1
    assert drawn["s online"] == 2 * 7 + 1
    lost = (
        ~events["status"].isin(["reported", "in-flight"]) & (events["started_at"] < 7200.0)
    ).sum()
    assert drawn["s lost"] == 2 * lost + 1
    assert "window.hurt" not in ElementTree.tostring(root, encoding="unicode")
