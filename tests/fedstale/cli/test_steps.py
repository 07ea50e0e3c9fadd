"""What long work tells while it goes on."""

import io
import sys

import pytest

from fedstale.cli.output import steps


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stderr", "shown"), [(Terminal(), True), (io.StringIO(), False)])
def test_on_a_terminal_a_line_shows_the_share(stderr, shown, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stderr)
    with steps(is_shown=True) as step:
        step("halfway", 2, 4)
    assert ("50% done, halfway" in stderr.getvalue()) == shown
