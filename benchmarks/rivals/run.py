"""Do other simulators say the same of the same scenario, and how fast are they.

Clients are always online, each with one slowdown and one bandwidth, as all simulators can have
them. All run the same training in NumPy (`scenario.py`), so that where the rules are equal, so are
the instants at which updates arrive, the versions that they began from, and the model. Each runs in
the Python that is named for it, in a process of its own, and is left out if none is named:

    python benchmarks/rivals/run.py --python appfl=PATH --python flgo=PATH \
        --python flower=PATH --python pfl=PATH

PATH is the Python of an environment beside the project, into which these go one after the other:

    torch==2.13.0 numpy==2.4.6                               for all
    --no-deps appfl==1.12.0 opacus opt-einsum                appfl
    omegaconf colorama packaging scipy                       appfl
    --no-deps flgo==0.4.4                                    flgo
    prettytable tqdm pyyaml scipy matplotlib ujson toolz requests packaging    flgo
    pfl==0.6.0                                               pfl

For `flower` it is fedstale's own, with `[ray]`. APPFL's FedCompass is not run: its scheduler groups
clients by `time.time` and `threading.Timer`, and the driver hands no numbers of steps to clients.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from heapq import heapify, heappop, heappush
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fedstale.simulation.flower_app import FlowerApp

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parent))
from scenario import Answer, Model, Scenario, accuracy

from lab.results import write_result

Row = dict[str, Any]
HERE = Path(__file__).parent
OURS = "fedstale"
DRIVERS = {
    OURS: "ours.py",
    "appfl": "vsim.py",
    "flgo": "flgo_clock.py",
    "flower": "flower_engine.py",
    "pfl": "pfl_rounds.py",
}
N, UPDATES, BUFFER, SEEDS = 20, 200, 5, 5
STEP_S, STEPS, HIDDEN = 20.0, 4, 256
SHORTEST_S, LONGEST_S = 500, 5000
"""Of a job; rates follow from it."""
ROUNDS = {100: 3, 1000: 2}
"""By number of clients; 10,000 have one, and none in Flower's engine, which would take minutes."""
AS_IT_COMES = {"in_flight": 2, "updates": 10, "is_fast": False}


def digits() -> Any:
    """Return the module of the built-in app that has the data."""
    FlowerApp.find("digits").load_client()
    return import_module("digits_app.task")


@dataclass(frozen=True)
class Case:
    """A rule in a simulator, and how fedstale says the same rule."""

    rival: str
    name: str
    rule: str
    note: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    in_flight: int = N


CASES = [
    Case("appfl", "FedAvg", "FedAvg"),
    Case("appfl", "FedAsync", "FedAsync"),
    Case("appfl", "FedAsync, 8 of 20 at a time", "FedAsync", in_flight=8),
    Case("appfl", "FedBuff", "FedBuff", "takes the difference to the model at the arrival"),
    Case("appfl", "FedBuff, update='model'", "FedBuff", options={"update": "model"}),
    Case("flgo", "FedAvg", "FedAvg"),
    Case("flgo", "FedAsync", "FedAsync"),
    Case("flgo", "FedBuff", "FedBuff", "a client in the buffer waits for the step"),
    Case("flgo", "FedBuff, distinct", "FedBuff", options={"distinct": True}),
    Case("flower", "FedAvg", "FedAvg", "no clock"),
    Case("pfl", "FedAvg", "FedAvg", "no clock"),
]


def arrivals(durations_s: Sequence[int], updates: int, buffer_size: int = 1) -> list[int]:
    """Return when updates arrive if each client begins again at the step that has its last one."""
    due = [(seconds, client) for client, seconds in enumerate(durations_s)]
    heapify(due)
    found: list[int] = []
    buffer: list[int] = []
    while len(found) < updates:
        now, client = heappop(due)
        found.append(now)
        buffer.append(client)
        if len(buffer) == buffer_size:
            for each in buffer:
                heappush(due, (now + durations_s[each], each))
            buffer = []
    return found


def whole_durations(rng: np.random.Generator) -> list[int]:
    """Return whole seconds of jobs of which no two arrive together, whatever the rule.

    What becomes of equal instants is each simulator's own: FLGo merges in one step all that have
    come by a second, APPFL sends after all that have come.
    """
    while True:
        found = rng.integers(SHORTEST_S, LONGEST_S, N).tolist()
        ways = [arrivals(found, UPDATES, size) for size in (1, BUFFER)]
        if all(len(set(way)) == len(way) for way in ways):
            return list(found)


