"""The pages of trainings, evaluations and backtests in a browser."""

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
