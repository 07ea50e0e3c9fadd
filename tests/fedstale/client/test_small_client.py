"""A device has neither torch, scikit-learn, pandas, plotly nor Ray, and imports what it needs.

`test_small_client_alone.py` trains and forecasts so in an interpreter of its own.
"""

import importlib
import tomllib

from missing_packages import BLOCKED, MODULES, without
from packaging.requirements import Requirement
from places import ROOT
from typer.testing import CliRunner

from fedstale.errors import installing


def test_what_devices_import_needs_no_package_of_servers(tmp_path):
    with without(*BLOCKED):
        made = [importlib.import_module(module) for module in MODULES]
        # A forecaster is read as the mod is made.
        importlib.import_module("fedstale.client").ForecastMod()
        # A command of servers says which extra it needs.
        words = ["simulate", "digits", "--out", str(tmp_path / "run")]
        ran = CliRunner().invoke(made[-1].app, words)
    assert ran.exit_code == 2
    assert installing("server") in ran.stderr


def test_the_extra_client_names_no_package_of_servers():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        Requirement(line).name.lower()
        for line in (*project["dependencies"], *project["optional-dependencies"]["client"])
    }
    assert named & {"scikit-learn" if b == "sklearn" else b for b in (*BLOCKED, "jinja2")} == set()
    assert {"flwr", "numpy", "psutil", "safetensors"} <= named