def scenario(rule: str, seed: int, folder: Path, **changes: Any) -> Scenario:
    """Return clients with skewed digits, and write their arrays to a folder.

    Jobs take whole seconds, for FLGo, unless a client waits for a place in flight: then equal
    instants are avoided by fractions.
    """
    rng = np.random.default_rng((seed, 11))
    task = digits()
    (images, labels), _ = task.load_data(seed)
    scale = rng.normal(0, 0.1, (64, HIDDEN)), rng.normal(0, 0.1, (HIDDEN, 10))
    first = [scale[0], np.zeros(HIDDEN), scale[1], np.zeros(10)]
    data = {f"model{i}": array.astype(np.float32) for i, array in enumerate(first)}
    for i, owned in enumerate(task.assign(N, 0.5, seed)):
        data |= {f"images{i}": images.numpy()[owned], f"labels{i}": labels.numpy()[owned]}
    arrays = f"arrays{seed}.npz"
    np.savez(folder / arrays, **data)
    wanted: list[float] = list(whole_durations(rng))
    if changes.get("in_flight", N) < N:
        wanted = [seconds + float(rng.random()) for seconds in wanted]
    links = rng.uniform(0.2, 2.0, N)
    made = Scenario(
        rule=rule,
        slowdown=[1.0] * N,
        mbit_per_s=links.round(3).tolist(),
        step_s=STEP_S,
        steps=STEPS,
        in_flight=N,
        buffer_size=BUFFER,
        updates=UPDATES,
        seed=seed,
        arrays=arrays,
        data=data,
    )
    # What the link leaves of a whole number of seconds.
    rest = [wanted[i] - made.duration_s(i) + STEP_S * STEPS for i in range(N)]
    return replace(made, slowdown=[s / (STEP_S * STEPS) for s in rest], **changes)


def write(made: Scenario, path: Path) -> None:
    """Write a scenario without its arrays."""
    said = {k: v for k, v in asdict(replace(made, data={})).items() if k not in ("data", "jobs")}
    path.write_text(json.dumps(said))


def read_answer(path: Path) -> tuple[Answer, float]:
    """Return what a simulator said, and the peak of its memory in MiB.

    Raises:
        ValueError: an event has not four parts, or comes before the one in front of it.
    """
    said = json.loads(path.read_text())
    peak = float(said.pop("peak_mib"))
    with np.load(path.parent / said.pop("model")) as arrays:
        model: Model = [arrays[name] for name in arrays.files]
    events = [tuple(event) for event in said.pop("events")]
    if any(len(event) != 4 for event in events):
        raise ValueError(f"{path}: expected events of four parts")
    instants = [event[0] for event in events]
    if any(later < earlier for earlier, later in pairwise(instants)):
        raise ValueError(f"{path}: expected events in the order of arrival")
    return Answer(events=events, model=model, **said), peak


def ask(name: str, python: str, files: Sequence[tuple[Path, Path]]) -> None:
    """Let a simulator answer scenarios, all in one process of one thread."""
    words = [str(path) for pair in files for path in pair]
    one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    subprocess.run(
        [python, str(HERE / DRIVERS[name]), *words],
        check=True,
        env=os.environ | one,
        stdout=subprocess.DEVNULL,
        timeout=900,
    )


def compared(theirs: Answer, own: Answer) -> Row:
    """Return by how much two answers differ.

    `late_s` is the largest difference of an instant of arrival; `same_clients` and `same_versions`
    are shares of the places in the order of arrival at which both have the same client, and the
    same client with the same base version. They are None of a simulator without a clock.
    """
    pairs = list(zip(theirs.events, own.events, strict=True))
    models = zip(theirs.model, own.model, strict=True)
    apart = float(max(np.abs(a - b).max() for a, b in models))
    found = {
        "late_s": float(max(abs(a[0] - b[0]) for a, b in pairs)),
        "same_clients": float(np.mean([a[1] == b[1] for a, b in pairs])),
        "same_versions": float(np.mean([a[1:3] == b[1:3] for a, b in pairs])),
    }
    has_clock = np.isfinite(found["late_s"])
    return {"jobs": len(pairs), **(found if has_clock else dict.fromkeys(found)), "apart": apart}


