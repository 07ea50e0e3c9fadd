"""Write the fleets that the embedded agent is trained and tested on, as native trace files.

They are those of `recorded_fleets`, seed 0: `stop`, which the embedded forecaster was only stopped
early on, trains the agent, and `test`, which neither has seen, tests it.

Run it with: python benchmarks/agent_fleets.py RECORDINGS OUT [--kind mixed]
"""

import argparse
from pathlib import Path

from recorded_fleets import ASSUMED, KINDS, fleets


def main() -> None:
    """Compose and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="phones")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    made = fleets(options.recordings, seed=0, kind=options.kind, assumed=ASSUMED)
    for name, fleet in made.items():
        path = options.out / f"{name}.parquet"
        fleet.write(path)
        print(f"{path}: {fleet.n_devices} devices, {path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
