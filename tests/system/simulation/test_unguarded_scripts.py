"""Scripts that call fedstale without a guard, which each process that they start imports."""

import subprocess
import sys

import pytest

UNGUARDED = """
import multiprocessing
import sys

import fedstale

if __name__ == "__main__":  # what follows is for the worker, which imports the script
    worker = multiprocessing.get_context("spawn").Process(target=print)
    worker.start()
    worker.join()
    sys.exit(worker.exitcode)
{call}
"""


@pytest.mark.parametrize(
    "call",
    [
        "fedstale.simulate('digits', traces='synthetic:5', until='1m', out='kept', overwrite=True)",
        "fedstale.compare({}, out='kept', overwrite=True)",
    ],
)
def test_a_worker_that_imports_an_unguarded_script_does_not_touch_its_run(call, tmp_path):
    (tmp_path / "script.py").write_text(UNGUARDED.format(call=call), encoding="utf-8")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "config.toml").write_text("half of a run", encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert 'below `if __name__ == "__main__":`' in result.stderr
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["config.toml"]


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
