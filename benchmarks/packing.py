"""What the number of arrays costs: the same bytes as one array, as a hundred, as a hundred packed.

A SuperLink and two SuperNodes run on this machine, with TLS and node keys. A round of FedAvg sends
a model there and back, and nobody trains. The first round, which unpacks the app and is not packed
yet, does not count; of the others there are medians.

The table is written into docs/packing.md. Run it with: python benchmarks/packing.py [--quick]
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmark_app import write_app
from deployed import superlink_of
from pages import filled
from results_file import write_result

from fedstale.deployment.local import LocalDeployment, run_app

NODES = 2
PAGE = Path(__file__).parent.parent / "docs" / "packing.md"
BYTES = (400_000, 30_000_000)
FORMS = {
    "one array": "arrays=1 packed=false",
    "a hundred arrays": "arrays=100 packed=false",
    "a hundred arrays, packed": "arrays=100 packed=true",
}
Row = dict[str, object]

CONFIG = f"""
arrays = 1
bytes = 1000
packed = false
rounds = 6
superlink = 0
nodes = {NODES}
"""

SERVER = """
import json
import time

import numpy as np
import psutil
from fedstale.strategies.server.superlink import without_stalls
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    n, nodes = config["arrays"], config["nodes"]
    rng = np.random.default_rng(0)
    shape = config["bytes"] // n // 4
    model = {f"layer.{i}": rng.normal(size=shape).astype(np.float32) for i in range(n)}
    superlink, was = psutil.Process(config["superlink"]), []

    def evaluate(version, arrays):
        was.append((time.monotonic(), sum(superlink.cpu_times()[:2])))
        if version > 0:
            (before, used), (now, uses) = was[-2:]
            row = {"version": version, "round s": now - before, "SuperLink CPU s": uses - used}
            print("ROW " + json.dumps(row), flush=True)

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    with without_stalls(grid) as grid:
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord({name: Array(a) for name, a in model.items()}),
            num_rounds=config["rounds"],
            timeout=600.0,
            evaluate_fn=evaluate,
        )
"""

CLIENT = """
import numpy as np
from fedstale.client import PackMod
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp


def packed(message, context, call_next):
    if context.run_config["packed"]:
        return PackMod()(message, context, call_next)
    return call_next(message, context)


app = ClientApp(mods=[packed])


@app.train()
def train(message, context):
    # Other bytes than those that the SuperLink has already, for each node and round.
    step = np.float32(1 + context.node_config["partition-id"])
    arrays = {k: Array(a.numpy() + step) for k, a in message.content["arrays"].items()}
    metrics = MetricRecord({"num-examples": 1})
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
    return Message(content, reply_to=message)
"""


def rows_of(deployment: LocalDeployment, app: Path, n_bytes: int, rounds: int) -> list[Row]:
    """Measure a model of some bytes in each of its forms."""
    pid, rows = superlink_of(deployment).pid, list[Row]()
    for form, settings in FORMS.items():
        config = f"{settings} bytes={n_bytes} rounds={rounds + 1} superlink={pid}"
        lines: list[str] = []
        run_app(deployment, app, run_config=config, show=lines.append)
        found = [json.loads(line.split("ROW ", 1)[1]) for line in lines if "ROW " in line]
        rows.append({"MB": n_bytes / 1e6, "what": form} | medians(found[1:]))
        print(rows[-1], flush=True)
    return rows


def medians(found: list[Mapping[str, float]]) -> Row:
    """Return medians and ranges over rounds."""
    row: Row = {"n": len(found)}
    for key in ("round s", "SuperLink CPU s"):
        values = [each[key] for each in found]
        row |= {key: statistics.median(values), f"{key}, range": [min(values), max(values)]}
    return row


def page(text: str, rows: Sequence[Row]) -> str:
    """Return a page with the table of rows between its markers."""
    lines = ["| MB | as | s a round | CPU s of the SuperLink |", "|---:|---|---:|---:|"]
    lines += [
        f"| {row['MB']} | {row['what']} | {row['round s']:.1f} | {row['SuperLink CPU s']:.1f} |"
        for row in rows
    ]
    title = f"A round of {NODES} nodes that do not train (`python benchmarks/packing.py`):"
    return filled(text, "packing", "\n".join(["", title, "", *lines, ""]))


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the small model and two rounds alone")
    quick = parser.parse_args().quick
    print("load before:", os.getloadavg())
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalDeployment(Path(folder) / "deployment", nodes=NODES, say=print) as deployment,
    ):
        app = write_app(Path(folder) / "app", "layers", server=SERVER, client=CLIENT, config=CONFIG)
        sizes, rounds = (BYTES[:1], 2) if quick else (BYTES, 5)
        rows = [row for n in sizes for row in rows_of(deployment, app, n, rounds)]
    name = "packing-quick" if quick else "packing"
    write_result(name, rows, command="python benchmarks/packing.py" + " --quick" * quick)
    if not quick:
        text = page(PAGE.read_text(encoding="utf-8"), rows)
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
