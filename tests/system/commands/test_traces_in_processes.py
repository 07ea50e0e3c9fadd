"""`fedstale traces` in processes of its own: what it imports, and how it ends."""

import json
import subprocess
import sys
import time

from fedstale.traces import TraceSet

PROGRAM = "from fedstale.cli.traces import app; app()"


def test_help_is_quick_and_loads_nothing_heavy():
    code = (
        "import sys; from typer.testing import CliRunner; from fedstale.cli.traces import app; "
        "CliRunner().invoke(app, ['--help']); "
        "print([m for m in ('numpy', 'pandas', 'pyarrow', 'torch', 'flwr') if m in sys.modules])"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert time.perf_counter() - began < 5


def test_describe_works_in_a_process_of_its_own(tmp_path):
    TraceSet.ideal(3).write(tmp_path / "t.parquet")
    command = [sys.executable, "-c", PROGRAM, "describe", "t.parquet", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert json.loads(done.stdout)["n_devices"] == 3


def test_a_broken_file_ends_a_process_with_code_2_and_one_sentence(tmp_path):
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and no more")
    command = [sys.executable, "-c", PROGRAM, "describe", "t.parquet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("fedstale: t.parquet")
    assert "Traceback" not in done.stderr