def fidelity(pythons: dict[str, str], seeds: int, folder: Path) -> list[Row]:
    """Return a row for each rule of each simulator: the largest differences over seeds."""
    cases = [case for case in CASES if case.rival in pythons]
    files: dict[str, list[tuple[Path, Path]]] = {}
    answers: dict[tuple[str, int, int], Path] = {}
    for number, case in enumerate(cases):
        for seed in range(seeds):
            about = {"options": case.options, "in_flight": case.in_flight}
            made = scenario(case.rule, seed, folder, **about)
            if case.rule == "FedAvg":
                made = replace(made, updates=UPDATES // N * N)
            source = folder / f"{number}-{seed}.json"
            write(made, source)
            for name in (OURS, case.rival):
                answers[name, number, seed] = target = folder / f"{number}-{seed}-{name}-out.json"
                files.setdefault(name, []).append((source, target))
    for name, some in files.items():
        ask(name, pythons.get(name, sys.executable), some)
    rows = []
    for number, case in enumerate(cases):
        both = [
            [read_answer(answers[name, number, seed])[0] for name in (case.rival, OURS)]
            for seed in range(seeds)
        ]
        found = [compared(*pair) for pair in both]
        tests = [[part.numpy() for part in digits().load_data(seed)[1]] for seed in range(seeds)]
        reached = np.array(
            [
                [accuracy(answer.model, *test) for answer in pair]
                for pair, test in zip(both, tests, strict=True)
            ]
        )
        worst = {"late_s": max, "same_clients": min, "same_versions": min, "apart": max}
        rows.append(
            {
                "part": "same",
                "rival": case.rival,
                "version": both[0][0].version,
                "rule": case.name,
                "note": case.note,
                "seeds": seeds,
                "jobs": sum(row["jobs"] for row in found),
                **{
                    key: None if found[0][key] is None else pick(row[key] for row in found)
                    for key, pick in worst.items()
                },
                "accuracy": round(float(reached[:, 0].mean()), 4),
                "ours": round(float(reached[:, 1].mean()), 4),
                "spread": round(float(reached[:, 1].std(ddof=1)), 4) if seeds > 1 else None,
                "most_apart": round(float(np.abs(reached[:, 0] - reached[:, 1]).max()), 4),
            }
        )
        print(rows[-1], flush=True)
    return rows


def speed(pythons: dict[str, str], sizes: Iterable[int], repeats: int, folder: Path) -> list[Row]:
    """Return how many clients a second each simulator runs whose training takes no time."""
    rows = []
    for n in sizes:
        rng = np.random.default_rng(n)
        common = {
            "slowdown": rng.integers(100, 600, n).tolist(),
            "mbit_per_s": rng.uniform(1.0, 20.0, n).tolist(),
            "step_s": 1.0,
            "steps": 1,
            "buffer_size": 10,
        }
        stream = Scenario(rule="FedAsync", in_flight=min(n, 100), updates=1000, **common)
        rounds = Scenario(rule="FedAvg", in_flight=n, updates=ROUNDS.get(n, 1) * n, **common)
        asked = [
            *((name, "FedAsync", name, stream) for name in (OURS, "appfl", "flgo")),
            *((name, "FedAvg", name, rounds) for name in (OURS, "appfl", "flgo", "pfl")),
            *[("flower", "FedAvg", "flower", rounds)] * (n in ROUNDS),
            # As it comes, APPFL collects garbage several times an update.
            ("appfl", "FedAsync", "appfl, as it comes", replace(stream, **AS_IT_COMES)),
        ]
        asked = [each for each in asked if each[0] == OURS or each[0] in pythons]
        found: list[list[tuple[Answer, float]]] = [[] for _ in asked]
        source, target = folder / "speed.json", folder / "speed-out.json"
        for _ in range(repeats):
            for (name, *_, made), some in zip(asked, found, strict=True):
                write(made, source)
                ask(name, pythons.get(name, sys.executable), [(source, target)])
                some.append(read_answer(target))
        rates = [[len(a.events) / a.run_s for a, _ in some] for some in found]
        own = {
            rule: statistics.median(some)
            for (name, rule, *_), some in zip(asked, rates, strict=True)
            if name == OURS
        }
        for (_, rule, who, _), some, rate in zip(asked, found, rates, strict=True):
            rows.append(
                {
                    "part": "speed",
                    "rule": rule,
                    "simulator": who,
                    "clients": n,
                    "jobs": len(some[0][0].events),
                    "median": round(statistics.median(rate), 1),
                    "min": round(min(rate), 1),
                    "max": round(max(rate), 1),
                    "repeats": repeats,
                    "fedstale is": round(own[rule] / statistics.median(rate), 2),
                    "set_up_s": round(statistics.median(a.set_up_s for a, _ in some), 2),
                    "peak_mib": round(statistics.median(peak for _, peak in some)),
                }
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", default=[], metavar="RIVAL=PATH")
    parser.add_argument("--quick", action="store_true", help="two seeds, few clients, no Ray")
    options = parser.parse_args()
    pythons = dict(each.split("=", 1) for each in options.python)
    if unknown := set(pythons) - set(DRIVERS):
        parser.error(f"--python {', '.join(unknown)}: expected one of {', '.join(DRIVERS)}")
    if options.quick:
        pythons.pop("flower", None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = fidelity(pythons, 2 if options.quick else SEEDS, folder)
        sizes = [100] if options.quick else [100, 1000, 10_000]
        rows += speed(pythons, sizes, 1 if options.quick else 3, folder)
    words = " ".join(f"--python {rival}=PATH" for rival in pythons)
    command = f"python benchmarks/rivals/run.py {words}"
    write_result("rivals", rows, command=command, quick=options.quick)


if __name__ == "__main__":
    main()
