import os
import shutil
import time

import pytest
from browser import browsing, missing
from made_backtest import curves, fan_of
from made_run import EVERYTHING, HOSTILE, write_run

from fedstale.reports.backtest import PAGE, figures
from fedstale.reports.page import write_comparison, write_figures
from fedstale.reports.run import Run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "installed"),
]

EMPTY_PLOTS = """
return [...document.querySelectorAll(".plot")].filter((plot) => {
  const chart = plot.chart, pixels = chart.canvas.getContext("2d").getImageData(
    0, 0, chart.canvas.width, chart.canvas.height).data;
  return !chart.data.datasets.length || !chart.data.datasets.every((one) => one.data.length)
    || !pixels.some((value) => value);
}).map((plot) => plot.id)
"""
OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
TIMELINE = "return document.getElementById('timeline').timeline."
DRAWN = "return document.getElementById('timeline').dataset.drawn === 'yes'"


def opened(browser, page):
    browser.open(page)
    browser.wait(DRAWN)


def test_a_run_of_ten_thousand_jobs_opens_from_disk_in_silence(tmp_path):
    options = {"n_jobs": 10_000, "n_devices": 500, **EVERYTHING}
    page = Run(write_run(tmp_path / "run", **options)).report()
    with browsing() as browser:
        opened_s = []
        for _ in range(3):  # the first also starts the browser's processes
            started = time.perf_counter()
            opened(browser, page)
            opened_s.append(time.perf_counter() - started)
        # A machine that has other work to do takes longer by its load.
        assert min(opened_s) < 2 * max(1.0, os.getloadavg()[0] / os.cpu_count())
        browser.read_on()
        assert browser.complaints() == []
        assert browser.requests() == []
        assert browser.ask(EMPTY_PLOTS) == []
        assert browser.ask("return document.querySelectorAll('.plot').length") >= 12
        spots = browser.ask(f"{TIMELINE}spots().length")
        assert spots == 8572  # of seven jobs one expired before it began


def test_folded_figures_are_drawn_when_they_are_unfolded(tmp_path):
    tables = {"reliability": curves(), "survival": curves(horizon_s=900.0), "fan": fan_of()}
    page = write_figures("Backtest", "", figures(tables), tmp_path / PAGE, n_open=1)
    drawn = "return [...document.querySelectorAll('.plot')].filter((plot) => plot.chart).length"
    with browsing() as browser:
        browser.open(page)
        assert browser.ask(drawn) == 1
        browser.ask("document.querySelector('.figures ~ details').open = true")
        browser.read_on()
        assert browser.ask(drawn) == 3
        assert browser.ask(EMPTY_PLOTS) == []
        assert browser.complaints() == []


def test_nothing_overflows_at_the_width_of_a_phone(tmp_path):
    long = "a-name-without-any-space-" * 8
    names = [f"{long}{i}" for i in range(7)]
    folder = write_run(tmp_path / "run", names=names, app=long, reason=long, **EVERYTHING)
    other = write_run(tmp_path / "other", app=long)
    pages = [
        Run(folder).report(),
        write_comparison([Run(folder), Run(other)], tmp_path / "both.html"),
    ]
    with browsing(width=390) as browser:
        for page in pages:
            browser.open(page)
            browser.read_on()
            assert browser.ask("return window.innerWidth") == 390
            assert browser.ask(OVERFLOW) <= 0
            assert browser.complaints() == []


def test_hostile_names_stay_text(tmp_path):
    names = [f"{HOSTILE}{i}" for i in range(7)]
    metrics = [(1.0, 1, "server", f"{HOSTILE}accuracy", 0.5), (2.0, 1, HOSTILE, HOSTILE, 0.5)]
    folder = write_run(tmp_path / "run", names=names, app=HOSTILE, reason=HOSTILE, metrics=metrics)
    hostile = shutil.copytree(folder, tmp_path / "<script>window.hurt = 1<`script>")
    pages = [
        Run(folder).report(),
        write_comparison([Run(folder), Run(hostile)], tmp_path / "both.html"),
    ]
    with browsing() as browser:
        for page in pages:
            browser.open(page)
            browser.read_on()
            assert browser.ask("return window.hurt") is None
            assert browser.ask("return document.querySelectorAll('img').length") == 0
            assert browser.complaints() == []
            assert browser.requests() == []
        opened(browser, pages[0])
        given = "return JSON.parse(document.getElementById('timeline-data').textContent).devices"
        assert browser.ask(given) == sorted(names)


def test_every_control_has_a_name_and_the_tab_key_reaches_it(tmp_path):
    page = Run(write_run(tmp_path / "run")).report()
    nameless = """
    return [...document.querySelectorAll("button, summary, [role=img], [role=region]")].filter(
      (one) => !(one.getAttribute("aria-label") || one.textContent).trim()
        || (one.matches("button, summary, [role=region]") && one.tabIndex < 0)).length
    """
    with browsing() as browser:
        browser.open(page)
        assert browser.ask(nameless) == 0
        assert browser.ask("return document.documentElement.lang") == "en"
