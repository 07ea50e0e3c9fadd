"""What is not installed is named with the command that installs it."""

import tomllib
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from places import ROOT

from fedstale.errors import EXTRAS, needs, not_installed

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = packages_distributions()


def test_a_package_of_no_extra_is_installed_by_itself_or_not_spoken_of():
    assert needs("plotly") == "needs plotly, which is not installed: pip install plotly"
    torch = "needs torch, which is not installed: pip install '.[torch]' in a clone of fedstale"
    assert not_installed(ModuleNotFoundError(name="torch.nn")) == needs("torch") == torch
    assert not_installed(ModuleNotFoundError(name="own_module")) is None
    assert not_installed(ModuleNotFoundError("without a name")) is None


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_that_is_named_brings_the_packages_that_are_said(extra):
    lines = PROJECT["optional-dependencies"][extra]
    brought = {canonicalize_name(Requirement(line).name) for line in lines}
    distributions = DISTRIBUTIONS
    for package in EXTRAS[extra]:
        assert set(map(canonicalize_name, distributions.get(package, [package]))) & brought, package
