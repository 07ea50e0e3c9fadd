"""How much memory a server takes that merges large models, and how long.

A whole `FedBuff(12, 4)` runs over a grid that keeps neither messages nor replies: a reply is made
as it is pulled, one at a time, as those of a dozen sites come. Versions that jobs still need are on
disk (`Checkpoints(version_memory_bytes=...)`), and no update waits for running medians
(`Validation(norm_bound=None)`). What is divided by the bytes of a model is the most memory of the
process, without what is mapped from files, less what it had before the model was made: the initial
model, which the caller holds, the current one, the sum, and the reply that is read into an update.

Run it with: python benchmarks/speed/large_models.py [PARAMETERS ...]
"""

import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedstale.flower import identity
from fedstale.strategies import Checkpoints, FedBuff, Validation

sys.path.append(str(Path(__file__).parents[1]))
from lab.results import write_result

SITES, IN_BUFFER, VERSIONS, ARRAYS = 12, 4, 3, 64
SIZES, QUICK_SIZES = (100_000_000, 1_000_000_000), (10_000_000,)
"""Parameters, in float32."""


class Sites:
    """A grid whose nodes answer at once, one reply a pull, with a model of equal numbers."""

    def __init__(self, n: int) -> None:
        self.n, self.sent = n, dict[str, Message]()
        self.replied_at: list[float] = []

    def get_node_ids(self) -> list[int]:
        """Return all nodes."""
        return list(range(1, SITES + 1))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Take messages in, without what is in them."""
        ids = [f"m{len(self.replied_at)}-{message.metadata.dst_node_id}" for message in messages]
        for message_id, message in zip(ids, messages, strict=True):
            bare = Message(RecordDict(), message.metadata.dst_node_id, "train")
            bare.metadata.__dict__["_message_id"] = message_id
            self.sent[message_id] = bare
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the reply to the message that has waited longest."""
        awaited = set(message_ids)
        for message_id in list(self.sent):
            if message_id in awaited:
                self.replied_at.append(time.perf_counter())
                return [Message(model(self.n, 0.001), reply_to=self.sent.pop(message_id))]
        return []


def model(n: int, value: float) -> RecordDict:
    """Return a reply whose model has n parameters of one value, in equal arrays."""
    arrays = {f"w{k}": Array(np.full(n // ARRAYS, value, np.float32)) for k in range(ARRAYS)}
    return RecordDict(
        {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 100})}
    )


def measure(n: int) -> dict[str, Any]:
    """Run a strategy on models of n parameters, in a process of its own."""
    sites, n_bytes, found = Sites(n), 4 * n, [anonymous_bytes()]
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            found.append(anonymous_bytes())

    threading.Thread(target=look, daemon=True).start()
    strategy = FedBuff(
        SITES,
        IN_BUFFER,
        validation=Validation(norm_bound=None),
        checkpoints=Checkpoints(version_memory_bytes=n_bytes),
    )
    with identity(1):
        initial = model(n, 0.0).array_records["arrays"]
        strategy.start(cast(Grid, sites), initial, VERSIONS, timeout=1e6)
    over.set()
    apart = np.diff(sites.replied_at)
    return {
        "parameters": n,
        "model_gb": n_bytes / 1e9,
        "updates": VERSIONS * IN_BUFFER,
        "models_at_the_peak": round((max(found) - found[0]) / n_bytes, 2),
        "s_an_update_median": round(float(np.median(apart)), 2),
        "s_an_update_max": round(float(apart.max()), 2),
    }


def anonymous_bytes() -> int:
    """Return the memory of this process that is mapped from no file, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def main(sizes: Sequence[int], *, quick: bool) -> None:
    """Measure each size, print, and write the results."""
    rows = []
    for n in sizes:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            rows.append(pool.submit(partial(measure, n)).result())
        print(rows[-1])
    if quick or tuple(sizes) == SIZES:
        command = "python benchmarks/speed/large_models.py"
        write_result("large_models", rows, command=command, quick=quick)


if __name__ == "__main__":
    given = [int(float(n)) for n in sys.argv[1:] if n != "--quick"]
    is_quick = "--quick" in sys.argv
    main(given or (QUICK_SIZES if is_quick else SIZES), quick=is_quick)
