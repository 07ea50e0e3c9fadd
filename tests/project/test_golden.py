"""What small runs computed when they were recorded, and must go on to compute.

golden.toml holds the settings of each run and what came of it: how many of its jobs ended in which
way, and digests of its events, its metrics and its model. Everything counts that a run computes;
names of columns, columns that came later and the wording of reasons do not (see `digest` and
`outcome`).

A change of a digest must be meant, and be explained in its commit. It is recorded by

    python tests/project/test_golden.py            # all runs; or the names of some

which keeps the settings in golden.toml and rewrites the rest. To add a run, write its settings
there first.

The executor `batched` writes no checkpoints here: to write one changes which jobs are trained
together afterwards, hence the last bits of sums, and how often they are written depends on the
wall clock.

Digests hold for the versions in constraints.txt. Random streams are seeded and torch runs on one
thread, but kernels of NumPy, BLAS and torch differ in the last bit between kinds of CPU, also
between two with AVX512. Runs of which that was seen say `rounds = true`; where this CPU rounds
otherwise than the one of `recorded_on` (`rounding`) they are skipped. To have them there too,
record them on the commit before the change.
"""

import hashlib
import logging
import os
import re
import sys
import tempfile
import tomllib
from collections import Counter
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from math import inf
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import pytest
import tomli_w
from safetensors.numpy import load_file

from fedstale import strategies
from fedstale.config import SimulationConfig
from fedstale.simulation.run import simulate
from fedstale.strategies.server.runtime import Callback
from fedstale.traces import Availability, Series, TraceSet

GOLDEN = Path(__file__).with_name("golden.toml")
RECORDED = tomllib.loads(GOLDEN.read_text(encoding="utf-8"))
RUNS = RECORDED["runs"]
RESUMED = [name for name, settings in RUNS.items() if "same_as" in settings]
HEADER = """\
# Small runs whose results must not change. Settings are written by hand; what follows `outcome` is
# written by tests/project/test_golden.py, which also says how, and what to do where it differs.
# A run with `same_as` has the settings of another one, is killed after a version, and is resumed.
"""

STATUS = {
    "reported": "reported",
    "rejected": "refused",
    "client-error": "client-error",
    "unclaimed": "unclaimed",
    "late": "late",
    "expired": "expired",
    "interrupted": "interrupted",
    "stalled": "stalled",
    "in-flight": "flying",
}
"""What a digest takes for a status: where one is renamed, only the key here changes."""
FREE_TEXT = ("reason",)
"""Columns of events that no digest holds, since their wording may improve."""
LATER = ("reported_duration_s", "work_share", "format_down", "format_up")
"""Columns of events that came after the digests, which show that nothing else has changed since."""

PYPROJECT = """
[project]
name = "golden"
version = "1.0.0"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "golden_app.{server}:app"
clientapp = "golden_app.{client}:app"

[tool.flwr.app.config]
strategy = "FedAvg()"
rounds = 10
timeout = 300.0
evaluate-on-server = true
local-epochs = 2
nan-every = 0      # a client sends NaN in each such turn; 0 never does
raise-every = 0    # and fails in each such turn
forecasts = false

[tool.fedstale]
work-per-example = 1.0
evaluate-work-per-example = 0.25
epochs = "local-epochs"
examples = 15
"""

# Sums are those of NumPy and not of BLAS, whose last bits depend on the CPU.
TASK = """
import numpy as np

TRUTH = np.array([1.0, -2.0, 0.5, 3.0, -0.25])


def data(partition):
    rng = np.random.default_rng(partition)
    x = rng.random((4 + partition * 7 % 23, 5)) - 0.5
    return x, (x * TRUTH).sum(1) + 0.1 * (partition % 4) + 0.2 * rng.random(len(x))


def losses(w, b, x, y):
    return ((x * w).sum(1) + b - y) ** 2


def trained(w, b, x, y, epochs, mu=0.0):
    start = w
    for _ in range(epochs):
        for i in np.random.permutation(len(x)):
            error = (x[i] * w).sum() + b - y[i]
            w, b = w - 0.1 * (error * x[i] + mu * (w - start)), b - 0.1 * error
    return w, b


def tested(w, b):
    x, y = data(1000)
    return float(losses(w, b, x, y).mean())
"""

