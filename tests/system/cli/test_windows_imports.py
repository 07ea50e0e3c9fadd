"""What a simulation imports is there on Windows too."""

import subprocess
import sys


def test_the_commands_of_a_simulation_need_nothing_that_windows_lacks():
    script = """
import sys
for name in ("fcntl", "pwd", "grp", "resource", "termios"):
    sys.modules[name] = None
sys.platform = "win32"
import fedstale.files
sys.platform = "linux"
import fedstale.cli.main, fedstale.api, fedstale.simulation.run, fedstale.reports.page
import fedstale.client, fedstale.strategies
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
