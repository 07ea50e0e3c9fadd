import os
import re
import shutil
import time

import numpy as np
import pytest
from browser import browsing, missing
from made_pages import write_pages
from made_run import EVERYTHING, HOSTILE, write_run

from fedstale.comparison.analysis import analyse
from fedstale.comparison.page import PAGE as COMPARISON
from fedstale.comparison.page import write
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
ADVICE = """
return [...document.querySelectorAll(".advice")].map(
  (table) => table.scrollWidth <= table.parentNode.clientWidth);
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
        assert browser.ask("return document.querySelectorAll('.plot').length") >= 11
        spots = browser.ask(f"{TIMELINE}spots().length")
        assert spots == 8572  # of seven jobs one expired before it began


def test_a_click_on_a_job_tells_its_kind_how_it_ended_and_why(tmp_path):
    page = Run(write_run(tmp_path / "run")).report()
    click = """
    const section = document.getElementById("timeline"), canvas = section.querySelector("canvas");
    const spot = section.timeline.spots().find((one) => one.state === arguments[0]);
    const { left, top } = canvas.getBoundingClientRect();
    canvas.dispatchEvent(new MouseEvent("click", {
      clientX: left + (spot.from + spot.to) / 2, clientY: top + spot.top + spot.high / 2 }));
    return section.querySelector("output").textContent
    """
    with browsing() as browser:
        opened(browser, page)
        used, wasted = browser.ask(click, "training"), browser.ask(click, "wasted")
    assert re.fullmatch(r"Job \d+ of phone-\d, train, used, .* min: download .*training .*", used)
    reason = r"train, wasted \((interrupted|late), it ended as \1\)"
    assert re.fullmatch(rf"Job \d+ of phone-\d, {reason}, [\d.]+ to [\d.]+ min\.", wasted)


def test_nothing_overflows_at_the_width_of_a_phone(tmp_path):
    long = "a-name-without-any-space-" * 8
    names = [f"{long}{i}" for i in range(7)]
    with browsing(width=390) as browser:
        for page in write_pages(tmp_path, names=names, app=long, reason=long):
            browser.open(page)
            browser.read_on()
            assert browser.ask("return window.innerWidth") == 390
            assert browser.ask(OVERFLOW) <= 0
            assert browser.complaints() == []
        browser.open(Run(write_run(tmp_path / "advised")).report())
        assert browser.ask(ADVICE) == [True], "advice is read without scrolling"


BOTH = pytest.mark.parametrize("width", [390, 1280])
ABOVE_ZERO = """
return [...document.querySelectorAll(".plot")].flatMap((plot) => Object.values(plot.chart.scales)
  .filter(({ type, min }) => type === "linear" && min > 0).map(({ axis }) => plot.id + axis))
"""
MEETING = """
return [...document.querySelectorAll(".plot")].filter(({ chart }) => {
  const { x } = chart.scales, pen = chart.ctx;
  pen.font = Chart.helpers.toFont(x.options.ticks.font, Chart.defaults.font).string;
  const ends = x.ticks.map(({ label }, i) => {
    const half = Math.max(...[label].flat().map((line) => pen.measureText(line).width)) / 2;
    return [x.getPixelForTick(i) - half, x.getPixelForTick(i) + half];
  });
  return ends.some(([left], i) => i && left < ends[i - 1][1] + 3);
}).map((plot) => plot.id)
"""


@BOTH
def test_axes_begin_at_zero_but_for_losses_and_no_tick_label_meets_another(tmp_path, width):
    metrics = [
        (t, i, "server", name, value + i / 1000)
        for i, t in enumerate(np.arange(600.0, 2130.0, 40.0))
        for name, value in (("accuracy", 0.8), ("loss", 2.0))
    ]
    runs = [Run(write_run(tmp_path / name, metrics=metrics, **EVERYTHING)) for name in "ab"]
    found = analyse({"a": runs[:1], "b": runs[1:]}, reference="a")
    write(found, tmp_path)
    expected = {
        runs[0].report(): ["plot-metric-1y"],
        tmp_path / COMPARISON: ["plot-mean-1y"],
    }
    with browsing(width=width) as browser:
        for page, losses in expected.items():
            browser.open(page)
            browser.read_on()
            assert browser.ask(ABOVE_ZERO) == losses
            assert browser.ask(MEETING) == []


def test_paper_has_everything_and_nothing_beyond_its_edge(tmp_path):
    folder = write_run(tmp_path / "run", **EVERYTHING)
    folded = "return document.querySelectorAll('details:not([open])').length"
    undrawn = "return [...document.querySelectorAll('.plot')].filter((plot) => !plot.chart).length"
    beyond = """
    return [...document.querySelectorAll("canvas, td, th, pre, p")].filter((one) =>
      one.getBoundingClientRect().right > document.documentElement.clientWidth)
      .map((one) => one.outerHTML)
    """
    with browsing(width=717, dark=True) as browser:  # of A4 between its margins
        opened(browser, Run(folder).report())
        n_folded = browser.ask(folded)
        media = {"cmd": "Emulation.setEmulatedMedia", "params": {"media": "print"}}
        browser.call("POST", "/goog/cdp/execute", media)
        browser.ask("window.dispatchEvent(new Event('beforeprint'))")
        assert (browser.ask(folded), browser.ask(undrawn), browser.ask(beyond)) == (0, 0, [])
        assert browser.ask("return document.documentElement.dataset.theme") == "light"
        browser.ask("window.dispatchEvent(new Event('afterprint'))")
        assert browser.ask(folded) == n_folded > 0


def test_a_table_of_variants_is_read_on_a_phone_and_sorted(tmp_path):
    _, page = write_pages(tmp_path)
    tall = "return Math.max(...[...document.querySelectorAll('tr')].map((row) => row.offsetHeight))"
    table = """
    const table = [...document.querySelectorAll("table")].find(
      (one) => one.tHead.textContent.includes(arguments[0]));
    const heads = [...table.tHead.rows[0].cells], region = table.parentElement;
    """
    scroll = """
    region.scrollLeft = 1e6;
    return [region.scrollLeft > 0, heads[0].getBoundingClientRect().left
      - region.getBoundingClientRect().left]
    """
    sort = """
    const i = heads.findIndex((head) => head.textContent === arguments[0]);
    heads[i].querySelector("button").click();
    return [...table.tBodies[0].rows].map((row) => row.cells[i].textContent)
    """
    with browsing(width=390) as browser:
        browser.open(page)
        assert browser.ask(tall) < 120  # a word a line at most
        assert browser.ask(table + scroll, "variant") == [True, 0]
        assert browser.ask(table + sort, "variant") == ["one", "two"]


def test_hostile_names_stay_text(tmp_path):
    names = [f"{HOSTILE}{i}" for i in range(7)]
    metrics = [(1.0, 1, "server", f"{HOSTILE}accuracy", 0.5), (2.0, 1, HOSTILE, HOSTILE, 0.5)]
    folder = write_run(tmp_path / "run", names=names, app=HOSTILE, reason=HOSTILE, metrics=metrics)
    hostile = shutil.copytree(folder, tmp_path / "<script>window.hurt = 1<`script>")
    compared = {HOSTILE: [Run(folder)], "other": [Run(hostile)]}
    write(analyse(compared, reference=HOSTILE), tmp_path)
    pages = [Run(folder).report(), tmp_path / COMPARISON]
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
