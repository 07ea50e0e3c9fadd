"""An app that a benchmark writes is one that Flower starts."""

import tomllib

import pytest
from flwr.cli.config_utils import load_and_validate
from flwr.supercore.utils import is_valid_name

from lab.deployed import write_app

CLIENT = "from flwr.clientapp import ClientApp\napp = ClientApp()\n"
SERVER = "from flwr.serverapp import ServerApp\napp = ServerApp()\n"


@pytest.mark.parametrize("name", ["waiting", "importing_numpy", "importing_torch"])
def test_flower_takes_it_whatever_its_package_is_called(tmp_path, name):
    app = write_app(tmp_path / name, name, server=SERVER, client=CLIENT, config="rounds = 1")
    project, _ = load_and_validate(app / "pyproject.toml")
    assert is_valid_name(project["project"]["name"]) == (True, "")
    components = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert components["components"]["clientapp"] == f"{name}.client_app:app"
    assert components["config"] == {"rounds": 1}
