"""A message and its Context on their way to a trainer that stays and back; no process is started.

`tests/system/contrib/sites/test_resident_at_work.py` starts trainers, and kills either side.
"""

import importlib
import logging
import os
import socket
import struct
import sys
import threading
from contextlib import closing

import numpy as np
import pytest
from bench_device import context, message
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from small_app import CLIENT, write_small_app

from fedstale import simulate
from fedstale.client import CompressionMod, ForecastMod
from fedstale.contrib.sites import resident
from fedstale.errors import ConfigError
from fedstale.flower import bytes_of_message, bytes_of_records
from fedstale.strategies.messages import Requested
from fedstale.traces import TraceSet

# The package has a function of the same name.
room = importlib.import_module("fedstale.contrib.sites.resident")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="trainers are for Linux alone")

DENSE = np.linspace(-1, 1, 1024, dtype=np.float32)


def app_of(train, **options):
    app = ClientApp(**options)
    app.train()(train)
    return app


@app_of
def notes(message, context):
    """Answer with records of all kinds, and write into the Context."""
    times = context.state.config_records.get("seen", ConfigRecord({"times": 0}))["times"] + 1
    context.state["seen"] = ConfigRecord({"times": times})
    context.state["moments"] = ArrayRecord({"z": _array(DENSE * times), "a": _array(DENSE)})
    content = {
        "z": MetricRecord({"num-examples": 3, "nan": float("nan"), "list": [0.1, -0.0]}),
        "arrays": ArrayRecord([array + times for array in _arrays(message)] + [DENSE[::-2]]),
        "a": ConfigRecord({"text": "ü", "raw": b"\0\xff", "flag": True, "none": []}),
    }
    return Message(RecordDict(content), reply_to=message)


def _array(values):
    return ArrayRecord([values])["0"]


def _arrays(message):
    return message.content["arrays"].to_numpy_ndarrays()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Return the folder of trainers, as in the process of a message."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "argv", ["/bin/flwr-clientapp", "--token", "t"])
    return tmp_path / "home" / "trainers"


@pytest.fixture
def as_another_user(monkeypatch):
    """Return a function after which this process takes itself for another user's."""
    uid = os.geteuid()
    return lambda: monkeypatch.setattr(os, "geteuid", lambda: uid + 1)


@pytest.fixture
def given(monkeypatch, home):
    """Return a function that puts a ClientApp in a module, and returns what `resident` makes."""
    names = iter(range(100))

    def given(app):
        module = type(sys)(f"an_app_{next(names)}")
        module.app = app
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return resident(f"{module.__name__}:app")

    return given


@pytest.fixture
def through(given, monkeypatch):
    """Return a function that makes an app whose trainer is a thread at the end of a connection."""
    threads = []

    def connected(folder, log, given):
        ours, theirs = socket.socketpair()
        threads.append(threading.Thread(target=answered, args=(theirs, given["reference"])))
        threads[-1].start()
        assert ours.recv(1) == b"\n"
        return ours

    def answered(connection, reference):
        with connection:
            room.answer(connection, lambda: room._loaded(reference))

    monkeypatch.setattr(room, "_connected", connected)
    yield given
    for thread in threads:
        thread.join(10.0)
        assert not thread.is_alive()


def bits(reply):
    """Return all of a reply but its times, which are those of the clock."""
    reply.metadata.created_at, reply.metadata.ttl = 1.0, 1.0
    return bytes_of_message(reply)


def test_a_reply_and_the_context_are_the_same_bit_for_bit_as_without_a_trainer(through):
    ways = notes, through(notes)
    contexts = [context(rate=0.1, text="ü", flag=True, n=-(2**62)) for _ in ways]
    for key in ("message-1", "message-2"):
        replies = [bits(way(message(key=key), c)) for way, c in zip(ways, contexts, strict=True)]
        assert replies[0] == replies[1]
    left = [(bytes_of_records(c.state), vars(c) | {"state": None}) for c in contexts]
    assert left[0] == left[1]
    assert contexts[1].state["seen"]["times"] == 2


