"""An accessibility check of the pages by axe-core, in a browser."""

import pytest
from browser import browsing, missing
from made_run import EVERYTHING, write_run
from places import ROOT
from told_run import ToldRun

from fedstale.live import Board, serving
from fedstale.reports.page import write_comparison
from fedstale.reports.run import Run

AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
WITHOUT = missing() or ("" if AXE.is_file() else "needs axe-core: npm install --no-save axe-core")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT or "installed")]

CHECK = """
const done = arguments[arguments.length - 1];
axe.run().then((found) => done(found.violations.map((one) => [one.impact, one.id,
  one.nodes.slice(0, 3).map((node) => node.html.slice(0, 120))])));
"""


def problems(browser):
    """Return all violations that axe-core finds."""
    browser.ask(AXE.read_text(encoding="utf-8"))
    return browser.call("POST", "/execute/async", {"script": CHECK, "args": []})


@pytest.mark.parametrize("dark", [False, True])
def test_pages_of_runs_break_no_rule(tmp_path, dark):
    folders = [write_run(tmp_path / name, **EVERYTHING) for name in ("one", "two")]
    pages = [
        Run(folders[0]).report(),
        write_comparison([Run(folder) for folder in folders], tmp_path / "both.html"),
    ]
    with browsing(dark=dark) as browser:
        for page in pages:
            browser.open(page)
            browser.read_on()
            assert problems(browser) == []


def test_the_live_page_breaks_no_rule():
    board = Board("digits")
    run = ToldRun(board)
    run.moved(1.0)
    run.measured(1.0, 1, "server", "accuracy", 0.5)
    with serving(board, port=0) as url, browsing() as browser:
        browser.call("POST", "/url", {"url": url})
        browser.see("plot-acc")
        assert problems(browser) == []
