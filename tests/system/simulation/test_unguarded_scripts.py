"""Scripts without `if __name__ == "__main__":`, which no process that a call starts imports."""

import subprocess
import sys

import pytest
from small_app import write_small_app

SIMULATES = """
import fedstale

print("begun")
work = {"train": 20.0}
run = fedstale.simulate(
    "app",
    traces="synthetic:5",
    until="30m",
    executor="processes",
    workers=2,
    work=lambda message: work.get(message.metadata.message_type),
)
print(run.status)
"""

COMPARES = """
import fedstale

print("begun")
plan = {"app": "app", "traces": "synthetic:5", "until": "30m", "variants": {"A": {}}}
print(len(fedstale.compare({**plan, "seeds": [1, 2]}, workers=2).variants[0].runs), "runs")
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("script", "printed"),
    [(SIMULATES, ["begun", "stopped"]), (COMPARES, ["begun", "2 runs"])],
    ids=["simulate", "compare"],
)
def test_a_script_needs_no_guard_for_the_processes_that_a_call_starts(script, printed, tmp_path):
    write_small_app(tmp_path / "app")
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.stdout.splitlines() == printed, result.stderr
    assert result.returncode == 0
