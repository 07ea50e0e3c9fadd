"""The page that `fedstale forecaster backtest` writes."""

import json
import re

import numpy as np
import pandas as pd
import pytest

from fedstale.reports.backtest import PAGE, figures
from fedstale.reports.page import write_figures

KINDS = [f"kind-{i}" for i in range(9)]


def curves(**more):
    p = np.tile([0.1, 0.5, 0.9], len(KINDS))
    table = pd.DataFrame({"forecaster": np.repeat(KINDS, 3), "predicted": p, "observed": p / 2})
    return table.assign(n=50.0, **more)


def fan_of(device="phone"):
    rows = [(device, 7200.0, "", "downlink", -300.0 * i, 2e6, *[np.nan] * 3) for i in range(4)]
    rows += [(device, 7200.0, "lstm", "downlink", h, 3e6, 1e6, 2e6, 4e6) for h in (10.0, 600.0)]
    columns = ["device_id", "now", "forecaster", "channel", "offset_s", "actual"]
    return pd.DataFrame(rows, columns=[*columns, "q10", "q50", "q90"])


@pytest.fixture
def tables():
    later = pd.concat([curves(horizon_s=900.0), curves(horizon_s=3600.0)])
    return {"reliability": curves(), "survival": later, "fan": fan_of()}


def test_every_table_has_its_figure(tables):
    drawn = {figure.id: figure for figure in figures(tables)}
    assert set(drawn) == {
        "reliability-finish",
        "reliability-survival-900",
        "reliability-survival-3600",
        "fan-downlink",
    }
    assert drawn["reliability-survival-900"].title == "Probability to stay online for 15 min"
    fan = {trace["name"]: trace for trace in drawn["fan-downlink"].traces}
    # In Mbit/s and minutes.
    assert fan["median"]["y"] == [2.0, 2.0]
    assert fan["80 % of futures"]["fill"] == "tonexty"
    assert fan["what the device did"]["x"][-1] == 10.0


def test_curves_differ_in_more_than_colour(tables):
    traces = figures(tables)[0].traces[:-1]
    assert len(traces) == len(KINDS)
    looks = {(t["meta"], t["line"]["dash"], t["marker"]["symbol"]) for t in traces}
    assert len(looks) == len(KINDS)
    without_colour = {(t["line"]["dash"], t["marker"]["symbol"]) for t in traces}
    assert len(without_colour) == len(KINDS)


def test_a_bin_of_few_forecasts_is_not_drawn(tables):
    tables["reliability"].loc[tables["reliability"]["predicted"] == 0.9, "n"] = 3.0
    assert all(t["x"] == [0.1, 0.5] for t in figures(tables)[0].traces[:-1])


def test_what_was_not_measured_is_not_drawn(tables):
    empty = {name: table.iloc[:0] for name, table in tables.items()}
    assert figures(empty) == []
    assert figures({}) == []


def test_the_page_is_one_file_that_asks_for_nothing(tables, tmp_path):
    tables["fan"] = fan_of("</script><b>phone")
    page = write_figures("Backtest", "Two phones.", figures(tables), tmp_path / PAGE)
    assert page == tmp_path / "backtest.html"
    text = page.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    # Plotly.js names addresses that it never asks for; the policy above forbids it.
    without_scripts = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r'(?:src|href)="(?!data:)', without_scripts)
    assert "Two phones." in text
    assert "<b>phone" not in text
    found = re.search(r'<script type="application/json" id="plots">(.*?)</script>', text)
    assert [plot["id"] for plot in json.loads(found[1])][-1] == "fan-downlink"
