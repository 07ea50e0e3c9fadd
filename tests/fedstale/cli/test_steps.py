"""What long work tells while it goes on."""

import io
import sys

import pytest

from fedstale.cli import output
from fedstale.cli.output import steps


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(output.time, "perf_counter", lambda: now[0])
    return now


def test_without_a_terminal_a_line_now_and_then_says_share_and_time_left(clock, capsys):
    with steps(is_shown=True) as step:
        step("first", 0, 4)
        clock[0] += 20.0
        step("second", 1, 4)
        assert capsys.readouterr().err == ""
        clock[0] += 20.0
        step("third", 2, 4)
        assert capsys.readouterr().err == "50% done, third, 0.7 min left\n"
        step("fourth", 3, 4)
    assert capsys.readouterr().err == ""


def test_on_a_terminal_a_bar_shows_the_share(monkeypatch):
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with steps(is_shown=True) as step:
        step("halfway", 2, 4)
    assert "halfway" in shown.getvalue()
    assert "50%" in shown.getvalue()