CLIENT = """
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from golden_app import task

from fedstale.client import ForecastMod

app = ForecastMod(enabled_by="forecasts").client_app()


@app.train()
def train(message, context):
    config, partition = context.run_config, context.node_config["partition-id"]
    jobs = context.state.config_records.get("seen", {"jobs": 0})["jobs"] + 1
    context.state["seen"] = ConfigRecord({"jobs": jobs})
    turn = partition + jobs
    if config["raise-every"] and turn % config["raise-every"] == 0:
        raise RuntimeError("now and then")
    x, y = task.data(partition)
    w, b, steps = message.content["arrays"].to_numpy_ndarrays()
    mu = message.content["config"].get("proximal-mu", 0.0)
    w, b = task.trained(w.astype(float), b, x, y, config["local-epochs"], mu)
    if config["nan-every"] and turn % config["nan-every"] == 0:
        w = w * np.nan
    losses = task.losses(w, b, x, y)
    arrays = [w.astype(np.float32), b, steps + len(x) * config["local-epochs"]]
    metrics = MetricRecord(
        {
            "train_loss": float(losses.mean()),
            "square_loss": float((losses**2).mean()),
            "num-examples": len(x),
        }
    )
    names = ["w", "b", "steps"]
    record = ArrayRecord.from_numpy_ndarrays(arrays)
    record = ArrayRecord(dict(zip(names, record.values())))
    return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    x, y = task.data(context.node_config["partition-id"])
    w, b, _ = message.content["arrays"].to_numpy_ndarrays()
    metrics = MetricRecord(
        {"eval_loss": float(task.losses(w, b, x, y).mean()), "num-examples": len(x)}
    )
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
"""

SERVER = """
import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp import strategy as flower
from golden_app import task

from fedstale import agents, strategies

app = ServerApp()


def evaluate(version, arrays):
    w, b, _ = arrays.to_numpy_ndarrays()
    return MetricRecord({"loss": task.tested(w, b)})


@app.main()
def main(grid, context):
    config = context.run_config
    names = {**vars(agents), **vars(strategies), "flower": flower}
    model = {"w": np.zeros(5, np.float32), "b": np.zeros(1), "steps": np.zeros(1, np.int64)}
    eval(config["strategy"], names).start(
        grid=grid,
        initial_arrays=ArrayRecord({name: Array(array) for name, array in model.items()}),
        num_rounds=config["rounds"],
        timeout=config["timeout"],
        evaluate_fn=evaluate if config["evaluate-on-server"] else None,
    )
"""

OLD_CLIENT = """
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from golden_app import task


class Line(NumPyClient):
    def __init__(self, partition, epochs):
        self.epochs, (self.x, self.y) = epochs, task.data(partition)

    def fit(self, parameters, config):
        arrays = task.trained(*parameters, self.x, self.y, self.epochs)
        return list(arrays), len(self.x), {"loss": self.loss(arrays)}

    def evaluate(self, parameters, config):
        return self.loss(parameters), len(self.x), {"round": config["round"]}

    def loss(self, arrays):
        return float(task.losses(*arrays, self.x, self.y).mean())


def client_fn(context):
    partition = context.node_config["partition-id"]
    return Line(partition, context.run_config["local-epochs"]).to_client()


app = ClientApp(client_fn=client_fn)
"""

OLD_SERVER = """
import numpy as np
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server import strategy as strategies
from flwr.serverapp import ServerApp
from golden_app import task


def mean(metrics):
    total = sum(n for n, _ in metrics)
    return {key: sum(n * m[key] for n, m in metrics) / total for key in metrics[0][1]}


def server_fn(context):
    config = context.run_config
    shared = {
        "initial_parameters": ndarrays_to_parameters([np.zeros(5), np.zeros(1)]),
        "evaluate_fn": lambda server_round, arrays, config: (task.tested(*arrays), {}),
        "on_evaluate_config_fn": lambda server_round: {"round": server_round},
        "fit_metrics_aggregation_fn": mean,
        "evaluate_metrics_aggregation_fn": mean,
    }
    strategy = eval(config["strategy"], {**vars(strategies), "shared": shared})
    settings = ServerConfig(num_rounds=config["rounds"], round_timeout=config["timeout"])
    return ServerAppComponents(strategy=strategy, config=settings)


app = ServerApp(server_fn=server_fn)
"""

APPS = {
    "line": {"server": "server", "client": "client"},
    "line-server-fn": {"server": "old_server", "client": "old_client"},
}
"""Apps of this file, by their names in golden.toml; others are built in."""


class PowerCut(Callback):
    """Ends the process after a version."""

    def __init__(self, version):
        self.version, self.rounds = version, 0

    def metrics(self, run, version, source, values):
        if source == "train":
            self.rounds = max(self.rounds, version)

    def time_moved(self, run):
        if self.rounds >= self.version:
            raise PowerCutError


