"""A reader who has the pages alone does what they say, in an empty folder, and counts the steps.

What is done is read out of the pages, in their order: commands, programs in Python, and the files
that a page tells to write. A test names the parts of pages that its reader follows, and brings what
only a reader has: an app, a log. A step is a command, a program or an edit; the most that a reader
needs is bounded, so that a page cannot become longer unseen.
"""

import importlib.util
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from places import ROOT

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(fedstale|pip) ")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and what is said between the one before and it."""

    kind: str
    text: str
    said: str

    @property
    def has_commands(self):
        return self.kind == "sh" or (self.kind == "text" and bool(COMMAND.match(self.text)))

    @property
    def commands(self):
        """The commands, each in one line."""
        return [line for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]


class Journey:
    """What a reader does, one step after another."""

    def __init__(self, test, folder):
        self.test, self.folder = test, folder
        self.steps, self.compared, self.printed, self.began = 0, 0, "", time.monotonic()
        self.pages = set()
        own = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": own, "HOME": str(folder)}
        self.environment |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        self.environment.pop("COLUMNS", None)

    def read(self, page, *titles):
        """Return the blocks of a page, or of these sections of it; "" is what is before them."""
        self.pages.add(page)
        first, *others = (ROOT / page).read_text(encoding="utf-8").split("\n## ")
        parts = {"": first, **dict(part.split("\n", 1) for part in others)}
        found = []
        for title in titles or parts:
            end = 0
            for block in FENCE.finditer(parts[title]):
                found.append(Block(block[1], block[2], parts[title][end : block.start()]))
                end = block.end()
        assert found, f"{page}: no block below {titles}"
        return found

    def follow(self, page, *titles):
        """Do all that a page says, or these sections of it."""
        for block in self.read(page, *titles):
            if block.has_commands:
                for command in block.commands:
                    self.run(command)
            elif block.kind == "python":
                self.run_python(block.text)
            elif block.kind == "toml":
                *_, name = re.findall(r"`([\w./-]+\.toml)`", block.said)
                self.put(name, block.text)
            else:
                self.compare(block.text)

    def run(self, command):
        """Give a command to a shell, and keep what it prints."""
        done = self._done(["bash", "-euc", command])
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        self.printed = done.stdout
        return done.stdout

    def refused(self, command):
        """Give a command that cannot work yet, and return what it says."""
        done = self._done(["bash", "-euc", command])
        assert done.returncode == 2, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stderr

    def run_python(self, code):
        """Run a program, and keep what it prints."""
        done = self._done([sys.executable, "-c", code])
        assert done.returncode == 0, f"{code}\n{done.stderr[-3000:]}"
        self.printed = done.stdout
        return done.stdout

    def _done(self, words):
        self.steps += 1
        return subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def put(self, name, text):
        """Write a file, or change the line of it that has the key of a single line."""
        self.steps += 1
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        key = text.partition(" = ")[0]
        changed, n = re.subn(rf"^{re.escape(key)} = .*\n", text, before, flags=re.MULTILINE)
        path.write_text(changed if n else before + text, encoding="utf-8")

    def compare(self, shown):
        """Check that all which a page shows is in what the last command printed."""
        printed = [cells(line) for line in self.printed.splitlines()]
        for line in shown.splitlines():
            assert cells(line) in printed, self.printed
        self.compared += 1

    def end(self, most):
        """Tell the steps and minutes, and check both them and that each page leads to this test."""
        minutes = (time.monotonic() - self.began) / 60.0
        name = self.test.path.stem.removeprefix("test_").replace("_", " ")
        line = f"journey {name}: {self.steps} steps, {minutes:.1f} min"
        self.test.user_properties.append(("journey", line))
        print(f"\n{line}")
        assert self.steps <= most
        spec = importlib.util.spec_from_file_location("affected", ROOT / "tests" / "affected.py")
        affected = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(affected)
        test = self.test.path.relative_to(ROOT)
        for page in self.pages:
            found = affected.touched([page])
            assert {str(test), *map(str, test.parents)} & set(found), f"{page}: {found}"


def cells(line):
    """Return what stands in a line, without the borders of a table."""
    return [cell.strip() for cell in line.strip("│ ").split("│")]


@pytest.fixture
def journey(request, tmp_path):
    """Return a reader who has just sat down at an empty folder."""
    return Journey(request.node, tmp_path)
