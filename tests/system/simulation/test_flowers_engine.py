"""On ideal devices a network of torch ends as on Flower's own engine, bit for bit."""

import subprocess
import sys

import pytest
from flower_engine import final_parts
from same_model import assert_same_model
from stock_app import IN_ONE_ORDER, TORCH, write_stock_app


@pytest.mark.filterwarnings("ignore")
def test_a_network_of_torch_ends_as_on_flowers_engine(tmp_path):
    n = 4
    app = write_stock_app(tmp_path / "app", TORCH, IN_ONE_ORDER, n)
    theirs = final_parts(app / "stock_app_under_test.py", n).arrays
    command = [sys.executable, "-m", "fedstale", "simulate", str(app), "--traces", f"ideal:{n}"]
    command += ["--out", str(tmp_path / "run")]
    ours = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ours.returncode == 0, ours.stderr
    assert_same_model(tmp_path / "run", theirs)