class PowerCutError(BaseException):
    """Nothing of a run goes on after this."""


def run(settings, folder):
    """Run what a table of golden.toml describes; return the folder of the run."""
    settings = dict(RUNS[settings["same_as"]] if "same_as" in settings else settings) | settings
    out, traces, kill_at = folder / "run", settings["traces"], settings.get("killed_after_version")
    config = SimulationConfig(
        app=app_of(settings["app"], folder / "app"),
        traces=traces,
        run_config=settings["run_config"],
        costs=settings.get("costs", {}),
        **{
            key: settings[key]
            for key in (
                *("on_interrupt", "executor", "workers", "seed", "until"),
                "checkpoint_every",
            )
            if key in settings
        },
    )
    if kill_at is None:
        result = simulate(config, out, traces=traces_of(traces))
    else:
        # Otherwise the last checkpoint depends on how long each one took.
        with (
            patch("fedstale.simulation.run._LARGEST_SHARE", inf),
            suppress(PowerCutError),
        ):
            simulate(config, out, traces=traces_of(traces), callbacks=[PowerCut(kill_at)])
        assert max(int(p.stem) for p in (out / "checkpoints").glob("*.checkpoint")) == kill_at
        assert not (out / "summary.json").exists()
        result = simulate(
            SimulationConfig.read(out / "config.toml"), out, traces=traces_of(traces), resume=True
        )
    assert result.status != "failed", result.reason
    return out


def app_of(name, folder):
    """Return what `SimulationConfig` calls an app, written into a folder if it is one of ours."""
    if name not in APPS:
        return name
    package = folder / "golden_app"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT.format(**APPS[name]))
    sources = {"task": TASK, "client": CLIENT, "server": SERVER, "__init__": ""}
    for module, source in {**sources, "old_client": OLD_CLIENT, "old_server": OLD_SERVER}.items():
        (package / f"{module}.py").write_text(source)
    return str(folder)


@cache
def traces_of(spec):
    """Return `synthetic:N`, or `patchy:N`: devices that come and go every few minutes.

    Patchy devices differ in everything, by arithmetic without rounding; the last one computes
    nothing at all.
    """
    if not spec.startswith("patchy:"):
        return TraceSet.load(spec, seed=0)
    n = int(spec.removeprefix("patchy:"))
    windows = []
    for i in range(n):
        start, own = float(40 * i % 300), []
        while start < 3300.0:
            end = min(start + 90.0 + 45.0 * (37 * i % 11), 3590.0)
            own.append((start, end))
            start = end + 30.0 + 40.0 * (53 * i % 7)
        windows.append(own)
    windows[-1] = [(0.0, 3600.0)]
    speed = np.array([0.25 + (29 * i % 13) / 4 for i in range(n)])
    speed[-1] = 0.0
    return TraceSet(
        device_ids=TraceSet.ideal(n).device_ids,
        availability=Availability.of(windows, 3600.0),
        compute=Series.constant(speed),
        downlink=Series.constant(np.array([1e6 * (1 + i % 8) for i in range(n)])),
        uplink=Series.constant(np.array([5e5 * (1 + i % 4) for i in range(n)])),
    )


def digest(columns):
    """Return a sha256 of values: of what they are, their order and their number, and of no names.

    Each column is hashed with its length and its kind: numbers as little-endian bytes of their
    type (a column of events is float64 or int64), every NaN as the same one; text as UTF-8, each
    word followed by a zero byte.
    """
    sha = hashlib.sha256()
    for column in columns:
        values = np.asarray(column)
        if values.dtype.kind in "iuf":
            if values.dtype.kind == "f":
                values = np.where(np.isnan(values), values.dtype.type(np.nan), values)
            values = values.astype(values.dtype.newbyteorder("<"))
            kind, data = values.dtype.str, values.tobytes()
        else:
            kind, data = "text", "".join(f"{word}\0" for word in values.tolist()).encode()
        sha.update(f"{kind} {values.shape}\n".encode() + data)
    return sha.hexdigest()


def outcome(folder):
    """Return what golden.toml keeps of a run: its jobs by status, and its digests.

    Events are hashed in the order of their columns, statuses in the words of `STATUS`, and
    `FREE_TEXT` and `LATER` left out; metrics likewise; a model as the names of its arrays and their
    values, in the order of the names.
    """
    events = {
        name: column.to_numpy()
        for name, column in zip(*columns_of(folder / "events.parquet"), strict=True)
        if name not in (*FREE_TEXT, *LATER)
    }
    events["status"] = [STATUS[word] for word in events["status"]]
    model = dict(sorted(load_file(folder / "model.safetensors").items()))
    return {
        "jobs": dict(sorted(Counter(events["status"]).items())),
        "events": digest(events.values()),
        "metrics": digest(c.to_numpy() for c in columns_of(folder / "metrics.parquet")[1]),
        "model": digest([list(model), *model.values()]),
    }


