"""Draw the pictures of README.md and docs/watch.md: pages of real runs, at a desk and on a phone.

Needs chromium and chromedriver; on Debian, apt-get install chromium chromium-driver.

Run it with: python docs/screenshots.py [FOLDER], or make -f benchmarks/Makefile screenshots
"""

import base64
import sys
import tempfile
from pathlib import Path

from typer.testing import CliRunner

import fedstale
from fedstale.cli.main import app

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests" / "fixtures"))

from browser import browsing, missing  # noqa: E402 - the browser of the tests

SHOTS = {
    "report": {"page": "report", "width": 1280, "height": 860, "dark": False},
    "report-dark": {"page": "report", "width": 1280, "height": 860, "dark": True},
    "report-phone": {"page": "report", "width": 390, "height": 844, "dark": False},
    "comparison": {"page": "comparison", "width": 1280, "height": 1060, "dark": False},
}
"""Each picture: what it shows, its size in CSS pixels, and whether it is dark."""
PLAN = {
    "app": "digits",
    "traces": "synthetic:60",
    "until": "3h",
    "seeds": [1, 2, 3],
    "target": "accuracy 0.75",
    "variants": {
        "FedAvg": {"run-config": {"strategy": "FedAvg(fraction_train=0.5)"}},
        "FedBuff": {"run-config": {"strategy": "FedBuff(10, 5)"}},
        "Gap-Aware": {"run-config": {"strategy": "GapAware(10, 5)"}},
    },
}


def pages(folder: Path) -> dict[str, Path]:
    """Take the advice of the demo, compare three strategies, and return the pages to show."""
    demo = fedstale.simulate("digits", traces="synthetic:100", out=folder / "demo")
    taken = CliRunner().invoke(app, ["advise", str(demo.folder), "--apply"])
    assert taken.exit_code == 0, taken.output
    fedstale.compare(PLAN, out=folder / "compared")
    return {
        "report": folder / "demo-advised" / "report.html",
        "comparison": folder / "compared" / "comparison.html",
    }


def draw(page: Path, out: Path, *, width: int, height: int, dark: bool) -> None:
    """Write a picture of the top of a page."""
    with browsing(width=width, dark=dark) as browser:
        if width >= 500:
            browser.call("POST", "/window/rect", {"width": width, "height": height})
        browser.open(page)
        browser.wait(
            "const one = document.getElementById('timeline');"
            "return !one || one.dataset.drawn === 'yes'"
        )
        browser.ask("document.documentElement.style.scrollbarWidth = 'none'")
        out.write_bytes(base64.b64decode(browser.call("GET", "/screenshot")))


def main(folder: Path) -> None:
    """Write all pictures into a folder."""
    if why := missing():
        raise SystemExit(why)
    with tempfile.TemporaryDirectory() as place:
        shown = pages(Path(place))
        for name, shot in SHOTS.items():
            size = {key: shot[key] for key in ("width", "height", "dark")}
            draw(shown[shot["page"]], folder / f"{name}.png", **size)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "images")
