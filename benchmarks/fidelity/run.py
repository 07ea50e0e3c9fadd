"""Run one app on one trace with real processes and in a simulation, and compare the timelines.

The app is small, so that on one machine the time of its jobs is the trace's. With the seed of the
trace desktops are online from the start, so that no real time is spent on waiting for them.

Run it with: python benchmarks/fidelity/run.py [--quick]
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedstale.contrib.replay.app_copy import replay_config, write_replayed
from fedstale.deployment.local import LocalDeployment, run_app
from fedstale.interrupts import end_on_signals
from fedstale.runs import EVENTS, SUMMARY
from fedstale.simulation.flower_app import FlowerApp
from fedstale.simulation.run import simulate
from fedstale.traces import TraceSet

sys.path.append(str(Path(__file__).parents[1]))
from lab.deployed import write_app
from lab.results import write_result

Array = npt.NDArray[np.float64]

_INSTANTS = ("sent_at", "downloaded_at", "reported_at", "delivered_at")

CONFIG = """
versions = 8
concurrency = 4
buffer-size = 2
timeout = 20000.0
"""

TABLES = """
[tool.fedstale]
work-per-example = 1.0
epochs = 1
examples = 500
model-bytes = 10_000_000
"""

SERVER = """
import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

from fedstale.strategies import GapAware

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    strategy = GapAware(config["concurrency"], config["buffer-size"], seed=1)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({"w": Array(np.zeros(1000, np.float32))}),
        num_rounds=config["versions"],
        timeout=config["timeout"],
    )
"""

CLIENT = '''
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    """Move the model; devices hold 300 to 700 examples."""
    w = message.content["arrays"]["w"].numpy() + np.float32(1)
    node = context.node_config
    examples = 300 + 400 * node["partition-id"] // node["num-partitions"]
    metrics = MetricRecord({"num-examples": examples, "train_loss": 1.0})
    content = RecordDict({"arrays": ArrayRecord({"w": Array(w)}), "metrics": metrics})
    return Message(content, reply_to=message)
'''


def measure(
    folder: Path, *, versions: int, nodes: int = 4, speed_up: float = 2.0, seed: int = 11
) -> dict[str, Any]:
    """Run both in a folder, and return how they differ."""
    traces = f"synthetic:{nodes}@desktops"
    written = write_app(
        folder / "measured",
        "measured",
        server=SERVER,
        client=CLIENT,
        config=CONFIG,
        tables=TABLES,
    )
    app = FlowerApp.find(written)
    run_config = f"versions={versions} concurrency={nodes}"
    config = replay_config(app, traces, nodes=nodes, run_config=run_config, seed=seed)
    with LocalDeployment(folder / "deployment", nodes=nodes, limit_s=300.0) as deployment:
        copy, real = deployment.folder / "app", deployment.folder / "run"
        ids = list(deployment.node_ids.values())
        write_replayed(config, copy, speed_up=speed_up, nodes=ids, run=real)
        run_app(deployment, copy, run_config=run_config)
    simulated = simulate(
        config, folder / "simulated", traces=TraceSet.load(traces, seed=config.seed)
    )
    summary = json.loads((real / SUMMARY).read_text(encoding="utf-8"))
    return {
        "app": app.name,
        "traces": traces,
        "seed": seed,
        "nodes": nodes,
        "speed_up": speed_up,
        "versions": versions,
        "wall_s": summary["wall_s"],
        "overhead": {k: summary[k] for k in ("median_there_s", "median_back_s", "median_late_s")},
        **compare(*(pd.read_parquet(run / EVENTS) for run in (simulated.folder, real))),
    }


def compare(simulated: pd.DataFrame, real: pd.DataFrame) -> dict[str, Any]:
    """Return how two timelines differ.

    Jobs are matched by device and by how many the device had had before. Errors are in seconds of
    the trace and in shares of a round, the median time between two versions in the simulation.

    Args:
        simulated: events of the simulation.
        real: events of the replay.

    Returns:
        `jobs` of both and matched ones; `round_s`; for each instant the `median` and `p90` of the
        absolute error, in s and in rounds; the same for the `duration` from sending to arrival;
        `same_status`, `same_base_version`, `same_aggregated_version` and `same_staleness`, shares
        of the matched jobs; and `merge_order`, the share of pairs of aggregated jobs whose order is
        the same, not counting pairs that either side aggregated together.
    """
    one, other = _numbered(simulated).add_suffix("_sim"), _numbered(real).add_suffix("_real")
    both = one.join(other, how="inner")
    round_s = _round_s(simulated)
    found: dict[str, Any] = {
        "jobs": {"simulated": len(simulated), "real": len(real), "matched": len(both)},
        "round_s": round_s,
    }
    for name in _INSTANTS:
        found[name] = _error(both[f"{name}_sim"], both[f"{name}_real"], round_s)
    found["duration"] = _error(
        both.reported_at_sim - both.sent_at_sim, both.reported_at_real - both.sent_at_real, round_s
    )
    for name in ("status", "base_version", "aggregated_version", "staleness"):
        expected, seen = both[f"{name}_sim"], both[f"{name}_real"]
        same = (expected == seen) | (expected.isna() & seen.isna())
        found[f"same_{name}"] = float(same.mean())
    merged = both[(both.aggregated_version_sim >= 0) & (both.aggregated_version_real >= 0)]
    found["merge_order"] = order(
        merged.aggregated_version_sim.to_numpy(np.float64),
        merged.aggregated_version_real.to_numpy(np.float64),
    )
    return found


def order(one: Array, other: Array) -> float:
    """Return the share of pairs that two rankings put in the same order; ties do not count.

    Example:
        >>> order(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0])) == 2 / 3
        True
    """
    first, second = (np.sign(ranks[:, None] - ranks[None, :]) for ranks in (one, other))
    counted = (first != 0) & (second != 0)
    return float((first == second)[counted].mean()) if counted.any() else float("nan")


def _numbered(events: pd.DataFrame) -> pd.DataFrame:
    numbers = events.groupby("device_id").cumcount().rename("number")
    return events.assign(number=numbers).set_index(["device_id", "number"])


def _round_s(events: pd.DataFrame) -> float:
    merged = events[events.aggregated_version >= 0]
    instants = merged.groupby("aggregated_version").delivered_at.max().to_numpy(np.float64)
    return float(np.median(np.diff(instants))) if instants.size > 1 else float("nan")


def _error(one: pd.Series, other: pd.Series, round_s: float) -> dict[str, float]:
    known = np.isfinite(one) & np.isfinite(other)
    error = np.abs(one[known] - other[known]).to_numpy(np.float64)
    if not error.size:
        return {"n": 0}
    middle, high = np.quantile(error, [0.5, 0.9])
    return {
        "n": int(error.size),
        "median_s": float(middle),
        "p90_s": float(high),
        "median_rounds": float(middle / round_s),
        "p90_rounds": float(high / round_s),
    }


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two versions")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, end_on_signals():
        found = measure(Path(folder), versions=2 if args.quick else 8)
    print(json.dumps(found, indent=2))
    command = "python benchmarks/fidelity/run.py"
    write_result("fidelity", [found], command=command, quick=args.quick)


if __name__ == "__main__":
    main()
