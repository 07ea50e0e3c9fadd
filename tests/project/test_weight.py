"""The core and a job's way through it may only become lighter: weight.toml holds their figures.

A commit that lowers one lowers it there. A figure rises only where what it buys is worth it to
every reader of the code, and then the commit says so.
"""

import sys
import tomllib
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch  # noqa: F401 - its streams are a client's too, once it is there
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedstale
from fedstale.client import ForecastMod
from fedstale.strategies import FedBuff
from fedstale.strategies.stages import ForecastRequest
from fedstale.traces import TraceSet

ROOT = Path(fedstale.__file__).resolve().parents[1]
ROOMS = ("fedstale", "traces", "strategies", "agents")
WEIGHT = tomllib.loads(Path(__file__).with_name("weight.toml").read_text(encoding="utf-8"))


def product():
    """Return the text of each file of the product, by its path in the repository."""
    return {
        path.relative_to(ROOT): path.read_text(encoding="utf-8")
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        if path.resolve() == path
    }


def at_most(figures, limits):
    risen = {name: (n, limits[name]) for name, n in figures.items() if n > limits[name]}
    assert not risen, f"figure, and what weight.toml lets it be: {risen}"


def test_core_and_shelf_have_no_more_lines_and_files():
    texts = product()
    shelf = {path for path in texts if path.parts[:2] == ("fedstale", "contrib")}
    lines = {path: text.count("\n") for path, text in texts.items()}
    core = [path for path in texts if path not in shelf]
    at_most(
        {
            "core_lines": sum(lines[path] for path in core),
            "core_files": len(core),
            "shelf_lines": sum(lines[path] for path in shelf),
            "longest_file": max(lines[path] for path in core),
        },
        WEIGHT["core"],
    )
    # In no import, also not in a function, and in no text that may be imported later.
    assert not [path for path in core if "fedstale.contrib" in texts[path]]


def walk(folder, app, n, until, **options):
    """Return the calls of product code from one message to the next, in steady state."""
    calls, marks, root = [], [], f"{ROOT}/"

    @app.train()
    def train(message, context):
        metrics = MetricRecord({"num-examples": 10, "train_loss": 1.0})
        content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
        return Message(content, reply_to=message)

    files = defaultdict(lambda: None)

    def watch(frame, event, arg):
        code = frame.f_code
        if event != "call" or code.co_filename.startswith("<"):
            return
        if code.co_filename not in files:
            path = str(Path(code.co_filename).resolve())
            own = path.startswith(root) and path.removeprefix(root).split("/")[0] in ROOMS
            files[code.co_filename] = path.removeprefix(root) if own else None
        if file := files[code.co_filename]:
            if code.co_qualname.endswith("TraceGrid.push_messages"):
                marks.append(len(calls))
            calls.append((file, code.co_qualname))

    traces = TraceSet.constant(n, compute=1.0, downlink_bit_per_s=8e6, uplink_bit_per_s=8e6)
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        fedstale.simulate(
            app,
            traces=traces,
            strategy=FedBuff(1, 1, **options),
            initial_arrays={"w": np.zeros(3)},
            until=until,
            work_per_example=1.0,
            epochs=1,
            examples=10,
            out=folder / "run",
            executor="inline",
        )
    finally:
        sys.setprofile(before)
    return calls, marks


def figures(way):
    functions = set(way)
    return {
        "calls": len(way),
        "functions": len(functions),
        "classes": len(
            {
                (file, name.split(".")[0])
                for file, name in functions
                if "." in name and name.lstrip("_")[:1].isupper()
            }
        ),
        "files": len({file for file, _ in way}),
        "changes_of_file": sum(a[0] != b[0] for a, b in pairwise(way)),
    }


def test_the_way_of_a_plain_job_is_no_longer(tmp_path):
    calls, marks = walk(tmp_path, ClientApp(), 1, "12 rounds")
    at_most(figures(calls[marks[-4] : marks[-3]]), WEIGHT["plain_job"])


def test_the_way_of_a_job_with_forecasts_and_an_agent_is_no_longer(tmp_path):
    from fedstale.agents import AgentSelector

    app = ForecastMod().client_app()
    options = {"selector": AgentSelector(), "stages": [ForecastRequest()]}
    calls, marks = walk(tmp_path, app, 8, "12 rounds", **options)
    at_most(figures(calls[marks[-6] : marks[-4]]), WEIGHT["job_with_forecasts"])
