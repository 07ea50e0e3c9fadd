"""Score rules and learning programs on the registered tasks.

Rules play the test windows of each task as a server plays them, and those of the phones once more
with models that are really trained. The programs of examples/agents are
run as they stand, on the task and from as many choices as they name, and say what they reach.

Run it with: OMP_NUM_THREADS=1 python benchmarks/agent/tasks.py [--quick]
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedstale.agents import AgentSelector, tasks
from fedstale.agents.evaluation import HEURISTIC, episode_metrics, paired
from fedstale.contrib.selectors import PISCES, TiFL
from fedstale.strategies.selection import (
    BALANCED,
    PAPER,
    RELEASED,
    Enough,
    ExpectedUtility,
    Fastest,
    LeastAvailable,
    LeastRecent,
    Likely,
    MostReliable,
    Oort,
    PowerOfChoice,
    Random,
)

sys.path.append(str(Path(__file__).parents[1]))
from agent.real_training import TrainedScenario
from lab.results import write_result

ROOT = Path(__file__).parents[2]
RULES: Mapping[str, Any] = {
    HEURISTIC: ExpectedUtility(BALANCED),
    "the agent of fedstale": AgentSelector(),
    "balanced, enough": Enough(ExpectedUtility(BALANCED)),
    "p_finish x utility": ExpectedUtility(),
    "p_finish": MostReliable(),
    "Oort, paper's constants": Oort(PAPER),
    "Oort, released constants": Oort(RELEASED),
    "FedCS": Fastest(),
    "REFL IPS": LeastAvailable(),
    "Pisces": ExpectedUtility(PISCES),
    "TiFL": TiFL(),
    "likely, then least recent": Likely(0.9, LeastRecent()),
    "power of choice": PowerOfChoice(64),
    "random": Random(),
}
AT_A_TIME = 50
PHONES, TRAINING = "fedstale/Selection-phones-v1", "fedstale/Selection-training-v1"
"""The first task, and what its windows are called where models are really trained."""
Row = dict[str, object]


def scores(task: str, windows: int) -> list[Row]:
    """Return a row for each rule: its mean gain, and its difference to the balanced rule's."""
    source = PHONES if task == TRAINING else task
    place, episodes = tasks.scenario(source, "test"), tasks.held_out(source, windows)
    if task == TRAINING:
        place = TrainedScenario.like(place)
    simulator = place.simulator(min(AT_A_TIME, windows))
    rows, first = [], np.zeros(0)
    for name, policy in RULES.items():
        table = episode_metrics(simulator, episodes, policy, reward=tasks.REWARD)
        earned = table["reward"].to_numpy()
        first = earned if name == HEURISTIC else first
        found = paired(earned, first)
        row: Row = {"task": task, "who": name, "windows": windows}
        row |= {"score": round(float(earned.mean()), 3)}
        row |= {k: round(float(getattr(found, k)), 3) for k in ("difference", "low", "high")}
        rows.append(row)
        print(row, flush=True)
    return rows


def learnt(program: Path, choices: int | None) -> Row:
    """Return what a program says that it reaches, and in which time of the processor."""
    words = [sys.executable, str(program), *([] if choices is None else [str(choices)])]
    before = time.monotonic()
    run = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    took = time.monotonic() - before
    found = re.search(r"earns ([-\d.]+), the balanced rule ([-\d.]+)", run.stdout)
    assert found is not None, run.stdout
    default = re.search(r"else ([\d_]+)\)", program.read_text(encoding="utf-8"))
    assert default is not None
    row: Row = {
        "program": program.stem,
        "choices": choices or int(default[1]),
        "wall_s": round(took),
        "score": float(found[1]),
        "heuristic": float(found[2]),
    }
    print(row, flush=True)
    return row


def main() -> None:
    """Score, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few windows, few choices")
    options = parser.parse_args()
    rows = [
        row
        for task in (*tasks.TASKS, TRAINING)
        for row in scores(task, 10 if options.quick else tasks.TEST_WINDOWS)
    ]
    programs = sorted((ROOT / "examples" / "agents").glob("*.py"))
    rows += [learnt(program, 4_096 if options.quick else None) for program in programs]
    command = "OMP_NUM_THREADS=1 python benchmarks/agent/tasks.py"
    print(write_result("selection_tasks", rows, command=command, quick=options.quick))


if __name__ == "__main__":
    main()
