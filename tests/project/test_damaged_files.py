"""Whatever a file holds, its reader returns a value or raises one error of fedstale's own.

Each reader gets a whole file or folder, which hypothesis cuts, flips, empties and fills with what
parsers choke on. Checkpoints bit by bit, the journal of the recorder, and records in replies have
tests of their own beside their readers.
"""

import gzip
import io
import json
import lzma
import pickle
import resource
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from clothes import write_clothes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packed_updates import packed
from places import APPS

from fedstale.agents.policy import scorer as agent_files
from fedstale.agents.policy.scorer import initial
from fedstale.app_folder import BUILT_IN
from fedstale.comparison.analysis import finished, measured
from fedstale.comparison.plan import Plan
from fedstale.config import SimulationConfig, read_toml
from fedstale.errors import FedstaleError
from fedstale.reports.run import Run
from fedstale.runs import RunFolder, ledger
from fedstale.simulation.flower_app import FlowerApp
from fedstale.simulation.jobs import COLUMNS, table
from fedstale.strategies.server.checkpoint import read_checkpoint
from fedstale.traces import TraceSet, forecast
from fedstale.traces.synthetic import population

SLOWEST_S = 5.0
MOST_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True)
class Reader:
    """How to make what is read, below an empty folder, and how to read it."""

    make: Callable[[Path], None]
    read: Callable[[Path], object]


def constant(n=3):
    return TraceSet.constant(n, compute=1.0, downlink_bit_per_s=1e6, uplink_bit_per_s=1e6)


def write_run(folder, status="finished"):
    events = table({name: [] for name in COLUMNS}, pd.Index(["a"]))
    with RunFolder.create(folder / "run") as run:
        run.write_config(SimulationConfig(app="digits", traces="synthetic:3", until="2d"))
        run.write_events(events)
        run.write_metrics([(1.0, 1, "server", "accuracy", 0.5)])
        summary = {"status": status, "reason": "", "app": "digits", "devices": 1, "seed": 0}
        run.write_summary(summary | {"virtual_s": 1.0, "rounds": 1, **ledger(events)})


def read_run(folder):
    record = Run(folder / "run")
    return record.end_s, record.jobs["busy_s"], record.jobs["moved_bytes"], record.jobs["outcome"]


def read_measured(folder):
    run = finished(folder / "run")
    return run.seed, run.limit_s, measured([run], {"accuracy": "server"})


@cache
def clothes_reader():
    app = FlowerApp.find(APPS["fashion"])
    with app.importable():
        app.load_client()
        return import_module("fashion_app.idx")


def read_plan(path):
    plan = Plan.from_table(read_toml(path), where=str(path))
    return [plan.config(variant, 1) for variant in plan.variants]


def write_forecaster(folder):
    for file in (Path(forecast.__file__).parent / "embedded" / "any").glob("forecaster.*"):
        if file.suffix in {".toml", ".safetensors"}:
            shutil.copy(file, folder)


def write_agent(folder):
    weights = initial(np.random.default_rng(0))
    agent_files.save(agent_files.Agent(weights=weights, provenance={}), folder)


