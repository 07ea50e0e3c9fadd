"""A type checker finds what is wrong in the settings of a strategy."""

import re
import subprocess
import sys

from places import ROOT

SNIPPET = """\
from fedstale.strategies import FedBuff, FedProx, StaleStrategy
FedBuff(20, 5, seed=1, eta=0.1)
FedProx(fraction_train=0.5, weighted_by_key="n")
FedBuff(20, bufer_size=5)  # line 4
FedBuff(20, seed="one")  # line 5
FedProx(fraction_train="half")  # line 6
StaleStrategy(foo=1)  # line 7
"""


def test_mypy_finds_a_wrong_setting_and_a_wrong_type(tmp_path):
    file = tmp_path / "app.py"
    file.write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", file]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = re.findall(r"app\.py:(\d+): error", found.stdout)
    assert lines == ["4", "5", "6", "7"], found.stdout + found.stderr