def columns_of(path):
    """Return the names and the columns of a table."""
    table = pq.read_table(path)
    assert not any(column.null_count for column in table.columns)
    return table.column_names, table.columns


def platform():
    """Return what digests depend on besides the settings."""
    import torch

    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        **{name: version(name) for name in ("flwr", "numpy", "torch")},
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "rounding": rounding(),
    }


@cache
def rounding():
    """Return a digest of how this CPU rounds: of steps of a network in torch, and of NumPy's."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = np.sin(np.arange(32 * 64, dtype=np.float32)).reshape(32, 64)
    x, wanted = torch.from_numpy(made), torch.arange(32) % 10
    weights = [
        torch.cos(torch.arange(m * n, dtype=torch.float32)).reshape(m, n).requires_grad_()
        for m, n in ((64, 32), (32, 10))
    ]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    for batch in (4, 10, 32, 20, 7):
        optimizer.zero_grad()
        scores = torch.relu(x[:batch] @ weights[0]) @ weights[1]
        torch.nn.functional.cross_entropy(scores, wanted[:batch]).backward()
        optimizer.step()
    torch.set_num_threads(threads)
    ours = np.exp(made @ made.T) + np.tanh(made.astype(np.float64) @ made.T)
    return digest([*(w.detach().numpy() for w in weights), ours])


@pytest.mark.parametrize("name", RUNS)
def test_a_run_computes_what_it_did_when_it_was_recorded(name, tmp_path):
    if RUNS[name].get("rounds") and rounding() != RECORDED["recorded_on"]["rounding"]:
        pytest.skip("its digests are of a CPU that rounds otherwise: see the head of this file")
    found = outcome(run(RUNS[name], tmp_path))
    assert found == RUNS[name]["outcome"], (
        f"recorded on {RECORDED['recorded_on']}, and this is {platform()}"
    )


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_recorded_as_the_one_that_was_never_killed(name):
    assert RUNS[name]["outcome"] == RUNS[RUNS[name]["same_as"]]["outcome"]


def test_every_published_strategy_is_in_some_run():
    published = {
        name
        for name, value in vars(strategies).items()
        if isinstance(value, type)
        and issubclass(value, strategies.StaleStrategy)
        and value is not strategies.StaleStrategy
    }
    words = str([settings.get("run_config") for settings in RUNS.values()])
    assert len(published) == 17
    in_digits = {"DirectionAware": "direction-aware"}
    missing = {n for n in published if not re.search(rf"\b{in_digits.get(n, n)}\b", words)}
    assert not missing


def test_jobs_end_in_every_way_in_some_run():
    ended = {status for settings in RUNS.values() for status in settings["outcome"]["jobs"]}
    assert ended == set(STATUS.values())


def test_a_digest_holds_values_and_their_order_and_kind_and_not_which_nan():
    one = digest([np.array([1.0, np.nan]), ["a", "bc"]])
    assert one == digest([np.array([1.0, -np.nan], ">f8"), np.array(["a", "bc"], object)])
    for other in (
        [np.array([1.0, np.nan]), ["ab", "c"]],
        [np.array([np.nan, 1.0]), ["a", "bc"]],
        [np.array([1.0, np.nan], np.float32), ["a", "bc"]],
        [["a", "bc"], np.array([1.0, np.nan])],
        [np.array([1.0]), np.array([np.nan]), ["a", "bc"]],
    ):
        assert digest(other) != one


def record(names):
    """Run some runs and rewrite what golden.toml holds of them."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    missing = {name for name in RUNS if RUNS[name].get("rounds")} - set(names)
    if missing and rounding() != RECORDED["recorded_on"]["rounding"]:
        sys.exit(f"this CPU rounds otherwise: record these as well: {' '.join(sorted(missing))}")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            RUNS[name]["outcome"] = outcome(run(RUNS[name], Path(folder)))
        print(name, RUNS[name]["outcome"]["jobs"])
    RECORDED["recorded_on"] = platform()
    part = GOLDEN.with_suffix(".part")
    part.write_text(HEADER + tomli_w.dumps(RECORDED), encoding="utf-8")
    os.replace(part, GOLDEN)


if __name__ == "__main__":
    record(sys.argv[1:] or list(RUNS))
