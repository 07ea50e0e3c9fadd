"""What is on and off with the Flower that is installed, and how that is said."""

import logging

import flwr
import pytest

from fedstale.cli.main import described
from fedstale.deployment.local import LocalDeployment
from fedstale.errors import ConfigError
from fedstale.flower import features


def test_a_feature_that_is_off_is_logged_once_with_the_name_that_is_gone(without, caplog):
    without("flwr.app:Array._is_dirty")
    with caplog.at_level(logging.WARNING, "fedstale"):
        assert [features.has("quick arrays") for _ in range(3)] == 3 * [False]
    (line,) = caplog.messages
    assert line.startswith(
        f"quick arrays: off with Flower {flwr.__version__}, which has no flwr.app:"
    )
    assert features.has("older API")
    assert len(caplog.messages) == 1


def test_what_cannot_go_on_without_a_feature_ends_with_the_name_that_is_gone(without):
    features.require("older API")
    without("flwr.server.server:run_fl")
    with pytest.raises(
        ConfigError, match=r"older API: Flower .* has no flwr\.server\.server:run_fl"
    ):
        features.require("older API")


@pytest.mark.parametrize("version", ["1.34.0", "1.40.2"])
def test_an_older_flower_simulates_and_starts_no_deployment(version, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(flwr, "__version__", version)
    features.require("simulation")
    with pytest.raises(ConfigError) as told:
        LocalDeployment(tmp_path / "deployment", nodes=1)
    assert str(told.value) == (
        f"gate of a SuperLink: Flower {version} is older than 1.41: registered devices could give "
        "orders to one another, so no SuperLink is started; expected flwr 1.41 to 1.42, with which "
        "it was tested"
    )
    assert not (tmp_path / "deployment").exists()
    assert described()["with this Flower: single replies"] == (
        "off, since Flower is older than 1.41: Flower's grid pulls them, and waits for the slowest "
        "upload"
    )


@pytest.mark.parametrize(
    ("version", "n"),
    [("1.41.0", 0), ("1.42.3", 0), ("1.43.0.dev20261026", 1), ("1.44.0", 1), ("1.143.1", 1)],
)
def test_a_flower_newer_than_the_tests_is_named_once(version, n, monkeypatch, caplog):
    monkeypatch.setattr(flwr, "__version__", version)
    features._warn_if_newer.cache_clear()
    with caplog.at_level(logging.WARNING, "fedstale"):
        features.require("simulation")
        features.require("simulations on disk")
    assert len(caplog.messages) == n
    assert all(version in line for line in caplog.messages)
    features._warn_if_newer.cache_clear()


def test_attributes_of_objects_are_found_by_what_methods_of_their_class_store_or_look_up():
    assert features.resolves("flwr.app:Metadata._message_id")
    assert features.resolves("flwr.app:ArrayRecord._data")
    assert features.resolves("flwr.serverapp:ServerApp._main")
    assert not features.resolves("flwr.app:Metadata._no_such")
    assert not features.resolves("flwr.app:Metadata.no_such")
