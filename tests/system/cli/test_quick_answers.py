"""What a fresh process imports and prints: little for a misspelt name, and no log unasked."""

import logging
import subprocess
import sys

import pytest

HEAVY = ("torch", "flwr", "pandas", "pyarrow", "scipy", "ray")
TOLD = """
import sys
from fedstale.cli.main import main
try:
    main()
except SystemExit as end:
    heavy = [name for name in {HEAVY!r} if name in sys.modules]
    print(end.code, heavy)
"""
RUN = """
import logging, sys
import numpy as np
import fedstale
assert "flwr" not in sys.modules
logging.getLogger("flwr").setLevel(int(sys.argv[1]))
fedstale.simulate("digits", traces="ideal:3", until="1 rounds", out=sys.argv[2])
"""


@pytest.mark.parametrize(
    ("words", "may"),
    [
        (["nosuch"], []),
        (["digits", "--traces", "nosuch.parquet"], []),
        (["digits", "--traces", "synthetic:3@nosuch"], []),
        (["digits", "--until", "nosuch"], []),
        (["digits", "--executor", "nosuch"], []),
        (["digits", "--strategy", "nosuch(3)"], ["flwr"]),
    ],
)
def test_what_is_misspelt_is_told_before_heavy_libraries_are_imported(words, may):
    code = TOLD.replace("{HEAVY!r}", repr(HEAVY))
    command = [sys.executable, "-c", code, "simulate", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "nosuch" in done.stderr
    assert done.stdout.splitlines()[-1] == f"2 {may}"


@pytest.mark.parametrize(("level", "is_shown"), [(logging.NOTSET, False), (logging.INFO, True)])
def test_a_level_that_was_set_before_flower_was_imported_is_respected(level, is_shown, tmp_path):
    command = [sys.executable, "-c", RUN, str(level), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ("Initial global evaluation" in done.stderr) == is_shown
    assert "Initial global evaluation" in (tmp_path / "run" / "log.txt").read_text()