def write_zip(folder):
    with zipfile.ZipFile(folder / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("20110303/host", "5\n" * 288)


def write_tar(folder):
    data = ("5\n" * 288).encode()
    with tarfile.open(folder / "x.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("20110303/host")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def data(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def source(kind, name, content):
    return Reader(data(name, content), lambda folder: TraceSet.read(folder / name, kind))


DAYS = {
    name: {"isSuccess": True, "trace_start": 5e4, "trace_end": 5e4 + 86400 * n, "ready_time": ready}
    for n, (name, ready) in enumerate(
        {"a": [[6e4, 7e4]], "b": [[9e4, 1e5], [5e4, 51e3]]}.items(), 1
    )
}
EVENTS = "".join(
    f"{machine},{state},2016-01-{day} 1{hour}:00:00.000\n"
    for day in (28, 29)
    for hour, state in enumerate(("available", "in-use", "offline", "restarted"))
    for machine in ("D1", "D2")
)
SESSIONS = "user_id;plugin_time;plugout_time\n" + "".join(
    f"{user};2020-01-{day:02} 20:00:00;2020-01-{day + 1:02} 06:00:00\n"
    for user in "ab"
    for day in range(1, 20, 3)
)
PHONES = [{"Model": f"phone {i}", "CPU_F_AI_Score": str(5 + i)} for i in range(5)]
SLEEPERS = {i: {"active": [1, 50], "inactive": [20, 70], "finish_time": 90} for i in range(4)}
CLIENTS = {i: {"computation": 1.0 + i, "communication": 2.0} for i in range(4)}
LOG = "Timestamp,DL_bitrate,UL_bitrate\n" + "".join(
    f"2020.02.13_10.00.{i:02},{8 + i},1\n" for i in range(30)
)
CONFIG = """app = "digits"
traces = "synthetic:30"
devices = 3
seed = 1
until = "2d"
checkpoint_every = 2
workers = 1
[run_config]
num-server-rounds = 3
[costs]
examples = 10
"""
PLAN = """app = "digits"
traces = "synthetic:30"
seeds = [1, 2]
target = "accuracy 0.9"
reference = "fedavg"
[variants.fedavg]
[variants.gap.run-config]
strategy = "GapAware(10, 5)"
[variants.gap.costs]
examples = 10
"""
APP = (BUILT_IN / "digits" / "pyproject.toml").read_text()
EMBEDDED = Path(population.__file__).with_name("synthetic.toml").read_text("utf-8")


def resume(run):
    """Go on with a run as the command does."""
    RunFolder.resume(run, SimulationConfig.read(run / "config.toml")).__exit__(None, None, None)


READERS = {
    "traces": Reader(
        lambda folder: constant().write(folder / "t.parquet"),
        lambda folder: TraceSet.read(folder / "t.parquet"),
    ),
    "flash": source("flash", "x", json.dumps({"a": [[1, 2], [5, 9]], "b": [[3, 4]]}).encode()),
    "flash, gzipped": source("flash", "x", gzip.compress(json.dumps({"a": [[1, 2]]}).encode())),
    "flash over days": source("flash_days", "x", json.dumps(DAYS).encode()),
    "desktops": source("library_desktops", "FullLogonData-000.csv", EVENTS.encode()),
    "desktops, xz": source(
        "library_desktops", "FullLogonData-000.csv.xz", lzma.compress(EVENTS.encode())
    ),
    "cars": source("car_charging", "x", SESSIONS.encode()),
    "aibenchmark": source("aibenchmark", "x", json.dumps(PHONES).encode()),
    "gnettrack": source("gnettrack", "x.csv", LOG.encode()),
    "mahimahi": source("mahimahi", "x.up", b"1\n5\n9\n1000\n2000\n"),
    "fedscale behaviour": source("fedscale_behaviour", "x", pickle.dumps(SLEEPERS)),
    "fedscale capacity": source("fedscale_capacity", "x", pickle.dumps(CLIENTS)),
    "planetlab, zip": Reader(write_zip, lambda f: TraceSet.read(f / "x.zip", "planetlab")),
    "planetlab, tar": Reader(write_tar, lambda f: TraceSet.read(f / "x.tar.gz", "planetlab")),
    "any source": Reader(data("x", pickle.dumps(CLIENTS)), lambda f: TraceSet.read(f / "x")),
    "clothes": Reader(
        lambda folder: write_clothes(folder, 20, 10),
        lambda folder: clothes_reader().read_folder(str(folder)),
    ),
    "clothes, gzipped": Reader(
        lambda folder: write_clothes(folder, 20, 10, packed=True),
        lambda folder: clothes_reader().read_folder(str(folder)),
    ),
    "population": Reader(text("p.toml", EMBEDDED), lambda f: population.load(f / "p.toml")),
    "forecaster": Reader(write_forecaster, forecast.Forecaster.load),
    "agent": Reader(write_agent, agent_files.load),
    "checkpoints": Reader(
        data("000000001.checkpoint", packed({"w": np.arange(9.0), "n": 1})), read_checkpoint
    ),
    "run": Reader(write_run, read_run),
    "run, measured": Reader(write_run, read_measured),
    "run, to resume": Reader(
        lambda folder: write_run(folder, "interrupted"),
        lambda folder: resume(folder / "run"),
    ),
    "config": Reader(text("c.toml", CONFIG), lambda f: SimulationConfig.read(f / "c.toml")),
    "plan": Reader(text("p.toml", PLAN), lambda f: read_plan(f / "p.toml")),
    "app": Reader(text("pyproject.toml", APP), lambda f: FlowerApp.find(f).run_config({"seed": 1})),
}

NASTY = [
    *(b"[", b"]", b"{", b"}", b'"', b"'", b"=", b"\n", b"\x00", b"\xff\xfe", b"\\ud800", b"-1"),
    *(b"nan", b"inf", b"1e999", b"0.5", b"true", b"null", b"[]", b"{}", b'""', b"9" * 40),
    *(b"1979-05-27", b"../../x", b"/etc/passwd", b"[" * 60, b"\x93NUMPY", b"PAR1", b"\x80\x04."),
]


@st.composite
def damages(draw):
    """Return a function from the bytes of a file to other bytes."""
    share = st.floats(0, 1, exclude_max=True)
    how = draw(st.sampled_from(["cut", "flip", "put", "replace", "value", "drop", "repeat"]))
    where, to = draw(share), draw(share)
    what, bit = draw(st.sampled_from(NASTY)), draw(st.integers(0, 7))

    def damaged(whole: bytes) -> bytes:
        start = int(where * len(whole))
        end = min(len(whole), start + 1 + int(to * 24))
        at = whole[start : start + 1]
        # From the next sign that a value follows, to the end of the line.
        signs = [whole.find(sign, start) for sign in (b"= ", b": ", b",")]
        begin = min((sign + 1 for sign in signs if sign >= 0), default=start)
        stop = whole.find(b"\n", begin)
        results = {
            "cut": whole[:start],
            "flip": whole[:start] + bytes(b ^ 1 << bit for b in at) + whole[start + 1 :],
            "put": whole[:start] + what + whole[start:],
            "replace": whole[:start] + what + whole[end:],
            "value": whole[:begin] + b" " + what + (whole[stop:] if stop >= 0 else b""),
            "drop": whole[:start] + whole[end:],
            "repeat": whole[:start] + whole[start:end] * 3 + whole[end:],
        }
        return results[how]

    return damaged


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function that returns the folder of a reader, made once."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("whole")
            READERS[name].make(made[name])
        return made[name]

    return of


def check(name, folder, which, damage):
    """Damage one file of a copy of a folder, and see what its reader says."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "copy"
        shutil.copytree(folder, copy)
        there = sorted(file for file in copy.rglob("*") if file.is_file())
        file = there[which % len(there)]
        file.write_bytes(damage(file.read_bytes()))
        with suppress(FedstaleError):
            READERS[name].read(copy)


def property_of(name, whole, n_examples):
    @settings(
        max_examples=n_examples,
        deadline=SLOWEST_S * 1000,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 9), st.lists(damages(), min_size=1, max_size=3))
    def holds(which, several):
        def damage(content):
            for one in several:
                content = one(content)
            return content

        check(name, whole(name), which, damage)

    return holds


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("name", READERS)
def test_a_whole_file_is_read(name, whole):
    READERS[name].read(whole(name))


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_a_value_or_one_error(name, whole):
    property_of(name, whole, 15)()


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_ten_thousand_damaged_files_are_values_or_errors(name, whole):
    before = peak_bytes()
    property_of(name, whole, 10_000)()
    assert peak_bytes() - before < MOST_MEMORY_BYTES


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 1000,
        b"a = " + b"[" * 100_000,
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\x80\x04" + b"]" * 100_000 + b".",
        b"\xff\xff\xff\xff\xff\xff\xff\x7f{}",
        b"\x10\x27\x00\x00\x00\x00\x00\x00" + b'{"a":' * 2000,
        b"x = " + b"9" * 5000,
        b"9" * 5000,
        b"x" * 1_000_000,
    ],
    ids=lambda content: repr(content[:8]),
)
@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_something_else_is_a_value_or_one_error(name, content, whole):
    folder = whole(name)
    for which, _ in enumerate(sorted(f for f in folder.rglob("*") if f.is_file())):
        check(name, folder, which, lambda _: content)
