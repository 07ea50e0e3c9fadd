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
    *("--disable-dev-shm-usage", "--enable-unsafe-swiftshader"),
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
        """Open a file, and wait until its figures are drawn."""
        self.call("POST", "/url", {"url": path.resolve().as_uri()})
        self.wait()

    def wait(self):
        """Wait until the figures are drawn."""
        until = time.perf_counter() + 30
        while self.ask("return document.documentElement.dataset.drawn") != "yes":
            assert time.perf_counter() < until, self.complaints()
            time.sleep(0.02)

    def ask(self, script, *arguments):
        """Run JavaScript in the page and return what it returns."""
        return self.call("POST", "/execute/sync", {"script": script, "args": arguments})

    def busy_s(self):
        """Return the processor time of the page's main thread since the first call, in s."""
        self._devtools("Performance.enable", timeDomain="threadTicks")
        metrics = self._devtools("Performance.getMetrics")["metrics"]
        return next(m["value"] for m in metrics if m["name"] == "TaskDuration")

    def _devtools(self, command, **parameters):
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def complaints(self):
        """Return warnings and errors on the console since the last call."""
        log = self.call("POST", "/se/log", {"type": "browser"})
        messages = [line["message"] for line in log if line["level"] in {"WARNING", "SEVERE"}]
        # Drawing WebGL without a graphics card is slow, and the driver says so.
        return [message for message in messages if "GL Driver Message" not in message]

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
