"""Write the fleets that the embedded agent is trained and tested on, as native trace files.

They are those of forecasting.py: `stop`, which the embedded forecaster was only stopped early on,
trains the agent, and `test`, which neither has seen, tests it.

Run it with: python benchmarks/agent_fleets.py RECORDINGS OUT
"""

import argparse
from pathlib import Path

from recorded_fleets import fleets


def main() -> None:
    """Compose and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, fleet in fleets(options.recordings, seed=0).items():
        path = options.out / f"{name}.parquet"
        fleet.write(path)
        print(f"{path}: {fleet.n_devices} devices, {path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