def test_mods_run_in_the_trainer_and_their_state_goes_along(through):
    def app():
        made = ForecastMod().client_app(around=[CompressionMod()])

        @made.train()
        def train(message, context):
            moved = ArrayRecord([array + np.float32(0.01) * DENSE for array in _arrays(message)])
            content = {"arrays": moved, "metrics": MetricRecord({"num-examples": 1})}
            return Message(RecordDict(content), reply_to=message)

        return made

    ways, replies = (app(), through(app())), []
    contexts = [context() for _ in ways]
    for number in range(3):
        for way, here in zip(ways, contexts, strict=True):
            asked = message(n=1024, key=f"m{number}")
            # What the last reply has left out is owed from the second message on.
            asked.content["config"] = Requested("int4", accepted=f"m{number - 1}").within(
                ConfigRecord()
            )
            replies.append(way(asked, here))
    for one, other in zip(replies[::2], replies[1::2], strict=True):
        assert bytes_of_records(RecordDict({"a": one.content["arrays"]})) == bytes_of_records(
            RecordDict({"a": other.content["arrays"]})
        )
        assert other.content["fedstale.forecast"].keys() == one.content["fedstale.forecast"].keys()
    assert "int4" in str({a.stype for a in replies[-1].content["arrays"].values()})
    assert contexts[1].state.keys() == contexts[0].state.keys()
    assert {"fedstale.owed", "fedstale.history"} <= contexts[1].state.keys()
    assert contexts[1].state["fedstale.owed"] == contexts[0].state["fedstale.owed"]


class OddError(Exception):
    """What an app raises."""


@pytest.mark.parametrize(
    "problem", [KeyError("x"), OddError("no: 'data'"), ModuleNotFoundError("x")]
)
def test_what_the_app_raises_makes_the_same_error_reply(through, problem):
    def train(message, context):
        context.state["seen"] = ConfigRecord({"times": 1})
        raise problem

    app, said, contexts = app_of(train), [], [context(), context()]
    for way, here in zip((app, through(app)), contexts, strict=True):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - compared below
            way(message(), here)
        # As Flower words it.
        said.append(f"{type(caught.value)}:<'{caught.value}'>")
    assert said[0] == said[1]
    assert contexts[0].state == contexts[1].state
    assert ".log" in caught.value.__notes__[0]


def test_an_app_that_cannot_be_imported_ends_its_trainer_with_its_own_error(through):
    def missing():
        raise ModuleNotFoundError("No module named 'torchx'")

    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rb") as file:
        sent(ours, message(), context())
        assert not room.answer(theirs, missing)
        assert file.read(1) == b"\n"
        told, reply, _ = room._received(file)
    assert reply is None
    assert told["raised"]["text"] == "No module named 'torchx'"


def sent(connection, request, here):
    room._send(connection, room._settings(here), request, here.state)


def test_a_message_whose_process_is_gone_costs_the_trainer_its_answer_alone():
    ours, theirs = socket.socketpair()
    sent(ours, message(), context())
    ours.close()
    with theirs:
        assert room.answer(theirs, lambda: notes)


def test_nothing_is_sent_once_the_other_side_has_all_and_may_be_gone():
    class Gone:
        left = 3 * 8 + len(b'{"parts": 2}')

        def sendall(self, data):
            if not self.left:
                raise BrokenPipeError
            self.left -= len(data)

    connection = Gone()
    room._send(connection, {}, None, RecordDict())
    assert connection.left == 0


FRAME = struct.pack("!Q", 11) + b'{"parts":2}'


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\0",
        struct.pack("!Q", 50) + b"{}",
        struct.pack("!Q", 2**40) + b"{}",
        struct.pack("!Q", 2**63) + b"{}",
        FRAME,
        FRAME * 3,
        (struct.pack("!Q", 2) + b"{}") * 3,
        struct.pack("!Q", 11) + b'{"parts":0}',
        struct.pack("!Q", 12) + b'{"parts":-1}',
        FRAME + struct.pack("!Q", 0) * 2,
        (struct.pack("!Q", 2) + b"[]") * 3,
        (struct.pack("!Q", 3) + b"\xff\xff\xff") * 3,
        FRAME + (struct.pack("!Q", 9) + b"\x07 garbled") * 2,
    ],
)
def test_a_connection_that_brings_no_message_is_ended_and_runs_nothing(data):
    ours, theirs = socket.socketpair()
    with ours, closing(theirs):
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        assert room.answer(theirs, lambda: pytest.fail("loaded"))
        theirs.close()
        # It was ready, and has said nothing else.
        assert ours.recv(10) == b"\n"
        assert ours.recv(10) == b""


