"""How far honest updates are from the median of norms, which `Validation.norm_bound` multiplies.

The built-in app `digits` with much skew runs on synthetic phones, which come and go as those of
FLASH do, for many more versions than it needs: late in training most updates are small, and one of
a device that holds what others do not is large. Every device is honest, so a rejection is a false
one. The first line of each run counts those, with the default bound; the others say how many
updates are beyond some multiple of the median that holds when they come.

Run it with: python benchmarks/norm_bound.py [--quick]
"""

import argparse
from unittest.mock import patch

import numpy as np
from results_file import write_result
from threadpoolctl import threadpool_limits

import fedstale
from fedstale.strategies.server.reputation import Reputation
from fedstale.strategies.types import ClientUpdate

MULTIPLES = (3, 10, 30, 100)
RUNS: dict[str, dict[str, object]] = {
    "fedavg": {"strategy": "fedavg"},
    "fedbuff": {"strategy": "fedbuff"},
    "fedasync": {"strategy": "fedasync"},
    "fedadam": {"strategy": "fedadam"},
}
VERSIONS = {"fedavg": 200, "fedbuff": 600, "fedasync": 3000, "fedadam": 200}


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the versions, not written")
    options = parser.parse_args()
    rows = []
    with threadpool_limits(1):
        for alpha in (0.1, 0.01):
            for name in RUNS:
                n = VERSIONS[name] // (10 if options.quick else 1)
                rows.append(measured(name, alpha, n))
    if not options.quick:
        write_result("norm_bound", rows, command="python benchmarks/norm_bound.py")


def measured(name: str, alpha: float, n_versions: int) -> dict[str, object]:
    """Return what a run rejected, and how far its updates were from the median."""
    ratios: list[float] = []
    limit = Reputation._limit

    def noted(self: Reputation, update: ClientUpdate, *, few: int | None = None) -> None:
        median = self.norms.times(1.0, few=few)
        if np.isfinite(median):
            ratios.append(update.norm / median)
        limit(self, update, few=few)

    config = RUNS[name] | {
        "alpha": alpha,
        "num-server-rounds": n_versions,
        "concurrency": 20,
        "buffer-size": 5,
    }
    with patch.object(Reputation, "_limit", noted):
        run = fedstale.simulate(
            "digits", traces="synthetic:80@phones", run_config=config, executor="inline", seed=1
        )
    found = np.array(ratios)
    row = {
        "strategy": name,
        "alpha": alpha,
        "versions": run.summary["rounds"],
        "accuracy": run.summary["metrics"].get("server accuracy"),
        "updates": len(found),
        "rejected": int(sum("norm" in reason for reason in run.summary["rejected"])),
        "largest": round(float(found.max()), 2),
        **{f"beyond {m}": int((found > m).sum()) for m in MULTIPLES},
    }
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
