"""The newest of the libraries that people call from a ServerApp or a client, in a simulation."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from written_apps import write_app

LIBRARIES = {
    "wandb": "*/offline-run-*/run-*.wandb",
    "mlflow": "mlruns/*/*/metrics/model",
    "tensorboard": "events.out.tfevents*",
    "joblib": "",
    "sklearn": "",
    "pandas": "",
    "lightning": "",
}
"""What each writes, if it does."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("executor", ["inline", "processes"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_run_with_a_library_is_one_without(library, executor, tmp_path):
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    app = write_app(tmp_path / "app", "libraries", LIBRARY=library)
    written, out = tmp_path / "written", tmp_path / "run"
    written.mkdir()
    command = ("simulate", app, "--traces", "ideal:4", "--executor", executor, "--out", out)
    options = () if executor == "inline" else ("--workers", "2")
    # mlflow asks for this where runs are kept in a folder.
    environment = {"LIBRARY_FOLDER": str(written), "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = subprocess.run(
        [sys.executable, "-m", "fedstale", *map(str, command), *options],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["jobs"] == {"sent": 8, "reported": 8}
    # Pools of threads are polled in virtual time.
    assert summary["virtual_s"] < 1.0
    assert not LIBRARIES[library] or list(written.glob(LIBRARIES[library]))
