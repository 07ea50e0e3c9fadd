"""The line that shows calls in Python how far they are."""

import io
import logging
import sys
from types import ModuleType

import pytest

from fedstale.live import progress_line

logger = logging.getLogger("flwr")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def screen(text):
    """Return what a terminal shows of a text, line by line."""
    lines, at = [""], 0
    for char in text:
        if char == "\n":
            lines.append("")
            at = 0
        elif char == "\r":
            at = 0
        else:
            lines[-1] = lines[-1][:at] + char + lines[-1][at + 1 :]
            at += 1
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize(
    ("place", "progress", "shown"),
    [
        ("terminal", None, True),
        ("notebook", None, True),
        ("file", None, False),
        ("file", True, True),
        ("terminal", False, False),
        ("notebook", False, False),
    ],
)
def test_the_line_is_shown_where_it_is_seen_or_asked_for(place, progress, shown, monkeypatch):
    stderr = Terminal() if place == "terminal" else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    if place == "notebook":
        monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    with progress_line(progress) as say:
        assert (say is not None) == shown
        if say is not None:
            say("round 1")
            say("2")
            assert screen(stderr.getvalue()) == ["2"]
    assert screen(stderr.getvalue()) == [""]


def test_what_flower_logs_takes_the_place_of_the_line(monkeypatch):
    stderr = io.StringIO()
    handler = logging.StreamHandler(stderr)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(logger, "handlers", [handler])
    with progress_line(True) as say:
        say("a long line of progress")
        logger.warning("a result")
        say("round 2")
        assert screen(stderr.getvalue()) == ["a result", "round 2"]
    assert handler.filters == []
