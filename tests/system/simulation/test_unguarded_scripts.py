"""Scripts that call fedstale without a guard, which each process that they start imports."""

import subprocess
import sys

import pytest

STARTS_NO_WORKER = """
import fedstale

fedstale.simulate(
    "digits", traces="synthetic:5", until="1h", executor="processes", workers=2, out="run"
)
"""


@pytest.mark.timeout(120)
def test_an_unguarded_script_whose_workers_cannot_start_ends_with_a_sentence(tmp_path):
    (tmp_path / "script.py").write_text(STARTS_NO_WORKER, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "ended before it was ready" in result.stderr
    assert not (tmp_path / "run").exists()
