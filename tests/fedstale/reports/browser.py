"""Drives a headless Chromium through the WebDriver protocol, with the standard library alone."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

ARGUMENTS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--disable-dev-shm-usage",
]


def missing():
    """Return what is not installed, as a sentence, or nothing."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser and shutil.which("chromedriver"):
        return ""
    return "needs chromium and chromedriver: on Debian, apt-get install chromium chromium-driver"


class Browser:
    """One browser window."""

    def __init__(self, url, *, width, dark):
        self._url = url
        options = {
            "args": [*ARGUMENTS, "--blink-settings=preferredColorScheme=" + ("0" if dark else "1")],
            "binary": shutil.which("chromium") or shutil.which("google-chrome"),
        }
        if width < 500:
            options["mobileEmulation"] = {
                "deviceMetrics": {"width": width, "height": 844, "pixelRatio": 2, "mobile": True}
            }
        else:
            options["args"].append(f"--window-size={width},900")
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        answer = self.call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._url += f"/session/{answer['sessionId']}"

    def call(self, method, path, body=None):
        """Send one command and return its value."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, path):
        """Open a file, and wait until the figures that show are drawn."""
        self.call("POST", "/url", {"url": path.resolve().as_uri()})
        self.wait()

    def wait(self, script="return document.documentElement.dataset.drawn === 'yes'", *arguments):
        """Wait until the figures that show are drawn, or until a script says so."""
        until = time.perf_counter() + 60
        while not self.ask(script, *arguments):
            assert time.perf_counter() < until, self.complaints()
            time.sleep(0.02)

    def see(self, plot):
        """Scroll to a figure and wait until it is drawn."""
        self.ask("document.getElementById(arguments[0]).scrollIntoView()", plot)
        self.wait("return Boolean(document.getElementById(arguments[0]).chart)", plot)

    def read_on(self):
        """Scroll from figure to figure to the end of the page, and back."""
        for plot in self.ask("return [...document.querySelectorAll('.plot')].map((p) => p.id)"):
            self.see(plot)
        self.ask("window.scrollTo(0, 0)")

    def ask(self, script, *arguments):
        """Run JavaScript in the page and return what it returns."""
        return self.call("POST", "/execute/sync", {"script": script, "args": arguments})

    def complaints(self):
        """Return warnings and errors on the console since the last call."""
        log = self.call("POST", "/se/log", {"type": "browser"})
        return [line["message"] for line in log if line["level"] in {"WARNING", "SEVERE"}]

    def requests(self):
        """Return addresses asked for since the last call, but for files and embedded data."""
        log = self.call("POST", "/se/log", {"type": "performance"})
        messages = [json.loads(line["message"])["message"] for line in log]
        urls = [m["params"]["request"]["url"] for m in messages if "request" in m["params"]]
        return [url for url in urls if not url.startswith(("file:", "data:", "blob:"))]


@contextmanager
def browsing(*, width=1280, dark=False):
    """Start a browser, and stop it."""
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        port = next(
            line.rstrip(". \n").rsplit(" ", 1)[1]
            for line in driver.stdout
            if "successfully on port" in line
        )
        browser = Browser(f"http://127.0.0.1:{port}", width=width, dark=dark)
        try:
            yield browser
        finally:
            browser.call("DELETE", "")
    finally:
        driver.terminate()
        driver.wait()
        driver.stdout.close()
