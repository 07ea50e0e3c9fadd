"""The page that `fedstale forecaster backtest` writes."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from made_backtest import curves, fan_of, scores

from fedstale.reports.backtest import N_OPEN, PAGE, figures
from fedstale.reports.page import write_figures


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


def test_forecasters_are_ranked_by_their_median_and_every_horizon_is_a_mark():
    table = scores(ewma=(0.9, 0.1, np.nan), lstm=(0.8, 0.7, -40.0))
    (ranking,) = figures({"horizons": table})
    assert ranking.id == "ranking-online"
    assert ranking.layout["yaxis"]["ticktext"] == ["lstm", "ewma"]
    horizons, median = ranking.traces[:2]
    # What would hide all others stands at the edge, and says what it is.
    assert horizons["x"] == [0.8, 0.7, -1.0]
    assert horizons["text"][-1] == "at 24 h: -40.000"
    assert median["x"] == [0.7]
    assert ranking.traces[2]["x"] == [0.9, 0.1]
    assert ranking.rows[1] == ["ewma", "0.500", "0.900", "0.100", "-"]
    assert "right is better" in ranking.about


def test_jobs_are_a_forest_with_the_best_on_top():
    rows = [
        ("ewma", "total_s", "pinball", 0.4, 0.3, 0.6, 50),
        ("ewma", "total_s", "median_error_s", 1e9, np.nan, np.nan, 50),
        ("lstm", "total_s", "pinball", 0.1, 0.0, 0.2, 50),
        ("lstm", "total_s", "median_error_s", 90.0, np.nan, np.nan, 50),
        ("lstm + own", "finish", "brier", 0.1, 0.0, 0.2, 50),
        ("lstm", "finish", "brier", 0.1, 0.0, 0.2, 50),
    ]
    columns = ["forecaster", "quantity", "metric", "value", "low", "high", "n"]
    table = pd.DataFrame(rows, columns=columns)
    whole, finish = figures({"jobs": table})
    assert [row[0] for row in whole.rows] == ["lstm", "ewma"]
    assert whole.rows[0][1] == "0.100 [0.000, 0.200], median error 1.5 min"
    assert whole.rows[1][1].endswith("median error > 1 day")
    first = whole.traces[0]
    assert first["x"][0] - first["error_x"]["arrayminus"][0] == 0.0
    # A correction of times changes no chance.
    assert [row[0] for row in finish.rows] == ["lstm"]


def test_the_verdict_stands_first_and_all_but_three_figures_are_folded(tables, tmp_path):
    row = ("lstm", 0.82, 0.79, 0.86, 40, 0.9, 0.7, np.nan, np.nan)
    columns = ["forecaster", "share", "low", "high", "blocks", "available", "compute"]
    tables["verdict"] = pd.DataFrame([row], columns=[*columns, "downlink", "uplink"])
    tables["horizons"] = scores("available", lstm=(0.9, 0.1, 0.2))
    drawn = figures(tables)
    assert [figure.id for figure in drawn[:3]] == [
        "verdict",
        "ranking-available",
        "reliability-finish",
    ]
    assert drawn[0].rows == [["lstm", "0.82 [0.79, 0.86]", "40"]]
    page = write_figures("Backtest", "A phone.", drawn, tmp_path / PAGE, n_open=N_OPEN)
    before, folded = page.read_text(encoding="utf-8").split("<details><summary>All other", 1)
    assert before.count('class="plot"') == 3
    assert folded.count('class="plot"') == len(drawn) - 3 > 0
    whole = write_figures("Backtest", "A phone.", drawn[:3], tmp_path / "few.html", n_open=N_OPEN)
    assert "All other figures" not in whole.read_text(encoding="utf-8")
