"""An accessibility check of the pages by axe-core, in a browser."""

import pytest
from browser import browsing, missing
from made_pages import write_pages
from places import ROOT
from told_run import ToldRun

from fedstale.live import Board, serving

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


INKS = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
WIDTHS = pytest.mark.parametrize("width", [390, 1280])


@INKS
@WIDTHS
def test_pages_of_runs_break_no_rule(tmp_path, dark, width):
    with browsing(dark=dark, width=width) as browser:
        for page in write_pages(tmp_path):
            browser.open(page)
            browser.read_on()
            assert problems(browser) == []


@INKS
@WIDTHS
def test_the_live_page_breaks_no_rule(dark, width):
    board = Board("digits", settings="seed = 3")
    run = ToldRun(board)
    run.moved(1.0)
    run.measured(1.0, 1, "server", "accuracy", 0.5)
    run.merged(2.0, 2)
    run.failed(3.0, "phone-1", "interrupted", "went offline while training")
    with serving(board, port=0) as url, browsing(dark=dark, width=width) as browser:
        browser.call("POST", "/url", {"url": url})
        browser.see("plot-acc")
        assert problems(browser) == []
