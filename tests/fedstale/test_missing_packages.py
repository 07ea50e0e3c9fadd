"""What is not installed is named with the command that installs it."""

import json
import shlex
import tomllib
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from places import ROOT

from fedstale.errors import EXTRAS, installing, needs, not_installed

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = packages_distributions()


class Distribution:
    """An installed fedstale that came from somewhere."""

    def __init__(self, origin):
        self.origin = origin

    def read_text(self, name):
        assert name == "direct_url.json"
        return self.origin and json.dumps(self.origin)


@pytest.fixture
def came_from(monkeypatch):
    def come(*origins):
        found = [Distribution(origin) for origin in origins]
        monkeypatch.setattr("importlib.metadata.distributions", lambda name: iter(found))

    return come


@pytest.mark.parametrize(
    "name", ["clone", "a clone of it's own", "fedstale-0.2.0-py3-none-any.whl"]
)
def test_an_extra_comes_from_where_this_fedstale_came_from(name, came_from, tmp_path):
    place = tmp_path / name
    place.touch()
    came_from({"url": place.as_uri(), "archive_info": {}})
    assert shlex.split(installing("torch")) == ["pip", "install", f"{place}[torch]"]
    came_from({"url": place.as_uri(), "dir_info": {"editable": True}})
    assert shlex.split(installing("ray")) == ["pip", "install", "-e", f"{place}[ray]"]


@pytest.mark.parametrize(
    "origin", [None, {"url": "file:///nowhere/fedstale.whl"}, {"url": "https://example.org/"}]
)
def test_where_that_is_gone_the_command_is_for_a_clone(origin, came_from):
    came_from(origin)
    assert installing("agents") == "pip install '.[agents]' in a clone of fedstale"


def test_a_fedstale_that_is_not_installed_says_how_a_clone_is(came_from):
    came_from()
    assert installing("ray") == "pip install '.[ray]' in a clone of fedstale"


def test_what_a_build_leaves_in_a_clone_says_nothing_of_its_place(came_from, tmp_path):
    came_from(None, {"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    assert shlex.split(installing("ray")) == ["pip", "install", "-e", f"{tmp_path}[ray]"]


def test_a_package_of_no_extra_is_installed_by_itself_or_not_spoken_of():
    assert needs("plotly") == "needs plotly, which is not installed: pip install plotly"
    assert not_installed(ModuleNotFoundError(name="torch.nn")) == needs("torch")
    assert not_installed(ModuleNotFoundError(name="own_module")) is None
    assert not_installed(ModuleNotFoundError("without a name")) is None


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_that_is_named_brings_the_packages_that_are_said(extra):
    lines = PROJECT["optional-dependencies"][extra]
    brought = {canonicalize_name(Requirement(line).name) for line in lines}
    distributions = DISTRIBUTIONS
    for package in EXTRAS[extra]:
        assert set(map(canonicalize_name, distributions.get(package, [package]))) & brought, package
