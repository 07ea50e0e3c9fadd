"""Does the embedded agent, trained on 32 to 256 devices, also help among 16 or 100,000.

Devices are generated, so that there are enough of them; the agent has seen neither them nor so many
at a time. All contenders play the same windows of three hours.

Run it with: python benchmarks/agent_sizes.py [--quick] [--sizes N ...]
"""

import argparse
from pathlib import Path

import numpy as np
from results_file import write_result

from fedstale.agents.env.episodes import EpisodeSettings
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.evaluation import AGENT, HEURISTIC, contenders, evaluate
from fedstale.agents.policy import scorer
from fedstale.traces import TraceSet

HOUR_S = 3600.0
SIZES = {16: 200, 64: 200, 1_024: 40, 100_000: 10}
"""Windows played for each number of devices."""
COMPARED = (AGENT, HEURISTIC, "random", "FedCS", "REFL IPS")


def scenario_of(n: int) -> Scenario:
    """Return a scenario whose windows have n devices."""
    # Not every device appears within a window.
    traces = TraceSet.synthetic(max(4 * n, 1_000) if n < 10_000 else 2 * n, days=2, seed=11)
    few = n < 10_000
    return Scenario.of(
        traces,
        start=18 * HOUR_S,
        end=(30 if few else 22) * HOUR_S,
        step_s=900.0 if few else 1800.0,
        settings=EpisodeSettings(
            devices=(n, n),
            window_s=3 * HOUR_S,
            rounds=12,
            concurrency_share=(0.05, 0.25) if few else (0.001, 0.01),
        ),
    )


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 64 devices, 20 windows")
    parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, help="only these")
    parser.add_argument("--agent", type=Path, default=scorer.embedded(), help="its folder")
    options = parser.parse_args()
    agent = scorer.load(options.agent)
    rows: list[dict[str, object]] = []
    sizes = {16: 20, 64: 20} if options.quick else {n: SIZES[n] for n in options.sizes or SIZES}
    for n, windows in sizes.items():
        playing = contenders(scenario_of(n), [agent])
        found = evaluate(
            {name: playing[name] for name in COMPARED},
            windows=windows,
            at_a_time=max(1, min(64, 20_000 // n)),
        )
        for row in found.table[found.table["metric"].eq("reward")].to_dict("records"):
            numbers = {k: row[k] for k in ("mean", "difference", "low", "high")}
            rounded = {k: None if np.isnan(v) else round(v, 3) for k, v in numbers.items()}
            rows.append({"devices": n, "windows": windows, "who": row["contender"], **rounded})
            print(rows[-1], flush=True)
    name = "agent_sizes-quick" if options.quick else "agent_sizes"
    command = "python benchmarks/agent_sizes.py" + " --quick" * options.quick
    if options.sizes:
        command += " --sizes " + " ".join(map(str, options.sizes))
    write_result(name, rows, command=command)


if __name__ == "__main__":
    main()
