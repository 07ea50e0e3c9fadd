"""How fast do other simulators train the same small clients: pfl and fedjax beside `batched`.

Each client takes two epochs over 20 digits in steps of 8 on a network of 64-32-10 units, 256
clients a round, as many as `batched` trains together if it is not told otherwise. Each program runs
in an environment of its own, which is made under build/peers the first time, on one core and in one
thread; they take turns. Counted is processor time, in the rounds after the first, which compiles.
fedstale is measured with its messages, and so are the others with whatever they do around a client;
the program of `batched` alone is one more row.

fedjax 0.0.17 needs a jax of its time, which is pinned here with what goes along with it.

Run it with: python benchmarks/speed/peers.py [--quick]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path

import torch

from fedstale.flower import identity

sys.path.append(str(Path(__file__).parents[1]))
from lab.results import spread, write_result
from speed.batched import Clients, workloads

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "peers"
TASK = {"clients": 256, "examples": 20, "epochs": 2, "batch_size": 8, "rate": 0.1, "rounds": 6}
PEERS = {
    "pfl": [["torch==2.13.0"], ["pfl[pytorch]==0.6.0", "scikit-learn==1.9.1"]],
    "fedjax": [
        [
            *("fedjax==0.0.17", "jax==0.4.25", "jaxlib==0.4.25", "optax==0.1.9", "chex==0.1.86"),
            *("dm-haiku==0.0.12", "numpy==1.26.4", "scipy==1.12.0", "scikit-learn==1.4.2"),
        ]
    ],
}
OURS = {
    "naive torch loop": "naive",
    "batched": "in_batches",
    "batched, the program alone": "one_program",
}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}


def environment(name: str) -> Path:
    """Return the Python of a peer's environment, made if it is not there."""
    folder = BUILD / name
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        venv.create(folder, with_pip=True, clear=True)
        for requirements in PEERS[name]:
            subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], check=True)
        ready.touch()
    return python


def peer(name: str, python: Path) -> float:
    """Return the clients per second of a peer, the median of its rounds."""
    command = [python, HERE / "peers" / f"{name}_digits.py", json.dumps(TASK)]
    run = subprocess.run(
        command, env=os.environ | ONE_THREAD, check=True, capture_output=True, text=True
    )
    return statistics.median(json.loads(run.stdout.splitlines()[-1]))


def ours(clients: Clients, way: str) -> float:
    """Return the clients per second of one of the ways of `batched.py`."""
    rates = []
    for _ in range(TASK["rounds"] - 1):
        started = time.process_time()
        getattr(clients, way)()
        rates.append(clients.n / (time.process_time() - started))
    return statistics.median(rates)


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two repeats")
    options = parser.parse_args()
    pythons = {name: environment(name) for name in PEERS}
    torch.set_num_threads(1)
    # Children inherit the core.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rates: dict[str, list[float]] = {name: [] for name in (*PEERS, *OURS)}
    with identity(1):
        clients = Clients(workloads()[0], TASK["clients"])
        clients.settle()
        for _ in range(2 if options.quick else 7):
            for name, python in pythons.items():
                rates[name].append(peer(name, python))
            for name, way in OURS.items():
                rates[name].append(ours(clients, way))
    base = statistics.median(rates["batched"])
    rows = [
        {
            "what": f"clients per processor second, {name}",
            **spread(values),
            "batched is": round(base / statistics.median(values), 2),
        }
        for name, values in rates.items()
    ]
    print(*rows, sep="\n")
    command = "python benchmarks/speed/peers.py"
    write_result("peers", rows, command=command, quick=options.quick)


if __name__ == "__main__":
    main()
