import os
import shutil
import time

import pytest
from browser import browsing, missing
from made_run import HOSTILE, write_run

from fedstale.reports.page import write_comparison
from fedstale.reports.run import Run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "installed"),
]

EMPTY_PLOTS = """
return [...document.querySelectorAll(".plot")].filter((plot) => !plot.data || !plot.data.length
  || !plot.data.every((trace) => trace.x.length && trace.x.length === trace.y.length)
  || !plot.querySelector(".main-svg")).map((plot) => plot.id)
"""
OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
RANGE = 'return document.getElementById("plot-timeline")._fullLayout.xaxis.range'
CLICK = "document.querySelector('[data-move=' + arguments[0] + ']').click()"


def test_a_run_of_ten_thousand_jobs_opens_from_disk_in_silence(tmp_path):
    page = Run(write_run(tmp_path / "run", n_jobs=10_000, n_devices=500)).report()
    with browsing() as browser:
        opened_s = []
        for _ in range(3):  # the first also starts the browser's processes
            started = time.perf_counter()
            browser.open(page)
            opened_s.append(time.perf_counter() - started)
        # A machine that has other work to do takes longer by its load.
        assert min(opened_s) < 2 * max(1.0, os.getloadavg()[0] / os.cpu_count())
        browser.read_on()
        assert browser.complaints() == []
        assert browser.requests() == []
        assert browser.ask(EMPTY_PLOTS) == []
        assert browser.ask("return document.querySelectorAll('.plot').length") >= 10
        points = "return document.getElementById('plot-timeline').data.map((t) => t.x.length)"
        # Three jobs of seven report; of each phase, each job is two points and a break.
        assert browser.ask(points)[:3] == [3 * 4287] * 3


def test_buttons_zoom_move_and_show_everything_again(tmp_path):
    page = Run(write_run(tmp_path / "run")).report()
    with browsing() as browser:
        browser.open(page)
        browser.see("plot-timeline")
        first = browser.ask(RANGE)
        browser.ask(CLICK, "in")
        near = browser.ask(RANGE)
        assert near[1] - near[0] == pytest.approx((first[1] - first[0]) / 2)
        browser.ask(CLICK, "right")
        assert browser.ask(RANGE)[0] > near[0]
        browser.ask(CLICK, "all")
        assert browser.ask(RANGE) == pytest.approx(first)
        assert browser.complaints() == []


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_follows_the_system_and_the_toggle(tmp_path, dark):
    page = Run(write_run(tmp_path / "run")).report()
    with browsing(dark=dark) as browser:
        browser.open(page)
        browser.see("plot-timeline")
        theme = "return document.documentElement.dataset.theme"
        colour = "return document.getElementById('plot-timeline')._fullLayout.font.color"
        assert browser.ask(theme) == ("dark" if dark else "light")
        before = browser.ask(colour)
        browser.ask("document.getElementById('theme').click()")
        browser.wait()
        assert browser.ask(theme) == ("light" if dark else "dark")
        assert browser.ask(colour) != before
        assert browser.complaints() == []


def test_nothing_overflows_at_the_width_of_a_phone(tmp_path):
    long = "a-name-without-any-space-" * 8
    names = [f"{long}{i}" for i in range(7)]
    folder = write_run(tmp_path / "run", names=names, app=long, reason=long)
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
        browser.open(pages[0])
        labels = (
            "return [...document.querySelectorAll('#plot-timeline .ytick')].map(t => t.textContent)"
        )
        assert all(label.startswith("</script><script") for label in browser.ask(labels))


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
