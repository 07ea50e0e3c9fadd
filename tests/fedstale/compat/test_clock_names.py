"""Each public name of Python's clocks and waits, in five ways of use, in ServerApp and client."""

import datetime
import time
from time import perf_counter
from time import time as wall_time
from types import ModuleType

import clock_names
import pandas as pd
import pytest
from clock_names import ways
from clock_names.names import OTHERS, READS, WAITS
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from tiny import COSTS, fleet, message_to

from fedstale.simulation import TraceGrid

ORIGINALS = {name: dict(vars(module)) for name, module in clock_names.TOP.items()}
START = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC).timestamp()
PUBLIC = [
    (module, name)
    for module, names in ORIGINALS.items()
    for name, value in names.items()
    if not name.startswith("_") and not isinstance(value, ModuleType)
]
THERE = {*PUBLIC}
READ = [key for key in READS if key in THERE]
WAIT = [key for key in WAITS if key in THERE]


def test_each_public_name_is_classified():
    known = {*READS, *WAITS, *((m, name) for m, names in OTHERS.items() for name in names.split())}
    assert {*PUBLIC} <= known
    assert len(known) == len(READS) + len(WAITS) + sum(len(n.split()) for n in OTHERS.values())


def look(now, asked_s):
    """Look at all names in all ways; return what was read, waited and not the original."""
    read, waited, others = {}, {}, []
    for module, name in PUBLIC:
        original = ORIGINALS[module][name]
        for way, value in ways(module, name):
            key = module, name, way
            if (module, name) in READS:
                kind, tell = READS[module, name]
                read[key] = kind, tell(value), now()
            if (module, name) in WAITS and not (way == "generic" and module == "asyncio"):
                before, wall = now(), perf_counter()
                WAITS[module, name](value, asked_s)
                waited[key] = now() - before, perf_counter() - wall
            if isinstance(original, type):
                is_same = value is original if way in ("at the top", "inside", "from") else True
                made = value.__origin__ if way == "generic" else value
                if not (is_same and issubclass(made, original)):
                    others.append(key)
            elif (module, name) not in READS and (module, name) not in WAITS:
                others += [] if value == original else [key]
    return read, waited, others


def pandas_reads(now):
    """Read the clock of pandas in the ways that it has."""
    found = {
        "Timestamp.now": pd.Timestamp.now("UTC"),
        "Timestamp.today": pd.Timestamp.today("UTC"),
        "Timestamp.now, local": pd.Timestamp.now().tz_localize(LOCAL),
        "Timestamp('now')": pd.Timestamp("now", tz="UTC"),
        "Timestamp('today')": pd.Timestamp("today", tz="UTC"),
        "to_datetime": pd.to_datetime("now", utc=True),
        "to_datetime of many": pd.to_datetime(["now"], utc=True)[0],
        "Period.now": pd.Period.now("s").to_timestamp().tz_localize(LOCAL),
    }
    return {name: (at.timestamp(), now()) for name, at in found.items()}


LOCAL = datetime.datetime.now().astimezone().tzinfo


@pytest.fixture(scope="module")
def looks():
    """Run an app once that looks at all names; return the looks of server, client and pandas."""
    app, found = ClientApp(), {}

    @app.train()
    def train(message, context):
        found["client"] = look(wall_time, 0.002)
        found["pandas client"] = pandas_reads(wall_time)
        return Message(RecordDict(), reply_to=message)

    def main(grid, context):
        time.sleep(3600.0)
        found["server"] = look(grid.now, 5.0)
        found["pandas server"] = pandas_reads(grid.now)
        found["replies"] = list(grid.send_and_receive([message_to(1000)]))

    grid = TraceGrid(fleet([[(0.0, 1e6)]], length=1e6), app, costs=COSTS)
    with grid.running("clock_names"):
        main(grid, Context(1, 1, {}, RecordDict(), {}))
    assert found["replies"][0].has_content(), found["replies"][0].error
    found["after"] = look(wall_time, 0.0)
    return found


def test_a_server_reads_the_virtual_clock_by_each_name_in_each_way(looks):
    read, _, _ = looks["server"]
    assert {(m, name) for m, name, _ in read} == {*READ}
    wrong = {}
    for key, (kind, value, now) in read.items():
        unix = START + now
        right = {"unix": unix, "steady": now}.get(kind)
        if kind == "day":
            right = datetime.datetime.fromtimestamp(unix).toordinal()
        if abs(value - right) > 1.0:
            wrong[key] = value, right
    assert not wrong


def test_a_server_waits_on_the_virtual_clock_by_each_name_in_each_way(looks):
    _, waited, _ = looks["server"]
    assert {(m, name) for m, name, _ in waited} == {*WAIT}
    assert not {k: took for k, took in waited.items() if abs(took[0] - 5.0) > 1e-6 or took[1] > 1.0}


def test_a_client_reads_and_waits_on_the_wall(looks):
    read, waited, _ = looks["client"]
    for key, (kind, value, now) in read.items():
        if kind == "unix":
            assert value == pytest.approx(now, abs=5.0), key
    assert not [key for key, (_, wall_s) in waited.items() if not 0.002 <= wall_s < 1.0]


@pytest.mark.parametrize("who", ["server", "client", "after"])
def test_each_type_is_the_one_that_it_is(looks, who):
    assert looks[who][2] == []


def test_nothing_is_left_in_the_place_of_a_name(looks):
    assert looks
    left = [
        (module, name)
        for module, name in PUBLIC
        if any(value != ORIGINALS[module][name] for _, value in list(ways(module, name))[:3])
    ]
    assert not left


def test_the_clock_of_pandas_is_that_of_who_asks(looks):
    for where, base in (("server", START), ("client", 0.0)):
        for name, (at, now) in looks[f"pandas {where}"].items():
            assert at == pytest.approx(base + now, abs=2.0), (where, name)
