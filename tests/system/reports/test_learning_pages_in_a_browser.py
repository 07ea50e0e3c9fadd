"""The pages of trainings, evaluations and backtests in a browser."""

import json

import numpy as np
import pandas as pd
import pytest
from browser import browsing, missing
from made_backtest import curves, fan_of, scores
from made_learning import played, write_training
from test_axe import AXE, problems
from test_report_in_a_browser import OVERFLOW

from fedstale.agents.evaluation import Evaluation
from fedstale.reports import agent
from fedstale.reports.backtest import figures, hidden, losses
from fedstale.reports.page import write_figures

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "installed"),
]

# How many pixels around a row's mark have its colour, for each mark.
MARKS = """
const chart = document.getElementById(arguments[0]).chart, ratio = chart.currentDevicePixelRatio;
const pixels = chart.canvas.getContext("2d");
return chart.data.datasets.flatMap((one, i) => chart.getDatasetMeta(i).data.flatMap((point, j) => {
  if (one.pointRadius === 0) return [];
  const { left, right } = chart.chartArea;
  const [x, y, size] = [point.x - 8, point.y - 8, 16].map((length) => length * ratio);
  const around = pixels.getImageData(x, y, size, size);
  let above = 0;
  for (let k = 0; k < around.data.length; k += 4) {
    const row = Math.floor(k / 4 / around.width);
    // Off the line of the interval, which is in the middle.
    if (Math.abs(row - around.height / 2) > 1.5 * ratio && around.data[k + 3] > 60) above += 1;
  }
  return [[point.x >= left && point.x <= right, above]];
}));
"""


@pytest.fixture
def pages(tmp_path):
    tables = {
        "reliability": curves(),
        "survival": curves(horizon_s=900.0),
        "fan": fan_of(),
        "horizons": pd.concat(
            [
                scores(**{f"kind-{i}": (-0.4 + 0.1 * i, 0.9, 0.3) for i in range(7)}),
                scores("compute", "mase", ewma=(10.0, 0.9, 0.8), lstm=(0.5, 0.6, 0.7)),
            ]
        ),
    }
    backtest = write_figures(
        "Test", "x", figures(tables), tmp_path / "b.html", hidden=hidden(tables)
    )
    epochs = {"epoch": [1, 2], "training": [3.0, 2.0], "validation": [2.0, 1.5]}
    table = pd.DataFrame(epochs).assign(network="sessions")
    training = write_figures("Training", "x", losses(table), tmp_path / "l.html")
    folder = write_training(tmp_path / "agent")
    result = Evaluation(windows=pd.DataFrame(), table=played())
    return {
        "backtest": backtest,
        "losses": training,
        "training": agent.write_training({0: folder}, folder),
        "evaluation": agent.write_evaluation(result, "Windows.", folder),
    }


@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_a_window_and_a_phone_in_silence(pages, width):
    with browsing(width=width) as browser:
        for page in pages.values():
            browser.open(page)
            browser.read_on()
            assert browser.ask(OVERFLOW) <= 0
            assert browser.complaints() == []
            assert browser.requests() == []


@pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core: npm install --no-save axe-core")
@pytest.mark.parametrize("dark", [False, True])
def test_pages_break_no_rule_of_accessibility(pages, dark):
    with browsing(dark=dark) as browser:
        for page in pages.values():
            browser.open(page)
            browser.read_on()
            assert problems(browser) == []


def test_every_mark_is_inside_its_axes_and_has_ink(pages):
    with browsing() as browser:
        # Marks in no order, and every marker: some of them are drawn by their border alone.
        for page, plot, n in (
            ("backtest", "plot-ranking-online", 7 * 4),
            ("evaluation", "plot-reward", 5),
        ):
            browser.open(pages[page])
            browser.see(plot)
            found = browser.ask(MARKS, plot)
            assert len(found) == n
            assert all(is_inside for is_inside, _ in found)
            assert min(ink for _, ink in found) > 1, json.dumps(found)


def test_the_axis_beside_rows_has_round_numbers(pages):
    ticks = "return document.getElementById(arguments[0]).chart.scales.x.ticks.map((t) => t.value)"
    with browsing() as browser:
        browser.open(pages["evaluation"])
        browser.see("plot-reward")
        values = np.array(browser.ask(ticks, "plot-reward"))
        steps = np.diff(values)
        assert np.allclose(steps, steps[0])
        assert np.allclose(values / steps[0], np.round(values / steps[0]))
