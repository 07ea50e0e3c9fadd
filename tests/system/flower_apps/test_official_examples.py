"""Flower's own examples, unchanged, under `fedstale simulate`.

They are fetched from Flower's repository at the tag of the pinned release, and skipped where there
is no network; or FLOWER_EXAMPLES names the folder `examples` of a checkout. Their data is not
downloaded: the folder stand_ins has modules in the place of those that would.

    FLOWER_EXAMPLES=flower/examples python tests/system/flower_apps/test_official_examples.py

prints the table of docs/apps-that-run.md.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from fedstale.traces import Availability, Series, TraceSet

ROOT = Path(__file__).parents[3]
STAND_INS = ROOT / "tests" / "fixtures" / "stand_ins"
PAGE = ROOT / "docs" / "apps-that-run.md"
REPOSITORY, TAG = "https://github.com/adap/flower", "v1.42.0"
VARIABLE = "FLOWER_EXAMPLES"

EXAMPLES = {
    "quickstart-numpy": "message API, no data",
    "quickstart-pytorch": "message API",
    "quickstart-sklearn": "message API",
    "fl-tabular": "message API",
    "federated-vae": "message API",
    "quickstart-xgboost": "FedXgbBagging",
    "quickstart-catboost": "a loop of its own, trees as bytes",
    "advanced-pytorch": "`start` of its own, Context state",
    "custom-mods": "mods of its own",
    "quickstart-pandas": "analytics, no strategy",
    "federated-analytics": "analytics, no strategy",
    "federated-kaplan-meier-fitter": "analytics, no strategy",
    "vertical-fl": "named actions in a loop of its own, Context state",
    "flower-secure-aggregation": "client_fn, SecAgg+ workflow",
    "fl-dp-sa": "client_fn, differential privacy and SecAgg+",
    "opacus": "client_fn and server_fn, a privacy engine",
    "sklearn-logreg-mnist": "client_fn and server_fn",
}
DEVICES = {"vertical-fl": 3, "federated-kaplan-meier-fitter": 2, "fl-dp-sa": 50}
NEEDS = {
    "quickstart-xgboost": "xgboost",
    "quickstart-catboost": "catboost",
    "custom-mods": "tensorboard",
    "opacus": "opacus",
    "federated-kaplan-meier-fitter": "lifelines",
}
SHORTER = {"num-server-rounds": 2, "num_server_rounds": 2, "local-epochs": 1, "timeout": 5.0}
COSTS = {
    "work-per-example": 0.01,
    "evaluate-work-per-example": 0.005,
    "epochs": 1,
    "examples": 50,
    "model-bytes": 1_000_000,
}


def fetched(folder):
    """Return the examples at the pinned tag, fetched into a folder, or why they cannot be."""
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    sparse = ["--depth", "1", "--filter", "blob:none", "--sparse", "--branch", TAG]
    for command in (
        ["git", "clone", "--quiet", *sparse, REPOSITORY, str(folder)],
        ["git", "-C", str(folder), "sparse-checkout", "set", "examples"],
    ):
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=240, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as problem:
            return None, str(problem)
        if done.returncode:
            return None, done.stderr.strip().splitlines()[-1]
    return folder / "examples", ""


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """Return the folder of Flower's examples."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    folder, why = fetched(tmp_path_factory.mktemp("flower") / "flower")
    if folder is None:
        pytest.skip(
            f"Flower's examples at {TAG} cannot be fetched from {REPOSITORY} ({why}): needs a "
            f"network, or {VARIABLE}=FOLDER"
        )
    return folder


def always_on(path, n):
    """Write devices that never leave, all of one speed."""
    TraceSet(
        device_ids=TraceSet.ideal(n).device_ids,
        availability=Availability.always(n),
        compute=Series.constant(np.ones(n)),
        downlink=Series.constant(np.full(n, 8e6)),
        uplink=Series.constant(np.full(n, 8e6)),
    ).write(path)
    return path


def simulated(app, folder):
    """Run an example as a user does, and return its summary, or its last words if it failed."""
    config = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))
    known = config["tool"]["flwr"]["app"].get("config", {})
    overrides = " ".join(f"{key}={value!r}" for key, value in SHORTER.items() if key in known)
    traces = always_on(folder / "devices.parquet", DEVICES.get(app.name, 6))
    costs = [text for key, value in COSTS.items() for text in (f"--{key}", str(value))]
    command = [
        *(sys.executable, "-m", "fedstale", "simulate", str(app), "--json", "--executor", "inline"),
        *("--traces", str(traces), "--out", str(folder / "run"), *costs),
        *(("-c", overrides) if overrides else ()),
    ]
    paths = f"{STAND_INS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    return json.loads(done.stdout) if done.stdout else {"status": "failed", "reason": done.stderr}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_official_example_runs_unchanged(examples, name, tmp_path):
    app, needed = examples / name, NEEDS.get(name)
    if not (app / "pyproject.toml").is_file():
        pytest.skip(f"{examples} has no {name}")
    if needed is not None and find_spec(needed) is None:
        pytest.skip(f"{name} needs the package {needed}")
    summary = simulated(app, tmp_path)
    assert summary["status"] == "finished", summary["reason"]
    assert summary["rounds"] >= 1
    assert sum(kind["reported"] for kind in summary["messages"].values()) > 0
    assert summary["client_errors"] == []


def asked_for(app):
    """Return the versions of Flower that an example asks for."""
    project = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (flower,) = (one for one in project["dependencies"] if re.match(r"flwr(?![\w-])", one))
    return re.sub(r"^flwr(\[\w+\])?", "", flower)


def table(folder):
    """Return the rows of the table of docs/apps-that-run.md, for the examples in a folder."""
    rows = []
    for name, shape in EXAMPLES.items():
        needed = NEEDS.get(name)
        if not (folder / name / "pyproject.toml").is_file():
            continue
        if needed is not None and find_spec(needed) is None:
            continue
        with tempfile.TemporaryDirectory() as made:
            summary = simulated(folder / name, Path(made))
        ending = f"{summary['status']}: {summary['reason'].strip().splitlines()[-1]}"
        ending += "; ".join(["", *(error["error"] for error in summary.get("client_errors", []))])
        sent = ", ".join(f"{n['sent']} {kind}" for kind, n in summary.get("messages", {}).items())
        rows.append(f"| `{name}` | {shape} | {asked_for(folder / name)} | {ending} | {sent} |")
    return rows


def test_the_page_tells_of_each_example_whether_it_was_run():
    _, _, page = PAGE.read_text(encoding="utf-8").partition("\n## Flower's examples\n")
    section, _, _ = page.partition("\n## ")
    rows = re.findall(r"^\| `([\w-]+)` \| (.+?) \|.* \| finished: ", section, flags=re.MULTILINE)
    assert dict(rows).items() <= EXAMPLES.items()
    not_run = re.search(r"The test also names (.+?), which have not been run", section, re.DOTALL)
    assert not_run is not None
    assert set(re.findall(r"`([\w-]+)`", not_run[1])) == EXAMPLES.keys() - dict(rows).keys()


if __name__ == "__main__":
    print(*table(Path(os.environ[VARIABLE])), sep="\n")
