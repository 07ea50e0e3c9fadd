"""Apps loaded from their folders, and messages for them, without any Grid."""

import importlib

import pytest
import torch
from clothes import write_clothes
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedstale.simulation.compat import identity, stamp
from fedstale.simulation.flower_app import FlowerApp


@pytest.fixture(autouse=True)
def _one_thread():
    """Models this small lose time to threads, most of all while other tests run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run_identity():
    """Let this process make messages, as a ServerApp's would."""
    with identity(7):
        yield


@pytest.fixture
def load(run_identity):
    """Return a function that loads an app from its folder and forgets it after the test."""
    contexts = []

    def load(app):
        found = FlowerApp.find(app)
        context = found.importable()
        context.__enter__()
        contexts.append(context)
        return found

    yield load
    for context in reversed(contexts):
        context.__exit__(None, None, None)


@pytest.fixture
def ask(run_identity):
    """Return a function that sends a ClientApp one message and returns the reply."""

    def ask(client, kind, arrays, run_config, *, partition=0, n=10, server_round=1):
        content = RecordDict(
            {"arrays": arrays, "config": ConfigRecord({"server-round": server_round})}
        )
        message = Message(content, 5, kind)
        stamp(message, f"job-{partition}-{server_round}", 0.0, 3600.0)
        node_config = {"partition-id": partition, "num-partitions": n}
        return client(message, Context(7, 5, node_config, RecordDict(), dict(run_config)))

    return ask


@pytest.fixture
def small_play(tmp_path):
    """Return the path of a play with three roles, of which one says little."""
    speech = "To be, or not to be, that is the question that I put to all of you today.\n"
    acts = [f"HAMLET:\n{speech * 12}\nOPHELIA:\n{speech * 6}\nGHOST:\nMark me."] * 3
    path = tmp_path / "play.txt"
    path.write_text("\n\n".join(acts))
    return str(path)


@pytest.fixture
def small_clothes(tmp_path):
    """Return the path of a folder with 400 images to train on and 110 to test."""
    write_clothes(tmp_path / "clothes")
    return str(tmp_path / "clothes")


@pytest.fixture
def data_of(small_play, small_clothes):
    """Return a function that returns the settings by which an app finds small data."""
    settings = {"text": small_play, "data": small_clothes}

    def data_of(app):
        return {key: value for key, value in settings.items() if key in app.run_config({})}

    return data_of


@pytest.fixture
def opened(load, data_of):
    """Return a function that opens an app: its client, its run config and a message's content."""

    def opened(folder, **config):
        app = load(folder)
        client = app.load_client()
        (package,) = app.packages
        network = importlib.import_module(f"{package}.task").Network()
        content = RecordDict(
            {
                "arrays": ArrayRecord(network.state_dict()),
                "config": ConfigRecord({"server-round": 1} | config),
            }
        )
        return app, client, app.run_config({"local-epochs": 2} | data_of(app)), content

    return opened
