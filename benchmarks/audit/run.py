"""After how many jobs the audit of forecasts finds five lies, and how often it blames the honest.

Devices of a chance and a pace of their own state before each job what is true, but for the liars.
Their jobs become the job log of a run, as a simulation writes it, which `fedstale audit` reads.
What a device says of its loss and examples is in no column: those two lies leave the log of honest
devices, drawn anew. Then the built-in app digits runs on synthetic phones whose forecasts are those
of fedstale's own forecaster: honest, and not always right of each device.

Run it with: python benchmarks/audit/run.py [--quick]
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd

import fedstale
from fedstale.config import SimulationConfig
from fedstale.contrib.audit import audited
from fedstale.runs import INTERRUPTED, RunFolder, ledger
from fedstale.simulation.jobs import COLUMNS, JobRow, table
from fedstale.strategies.server.runtime import REPORTED
from fedstale.traces.arrays import Array

sys.path.append(str(Path(__file__).parents[1]))
from lab.results import write_result

NAME = "forecast_audit"
JOBS, AT_A_TIME, EVERY_S = 100, 1000, 10_000.0
Lie = Callable[[Array, Array], tuple[Array, Array]]
LIES: dict[str, Lie] = {
    "none": lambda p, duration_s: (p, duration_s),
    "claims p = 1": lambda p, duration_s: (np.ones_like(p), duration_s),
    "claims p = 0": lambda p, duration_s: (np.zeros_like(p), duration_s),
    "a third of the duration": lambda p, duration_s: (p, duration_s / 3.0),
    "three times the loss": lambda p, duration_s: (p, duration_s),
    "ten times the examples": lambda p, duration_s: (p, duration_s),
}
"""What devices state, of their true chances and median durations."""


def main() -> None:
    """Measure, print, and write the results and the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of it")
    options = parser.parse_args()
    rows = []
    for number, (lie, states) in enumerate(LIES.items()):
        n = 10_000 if lie == "none" else 1000
        n = n // 10 if options.quick else n
        rows.append({"lie": lie, **measured(states, n, seed=number)})
        print(rows[-1], flush=True)
    for seed in range(1 if options.quick else 3):
        rows.append(simulated(seed, "4h" if options.quick else "12h"))
        print(rows[-1], flush=True)
    write_result(NAME, rows, command="python benchmarks/audit/run.py", quick=options.quick)


def measured(states: Lie, n_devices: int, *, seed: int) -> dict[str, object]:
    """Return how many devices of a kind alarm within their first jobs, and after how many."""
    rng = np.random.default_rng(seed)
    jobs_to_alarm = []
    for _ in range(max(1, n_devices // AT_A_TIME)):
        with TemporaryDirectory() as folder:
            write_log(Path(folder) / "run", states, min(n_devices, AT_A_TIME), rng)
            devices = audited(Path(folder) / "run").devices
        jobs_to_alarm += devices["jobs_to_alarm"].fillna(np.inf).tolist()
    found = np.array(jobs_to_alarm)
    ends = np.quantile(found, (0.1, 0.5, 0.9), method="lower").tolist()
    tenth, median, nine = (end if np.isfinite(end) else None for end in ends)
    return {
        **{"devices": found.size, "jobs_each": JOBS, "alarms": int(np.isfinite(found).sum())},
        **{"jobs_10": tenth, "jobs_50": median, "jobs_90": nine},
    }


def write_log(path: Path, states: Lie, n: int, rng: np.random.Generator) -> None:
    """Write the folder of a run of n devices, each of which is asked before each job."""
    logits = rng.normal(1.0, 1.5, (n, 1)) + rng.normal(size=(n, JOBS))
    p = 1.0 / (1.0 + np.exp(-logits))
    is_kept = rng.random(p.shape) < p
    median_s = rng.lognormal(5.0, 0.7, (n, 1)) * rng.lognormal(0.0, 0.3, (n, JOBS))
    took_s = np.minimum(median_s * rng.lognormal(0.0, 0.5, p.shape), 0.8 * EVERY_S)
    stated_p, stated_s = states(p, median_s)
    sent_at = np.broadcast_to(np.arange(JOBS) * EVERY_S, p.shape)
    end = np.where(is_kept, sent_at + took_s, np.inf)
    jobs = {
        "kind": np.full(p.shape, "train", dtype=object),
        "status": np.where(is_kept, REPORTED, INTERRUPTED),
        "sent_at": sent_at,
        "reported_at": end,
        "delivered_at": end,
        "reported_p_finish": stated_p,
        "reported_duration_s": stated_s,
    }
    nothing = np.full(p.shape, np.nan)
    queries = {
        "kind": np.full(p.shape, "query.forecast", dtype=object),
        "status": np.full(p.shape, REPORTED, dtype=object),
        "sent_at": sent_at - 2.0,
        "reported_at": sent_at - 1.0,
        "delivered_at": sent_at - 1.0,
        "reported_p_finish": nothing,
        "reported_duration_s": nothing,
    }
    # Round by round, in the order of sending: all queries of a round, then its jobs.
    both = {name: np.stack([queries[name].T, jobs[name].T], axis=1).ravel() for name in jobs}
    size = 2 * p.size
    columns = {name: np.full(size, getattr(JobRow, name).default) for name in COLUMNS}
    columns |= both | {"job_id": np.arange(size), "device": np.tile(np.arange(n), 2 * JOBS)}
    columns["node_id"] = 1000 + columns["device"]
    events = table(columns, pd.Index([f"device-{i:04}" for i in range(n)]))
    with RunFolder.create(path) as folder:
        folder.write_config(SimulationConfig(app="digits", traces="made"))
        folder.write_events(events)
        folder.write_metrics([])
        about = {"status": "finished", "app": "digits", "devices": n, "seed": 0, "rounds": JOBS}
        folder.write_summary({**about, "virtual_s": JOBS * EVERY_S, **ledger(events)})


def simulated(seed: int, until: str) -> dict[str, object]:
    """Return how many devices alarm that forecast themselves by fedstale's own forecaster."""
    config = {
        **{"forecasts": True, "strategy": "FedBuff(10, 5, stages=[ForecastRequest()])"},
        "num-server-rounds": 100_000,
        "seed": 1,  # of the data and the first model; the seed below draws devices
    }
    run = fedstale.simulate(
        "digits", traces="synthetic:100", until=until, run_config=config, executor="inline",
        seed=seed,
    )  # fmt: skip
    found = audited(run)
    tested = found.devices[found.devices["tested"] > 0]
    return {
        **{"lie": "digits", "seed": seed, "until": until, "devices": len(tested)},
        **{"tested": int(tested["tested"].sum()), "alarms": len(found.alarms)},
        **{name: int((found.alarms["direction"] == name).sum()) for name in ("over", "under")},
        "short": int((found.alarms["direction"] == "short").sum()),
    }


if __name__ == "__main__":
    main()
