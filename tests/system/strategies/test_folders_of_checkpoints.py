"""One process at a time writes into a folder of checkpoints, and goes on from it."""

import os
import shutil
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from places import ROOT
from virtual_grid import VirtualGrid, adder, identity, record

from fedstale.errors import ConfigError
from fedstale.strategies import Checkpoints, FedBuff


@pytest.fixture(autouse=True)
def _identity():
    with identity():
        yield


def model():
    return record(w=np.zeros(3, np.float32))


def two_nodes():
    return {10: adder(1.0), 11: adder(1.0)}


def test_two_processes_do_not_write_into_one_folder_and_kill_9_frees_it(tmp_path):
    code = (
        "import sys, time; from fedstale.strategies import Checkpoints\n"
        "Checkpoints(sys.argv[1]); print(flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline()
        with pytest.raises(ConfigError, match="is in use by a run that goes on"):
            Checkpoints(tmp_path)
        other.kill()
    Checkpoints(tmp_path)
    assert repr(Checkpoints(tmp_path, every=2)) == f"Checkpoints({str(tmp_path)!r}, every=2)"


RESUMING = """
import sys
import numpy as np
from fedstale.strategies import FedBuff
from virtual_grid import VirtualGrid, adder, identity, record


def wait(version, arrays):
    print(version, flush=True)
    sys.stdin.read(1)


with identity():
    grid = VirtualGrid({10: adder(1.0), 11: adder(1.0)})
    FedBuff(2, 1, resume=sys.argv[1]).start(
        grid,
        record(w=np.zeros(3, np.float32)),
        num_rounds=4,
        evaluate_fn=wait,
    )
"""


@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_second_server_does_not_go_on_from_the_checkpoints_of_a_first(tmp_path, what):
    folder = tmp_path / "kept"
    start = partial(FedBuff(2, 1, checkpoints=folder).start, initial_arrays=model())
    start(VirtualGrid(two_nodes()), num_rounds=2)
    place = folder if what == "folder" else max(folder.iterdir())
    command = [sys.executable, "-c", RESUMING, str(place)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "fixtures")}
    # This process holds the folder, which it has written into.
    refused = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    said = refused.stderr.splitlines()[-1]
    assert said.startswith("fedstale.errors.ConfigError: ")
    assert f"resume = {str(place if what == 'folder' else folder)!r} is in use by a run" in said
    if sys.platform == "linux":
        assert f"in process {os.getpid()} of {os.uname().nodename}: wait for it" in said

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    command[-1] = str(copy if what == "folder" else max(copy.iterdir()))
    with subprocess.Popen(command, env=environment, text=True, **pipes) as first:
        assert first.stdout.readline() == "3\n"
        second = subprocess.run(
            command, env=environment, text=True, capture_output=True, check=False
        )
        assert f"in process {first.pid} of" in second.stderr or sys.platform != "linux"
        with pytest.raises(ConfigError, match=r"checkpoints = .* is in use"):
            Checkpoints(copy)
        with pytest.raises(ConfigError, match=r"resume = .* is in use"):
            FedBuff(2, 1, resume=copy).start(VirtualGrid(two_nodes()), model(), 4)
        first.kill()
    third = subprocess.run(
        command, env=environment, text=True, input="xx", capture_output=True, check=True
    )
    assert third.stdout.split() == ["3", "4"]
