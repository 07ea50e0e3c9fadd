"""Is the engine as fast as that of another checkout: the same simulations in both, taking turns.

Both run the code of `engine.py` here, each in a process of its own with its own fedstale, and in
processor time, so that a loaded machine troubles them less. A ratio is that of one turn; the table
has the median over the turns and the quartiles.

Run it with: python benchmarks/against.py PYTHON [--turns N] [--million]
where PYTHON is the interpreter of the other checkout, such as ../before/.venv/bin/python
"""

import argparse
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial

import torch
from engine import Engines, alike, messages_per_second, replies_per_second
from results_file import write_result

from fedstale.traces import TraceSet

phones = cache(partial(TraceSet.synthetic, days=2, seed=0))


def clients_per_second(kind: str, n_clients: int) -> float:
    """Return how many clients of digits an executor trains in a second of processor time."""
    engines = Engines(n_clients, 4, local_epochs=2, clock=time.process_time)
    return engines.rate(partial(engines.fedstale, kind))


def messages(devices: Callable[[], TraceSet], batch: int, total: int) -> float:
    """Return the messages of an empty app in a second of processor time."""
    return messages_per_second(devices(), batch, total, time.process_time)


def replies(devices: Callable[[], TraceSet], concurrency: int, total: int) -> float:
    """Return the replies that FedBuff merges in a second of processor time."""
    return replies_per_second(devices(), concurrency, total, time.process_time)


CASES: Mapping[str, Callable[[], float]] = {
    "messages per second, 1 device": partial(messages, partial(alike, 1), 1, 300),
    "messages per second, 10 devices": partial(messages, partial(alike, 10), 10, 2000),
    "messages per second, 50 devices": partial(messages, partial(alike, 50), 50, 3000),
    "messages per second, 1,000 devices": partial(messages, partial(alike, 1000), 1000, 4000),
    "replies per second, FedBuff, 100 of 2,000 phones": partial(
        replies, partial(phones, 2000), 100, 1000
    ),
    "clients per second, inline, 64": partial(clients_per_second, "inline", 64),
    "clients per second, batched, 256": partial(clients_per_second, "batched", 256),
}
MILLION: Mapping[str, Callable[[], float]] = {
    "messages per second, 10,000 of 1,000,000 phones": partial(
        messages, partial(phones, 1_000_000), 10_000, 20_000
    ),
    "replies per second, FedBuff, 10,000 of 1,000,000 phones": partial(
        replies, partial(phones, 1_000_000), 10_000, 12_000
    ),
}


class Checkout:
    """A process with the fedstale of a checkout, which runs cases when it is asked to."""

    def __init__(self, python: str) -> None:
        words = [python, __file__, "--serve"]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def rate(self, case: str) -> float:
        """Return the rate of a case."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(case, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def serve() -> None:
    """Run the cases that are asked for, and print their rates."""
    warnings.filterwarnings("ignore")
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for case in sys.stdin:
        print((CASES | MILLION)[case.strip()](), file=out, flush=True)


def compared(case: str, other: Checkout, own: Checkout, turns: int) -> dict[str, object]:
    """Return how many times the rate of another checkout this one reaches."""
    rates: list[tuple[float, float]] = []
    for turn in range(turns + 1):
        pair = [checkout.rate(case) for checkout in ((other, own) if turn % 2 else (own, other))]
        # The first turn loads libraries and data.
        rates += [(pair[0], pair[1]) if turn % 2 else (pair[1], pair[0])] if turn else []
    low, median, high = statistics.quantiles([ours / theirs for theirs, ours in rates], n=4)
    there, here = (statistics.median(rate) for rate in zip(*rates, strict=True))
    return {
        **{"what": case, "there": round(there, 1), "here": round(here, 1), "repeats": turns},
        **{"ratio": round(median, 3), "lower quartile": round(low, 3)},
        "upper quartile": round(high, 3),
    }


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", nargs="?", help="interpreter of the other checkout")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--million", action="store_true", help="the two cases of a million alone")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    other, own = Checkout(options.python), Checkout(sys.executable)
    rows = []
    for case in MILLION if options.million else CASES:
        rows.append(compared(case, other, own, options.turns))
        print(rows[-1], flush=True)
    other.close()
    own.close()
    flags = f"--turns {options.turns}" + " --million" * options.million
    name = "against_million" if options.million else "against"
    write_result(name, rows, command=f"python benchmarks/against.py PYTHON {flags}")


if __name__ == "__main__":
    main()