def test_a_process_of_another_user_is_refused_unread(as_another_user):
    ours, theirs = socket.socketpair()
    with ours, closing(theirs):
        assert room._is_own(ours)
        as_another_user()
        assert not room._is_own(ours)
        sent(ours, message(), context())
        assert room.answer(theirs, lambda: pytest.fail("loaded"))
        theirs.close()
        with pytest.raises(ConnectionResetError):
            ours.recv(1)


def test_a_folder_that_others_may_enter_is_an_error_with_the_chmod(given, home):
    home.mkdir(parents=True, mode=0o755)
    home.chmod(0o755)
    with pytest.raises(ConfigError, match=f"0755.*chmod 700 {home}"):
        given(notes)(message(), context())


def test_a_folder_of_another_user_is_an_error(given, home, as_another_user):
    home.mkdir(parents=True, mode=0o700)
    as_another_user()
    with pytest.raises(ConfigError, match=f"user {os.geteuid()}"):
        given(notes)(message(), context())


def test_the_folder_of_trainers_is_made_private_whatever_the_umask(through, home):
    before = os.umask(0)
    try:
        through(notes)(message(), context())
    finally:
        os.umask(before)
    assert home.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("moment", ["before it is ready", "at work"])
def test_a_message_whose_trainer_is_gone_is_answered_by_its_own_process(
    given, monkeypatch, caplog, moment
):
    ran = []

    def train(message, context):
        ran.append(1)
        return notes(message, context)

    def connected(folder, log, given):
        if moment == "before it is ready":
            raise ChildProcessError("it ended")
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours

    monkeypatch.setattr(room, "_connected", connected)
    here = context()
    with caplog.at_level(logging.WARNING):
        reply = given(app_of(train))(message(), here)
    assert ran == [1]
    assert bits(reply) == bits(notes(message(), context()))
    assert here.state["seen"]["times"] == 1
    assert f"run-{here.run_id}-node-{here.node_id}-" in caplog.text


def test_trainers_differ_by_node_run_app_and_bundle(home, monkeypatch):
    def log(app="a:app", run=1, node=7):
        given = {"reference": app, "path": sys.path}
        return room._log(Context(run, node, {}, RecordDict(), {}), given)

    assert log() == log()
    found = [log(), log("b:app"), log(run=2), log(node=8)]
    monkeypatch.syspath_prepend("another-bundle")
    assert len({*found, log()}) == 5


@pytest.mark.parametrize(
    ("app", "options", "said"),
    [
        ("my_app.trainer", {}, "module:attribute"),
        ("a:app", {"idle_s": 0.0}, "idle_s = 0"),
        ("a:app", {"idle_s": float("inf")}, "idle_s = inf"),
        ("a:app", {"memory_bytes": 0}, "memory_bytes = 0"),
        ("os:path", {}, "expected a ClientApp"),
        ("os:pathh", {}, "expected a ClientApp"),
    ],
)
def test_what_cannot_be_a_trainer_is_refused(app, options, said):
    with pytest.raises(ConfigError, match=said):
        resident(app, **options)


def test_an_app_that_names_itself_is_refused(given):
    app = given(None)
    sys.modules[app._app.partition(":")[0]].app = app
    with pytest.raises(ConfigError, match="does not import"):
        room._loaded(app._app)


def test_elsewhere_than_on_a_node_it_is_the_app_itself(given, monkeypatch):
    reference = given(notes)._app
    monkeypatch.setattr(sys, "argv", ["/bin/fedstale", "simulate"])
    assert resident(reference) is notes


def test_a_simulation_has_no_trainer_and_the_same_result(tmp_path, home, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/fedstale", "simulate"])
    plain = write_small_app(tmp_path / "plain")
    own = write_small_app(
        tmp_path / "own",
        client="from fedstale.contrib.sites import resident\n"
        'app = resident("small_app_under_test.trainer:app")\n',
    )
    (own / "small_app_under_test" / "trainer.py").write_text(CLIENT)
    read = []
    for app in (plain, own):
        out = tmp_path / f"run-{app.name}"
        simulate(app, traces=TraceSet.ideal(4), out=out, executor="inline", progress=False)
        read.append([(out / f).read_bytes() for f in ("metrics.parquet", "model.safetensors")])
    assert read[0] == read[1]
    assert not home.exists()
