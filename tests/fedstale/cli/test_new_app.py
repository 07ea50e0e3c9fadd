"""`fedstale new`: the folder it writes, and what it refuses."""

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from places import APPS

from fedstale.cli import apps
from fedstale.cli.apps import create, package_name
from fedstale.errors import ConfigError
from fedstale.simulation.flower_app import FlowerApp


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_flower_accepts_a_new_app(tmp_path):
    create(tmp_path / "my_app")
    with FlowerApp.find(tmp_path / "my_app").importable():  # checking imports the package
        config, warnings = load_and_validate(tmp_path / "my_app" / "pyproject.toml")
    assert warnings == []
    assert config["project"]["name"] == "my-app"
    assert build_fab_from_disk(tmp_path / "my_app")


def test_nothing_is_left_of_the_templates_name(tmp_path):
    create(tmp_path / "my-app")
    files = [p for p in (tmp_path / "my-app").rglob("*") if p.is_file()]
    assert {p.relative_to(tmp_path / "my-app").as_posix() for p in files} == {
        "README.md",
        "pyproject.toml",
        "my_app/__init__.py",
        "my_app/client_app.py",
        "my_app/server_app.py",
        "my_app/task.py",
    }
    for path in files:
        assert "starter" not in path.read_text().lower()


@pytest.mark.parametrize("name", APPS)
def test_an_app_is_copied_under_another_name(tmp_path, name):
    create(tmp_path / "my-app", source=APPS[name])
    found = FlowerApp.find(tmp_path / "my-app")
    for path in found.directory.rglob("*"):
        assert f"{name}_app" not in path.name
        assert not path.is_file() or f"{name}_app" not in path.read_text(encoding="utf-8")
    with found.importable():
        found.load_client()
        _, warnings = load_and_validate(found.directory / "pyproject.toml")
    assert found.name == "my-app"
    assert warnings == []


@pytest.mark.parametrize("what", ["nothing", "two packages"])
def test_a_folder_that_is_no_app_is_not_copied(tmp_path, what):
    for package in ("one", "two") if what == "two packages" else ():
        (tmp_path / "source" / package).mkdir(parents=True)
        (tmp_path / "source" / package / "__init__.py").write_text("")
    with pytest.raises(ConfigError, match=r"expected .* with a"):
        create(tmp_path / "my_app", source=tmp_path / "source")
    assert not (tmp_path / "my_app").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "my_app").mkdir()
    (tmp_path / "my_app" / "thesis.txt").write_text("years")
    with pytest.raises(ConfigError, match="expected a new or an empty folder"):
        create(tmp_path / "my_app")
    assert [p.name for p in (tmp_path / "my_app").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("place", ["file", "file/my_app"])
def test_a_file_in_the_way_is_left_alone(tmp_path, place):
    (tmp_path / "file").write_text("years")
    with pytest.raises(ConfigError, match=r"expected a.* folder"):
        create(tmp_path / place)
    assert (tmp_path / "file").read_text() == "years"


def test_a_failure_halfway_leaves_nothing_behind(tmp_path, monkeypatch):
    written = []

    def fails_later(path, text, encoding):
        written.append(path.write_bytes(text.encode(encoding)))
        if len(written) > 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(apps.Path, "write_text", fails_later)
    with pytest.raises(ConfigError, match="No space left on device"):
        create(tmp_path / "my_app")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["1app", "my app", "../x", "a.b", "_app", "app\u00e9", "class", "a" * 33, "build", "lib"],
)
def test_a_name_that_python_or_flower_cannot_use_is_refused(name):
    with pytest.raises(ConfigError, match=r"^name = .*such as my_app"):
        package_name(name)


@pytest.mark.parametrize("name", ["fedstale", "flwr", "torch", "json", "sklearn"])
def test_a_name_that_would_hide_an_installed_package_is_refused(name):
    with pytest.raises(ConfigError, match="the app would hide"):
        package_name(name)
