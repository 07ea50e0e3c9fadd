"""Where a simulation spends its time: a table of functions, over all threads.

Run it with: python benchmarks/profiling.py [OPTIONS OF fedstale simulate]
"""

import cProfile
import pstats
import sys
import tempfile
import threading
from pathlib import Path

from fedstale.cli.main import app

ROWS = 40
DEFAULT = ["digits", "--quiet", "--executor", "inline"]


def profiled(words: list[str]) -> list[cProfile.Profile]:
    """Run `fedstale simulate` and return a profile of each thread that it used."""
    profiles = [cProfile.Profile()]
    run = threading.Thread.run

    def run_profiled(thread: threading.Thread) -> None:
        profiles.append(cProfile.Profile())
        profiles[-1].runcall(run, thread)

    threading.Thread.run = run_profiled  # type: ignore[method-assign]
    try:
        profiles[0].runcall(app, ["simulate", *words], standalone_mode=False)
    finally:
        threading.Thread.run = run  # type: ignore[method-assign]
    return profiles


def main() -> None:
    """Simulate, and print the functions that took longest by themselves."""
    words = sys.argv[1:] or DEFAULT
    with tempfile.TemporaryDirectory() as folder:
        out = [] if "--out" in words else ["--out", str(Path(folder) / "run")]
        profiles = profiled([*words, *out])
    pstats.Stats(*profiles).strip_dirs().sort_stats("tottime").print_stats(ROWS)


if __name__ == "__main__":
    main()
