"""How long does the default executor take where clients have DataLoader workers, beside Flower's.

The app is tests/fixtures/apps/loader_workers.py with a client of some tenths of a second. Flower's
engine has one Ray actor a core; fedstale has its default executor. Both are whole processes, from
start to end, and take turns.

Run it with: python benchmarks/speed/loaders.py [--quick]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2] / "tests" / "fixtures")]

from written_apps import write_app  # noqa: E402

from lab.results import spread, write_result  # noqa: E402 - after the paths above

APP, CLIENTS = "loader_workers", 20
FLOWER = f"""
import os
import loader_workers as app
from flwr.simulation import run_simulation

run_simulation(
    server_app=app.server,
    client_app=app.client,
    num_supernodes={CLIENTS},
    backend_config={{
        "client_resources": {{"num_cpus": 1}},
        "init_args": {{"num_cpus": os.cpu_count(), "include_dashboard": False}},
    }},
)
"""
COMMANDS = {
    "Flower, Ray": [sys.executable, "-c", FLOWER],
    "fedstale simulate": [
        *(sys.executable, "-m", "fedstale", "simulate", "app", "--traces", f"ideal:{CLIENTS}"),
        *("--out", "run", "--overwrite", "--json"),
    ],
}


def seconds(command: list[str], folder: Path) -> tuple[float, str]:
    """Return how long a command takes in a folder with the app, in s, and the executor if it says.

    Raises:
        RuntimeError: it failed.
    """
    environment = os.environ | {"PYTHONPATH": str(folder / "app")}
    started = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    took_s = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return took_s, json.loads(done.stdout)["executor"] if "--json" in command else ""


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds, once")
    quick = parser.parse_args().quick
    repeats, rounds = (1, 2) if quick else (3, 10)
    took: dict[str, list[float]] = {what: [] for what in COMMANDS}
    executors: list[str] = []
    with TemporaryDirectory() as made:
        folder = Path(made)
        write_app(folder / "app", APP, WIDTH=64, EPOCHS=2, ROUNDS=rounds)
        for _ in range(repeats):
            for what, command in COMMANDS.items():
                took_s, said = seconds(command, folder)
                took[what].append(took_s)
                executors += [said] if said else []
                print(what, f"{took_s:.1f} s", said, flush=True)
    rows = [
        {
            "what": what,
            "clients": CLIENTS,
            "rounds": rounds,
            **spread(some),
            "to Flower": round(spread(some)["median"] / spread(took["Flower, Ray"])["median"], 2),
            **({"executors": executors} if what == "fedstale simulate" else {}),
        }
        for what, some in took.items()
    ]
    write_result("loaders", rows, command="python benchmarks/speed/loaders.py", quick=quick)


if __name__ == "__main__":
    main()
