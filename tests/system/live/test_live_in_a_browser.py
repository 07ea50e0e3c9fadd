import time

import pytest
from browser import browsing, missing
from made_run import HOSTILE
from told_run import ToldRun

from fedstale.live import Board, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "installed"),
]

POINTS = """
const { chart } = document.getElementById("plot-devices");
return chart ? chart.data.datasets[0].data.length : 0
"""
OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


def told(board, until, name="phone-1"):
    """Tell a board what a run might, one moment in ten seconds."""
    run = ToldRun(board)
    for i in range(until):
        run.moved(10.0 * i, online=5 + i % 3, in_flight=i % 5)
        run.measured(10.0 * i, i, "server", "accuracy", i / until)
        run.measured(10.0 * i, i, "server", "loss", 1 / (1 + i))
        run.merged(10.0 * i, i % 4)
        run.failed(10.0 * i, name, "interrupted", f"{name} went offline while training")
    return run.runtime


def opened(browser, url):
    browser.call("POST", "/url", {"url": url})
    browser.wait()


def eventually(question, seconds=15):
    until = time.perf_counter() + seconds
    while not question():
        assert time.perf_counter() < until
        time.sleep(0.1)


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_moves_with_the_run_and_asks_nobody_else(dark):
    board = Board("digits on phones", every_s=0.0)
    told(board, 5)
    with serving(board, port=0) as url, browsing(dark=dark) as browser:
        opened(browser, url)
        eventually(lambda: browser.ask(POINTS) == 5)
        runtime = told(board, 20)
        board.ended(runtime, "stopped", "at its limit")
        eventually(lambda: browser.ask(POINTS) == 26)
        assert browser.ask("return document.getElementById('state').textContent").startswith("stop")
        assert browser.ask("return document.querySelectorAll('#failures tr').length") == 20
        browser.read_on()
        drawn = "return document.querySelectorAll('.plot canvas').length"
        assert browser.ask(drawn) >= 3
        assert browser.complaints() == []
        assert [one for one in browser.requests() if not one.startswith(url)] == []


def test_names_of_ill_will_stay_text_and_nothing_overflows_on_a_phone():
    board = Board(HOSTILE, every_s=0.0)
    runtime = told(board, 3, name=HOSTILE)
    runtime.metrics(1, HOSTILE, {f"{HOSTILE}accuracy": 0.5})
    with serving(board, port=0) as url, browsing(width=390) as browser:
        opened(browser, url)
        browser.see("plot-acc")
        eventually(lambda: browser.ask(POINTS) == 3)
        assert browser.ask("return window.hurt") is None
        assert browser.ask("return document.querySelectorAll('img').length") == 0
        assert browser.ask(OVERFLOW) <= 0
        assert browser.complaints() == []
