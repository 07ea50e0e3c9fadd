"""What an app is told that imports names of an older Flower."""

import flwr
import pytest

from fedstale.flower.dropped import MOVED, advice, advice_on
from fedstale.flower.features import resolves

MOVES = [
    (f"{module}:{old}", f"{door}:{new or old}")
    for module, doors in MOVED.items()
    for door, entries in doors.items()
    for old, _, new in (entry.partition(">") for entry in entries.split())
]


def failed(source, path):
    """Return what importing a file of an app raises."""
    path.write_text(source, encoding="utf-8")
    with pytest.raises((ImportError, AttributeError)) as caught:
        exec(compile(source, str(path), "exec"), {})
    return caught.value


def test_every_name_of_the_table_is_gone_and_is_there_under_its_new_name():
    assert [old for old, _ in MOVES if resolves(old)] == []
    assert [new for _, new in MOVES if not resolves(new)] == []


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (
            "from flwr.common.record import RecordSet, ArrayRecord",
            "flwr.common.record is gone in Flower {}: take RecordDict (once RecordSet) and "
            "ArrayRecord from flwr.app",
        ),
        ("from flwr.client.client import Client", "take Client from flwr.client"),
        ("from flwr.client.client_app import (\n ClientApp,\n Context)", "Context from flwr.app"),
        ("from flwr.server.driver import Driver", "take Grid (once Driver) from flwr.serverapp"),
        ("from flwr.common.parametersrecord import *", "take Array and ArrayRecord (once Para"),
        ("from flwr.server import driver", "flwr.server.driver is gone in Flower {}: take Grid"),
        ("import flwr as fl\nfl.server.driver.Driver", "take Grid from flwr.serverapp"),
        ("import os, flwr.common.context as c", "take Context from flwr.app"),
        (
            "from flwr.common.typing import Scalar, UserConfig",
            "flwr.common.typing.UserConfig is gone in Flower {}: take UserConfig from flwr.app",
        ),
        ("from flwr.server.utils.tensorboard import tensorboard", "nothing public has the place"),
    ],
)
def test_a_dropped_import_is_told_with_its_line_and_what_to_take_now(source, told, tmp_path):
    found = advice_on(failed(source, tmp_path / "server_app.py"))
    assert found.startswith("server_app.py, line ")
    assert told.format(flwr.__version__) in found


@pytest.mark.parametrize("source", ["import no_such_package", "from math import nothing", "''.x"])
def test_whatever_else_fails_is_not_put_down_to_flower(source, tmp_path):
    assert not advice_on(failed(source, tmp_path / "server_app.py"))


def test_names_that_are_there_need_no_advice():
    assert not advice("flwr.app", ["ArrayRecord"])
    assert not advice("flwr.client")
    assert not advice("flwrs.common.record", ["RecordSet"])
