"""How fast are late updates merged: against the machine's memory, and for each reply.

The first part merges updates of a 25-million-parameter model with a gap for each parameter, and
compares the bytes it must move (update, current and base model, typical steps, running sum)
with what NumPy streams on this machine when it adds one large array to another. The second part
runs a whole `StaleStrategy` with 10,000 jobs in flight over a grid that costs nearly nothing, and
divides the time by the replies.

Run it with: python benchmarks/speed/merging.py [--quick]
"""

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedstale.flower import identity
from fedstale.strategies import FedBuff, GapAware, StaleStrategy
from fedstale.strategies.server import SuperLinkGrid
from fedstale.strategies.types import NodeSet, add_scaled, n_threads
from fedstale.strategies.weighting import ClientUpdate, Gap

sys.path.append(str(Path(__file__).parents[1]))
from lab.results import write_result
from speed.batched import naive_clients_per_s

FLOAT_BYTES = 4
MERGE_FLOATS = 8
"""Floats moved for each parameter of an update: weighing reads the update, both models and C, and
writes the update; adding reads the update and the sum, and writes the sum."""


def stream_s(n: int, n_threads: int) -> Callable[[], float]:
    """Return a measurement of a += b in float32, over arrays that no cache holds.

    Args:
        n: elements; 12 bytes each are counted, two reads and a write.
        n_threads: each adds a part of its own.

    Returns:
        What adds once, and returns the seconds that it took.
    """
    a, b = np.zeros(n, np.float32), np.ones(n, np.float32)
    parts = [slice(n * k // n_threads, n * (k + 1) // n_threads) for k in range(n_threads)]
    pool = ThreadPoolExecutor(n_threads)

    def measure() -> float:
        started = time.perf_counter()
        list(pool.map(lambda part: np.add(a[part], b[part], out=a[part]), parts))
        return time.perf_counter() - started

    return measure


def merge_gap(n: int, n_updates: int) -> dict[str, float]:
    """Return what merging late updates takes, and what streaming takes in the same moments.

    One thread streams, all threads stream, and an update is merged, in turn: other users of the
    machine then slow all three alike. Each rate is the one of the median time.

    Args:
        n: parameters of the model.
        n_updates: updates to merge.
    """
    rng = np.random.default_rng(0)
    base = {"w": rng.standard_normal(n, np.float32)}
    now = {"w": base["w"] + np.float32(0.01) * rng.standard_normal(n, np.float32)}
    total, delta = {"w": np.zeros(n, np.float32)}, {"w": rng.standard_normal(n, np.float32)}
    update = {"w": np.empty(n, np.float32)}
    gap = Gap()
    gap.observe(base, now, 1.0)
    late = ClientUpdate(delta=update, base=base, current=now, staleness=5)

    def merge() -> float:
        np.copyto(update["w"], delta["w"])
        started = time.perf_counter()
        gap.weigh(late)
        add_scaled(total, update, 1.0)
        return time.perf_counter() - started

    merge()  # works out C, which all updates of a merge share, and compiles
    tracemalloc.start()
    merge()
    temporary_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    ways = (stream_s(n, 1), stream_s(n, n_threads()), merge)
    one, every, spent = np.median([[way() for way in ways] for _ in range(n_updates)], axis=0)
    streamed, merged = 3 * FLOAT_BYTES * n, MERGE_FLOATS * FLOAT_BYTES * n
    return {
        "parameters": n,
        "updates": n_updates,
        "threads": n_threads(),
        "s_per_update": float(spent),
        "bytes_per_s": merged / float(spent),
        "stream_bytes_per_s_one_thread": streamed / float(one),
        "stream_bytes_per_s": streamed / float(every),
        "share_of_streaming": merged / float(spent) * float(every) / streamed,
        "temporary_bytes": float(temporary_bytes),
    }


class EchoGrid(Grid):
    """Answers each message at once with the arrays that it carried, some replies a pull."""

    def __init__(self, n_nodes: int, per_pull: int) -> None:
        """Set the number of nodes, and of replies for each pull."""
        self.nodes = NodeSet.of(np.arange(2, n_nodes + 2, dtype=np.uint64))
        self.per_pull = per_pull
        self.waiting: list[Message] = []
        self.n_replies, self.seconds, self.n_sent = 0, 0.0, 0
        self.marks: list[tuple[int, float]] = []
        """At each pull, the replies so far, and the CPU seconds that were not the grid's own."""
        self.metrics = MetricRecord({"num-examples": 1, "train_loss": 1.0})

    def set_run(self, run: Run) -> None:
        """Ignore the run."""

    @property
    def run(self) -> Run:
        """There is none."""
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Old apps only."""
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        """Everybody is online."""
        return self.nodes.ids.tolist()

    def online_nodes(self) -> NodeSet:
        """Everybody is online."""
        return self.nodes

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Keep the messages."""
        started = time.thread_time()
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"m{self.n_sent}"
            ids.append(message.metadata.message_id)
            self.waiting.append(message)
            self.n_sent += 1
        self.seconds += time.thread_time() - started
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answer the oldest."""
        started = time.thread_time()
        self.marks.append((self.n_replies, started - self.seconds))
        now, self.waiting = self.waiting[: self.per_pull], self.waiting[self.per_pull :]
        replies = []
        for message in now:
            content = RecordDict({"arrays": message.content["arrays"], "metrics": self.metrics})
            replies.append(Message(content, reply_to=message))
        self.n_replies += len(replies)
        self.seconds += time.thread_time() - started
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Not used by an event loop."""
        raise NotImplementedError

    def now(self) -> float:
        """Time stands still, so that nothing times out."""
        return 0.0

    def wait(self, until: float) -> bool:
        """There is always something."""
        return True


def per_reply(strategy: StaleStrategy, n_versions: int, per_pull: int) -> dict[str, float]:
    """Return the server's own CPU time for each reply, from the first pull to the last one.

    It holds all that a reply leads to: the check, the merge, its share of a step and of
    finding out who is free, and the next message. Of the grid and of the start nothing is in it.
    """
    grid = EchoGrid(n_nodes=20_000, per_pull=per_pull)
    initial = ArrayRecord({"w": Array(np.zeros(1000, np.float32))})
    with identity(1):
        strategy.start(SuperLinkGrid(grid, clock=grid), initial, num_rounds=n_versions)
    (first, begun), (last, ended) = grid.marks[0], grid.marks[-1]
    return {"ms_per_reply": 1e3 * (ended - begun) / (last - first), "replies": float(last - first)}


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the model and replies")
    quick = parser.parse_args().quick
    n, versions = (2_500_000, 200) if quick else (25_000_000, 2000)
    rows: list[dict[str, object]] = []
    for n_updates in (10,) if quick else (10, 100):
        row = merge_gap(n, n_updates)
        print(
            f"{n_updates:4d} updates of {n:,}: {row['s_per_update'] * 1e3:.1f} ms each, "
            f"{row['bytes_per_s'] / 1e9:.1f} GB/s, {row['share_of_streaming']:.0%} of streaming "
            f"with {row['threads']} threads ({row['stream_bytes_per_s'] / 1e9:.1f} GB/s; with one "
            f"{row['stream_bytes_per_s_one_thread'] / 1e9:.1f}), "
            f"{row['temporary_bytes'] / 1e6:.2f} MB of temporaries"
        )
        rows.append(row)
    for name, strategy in (
        ("FedBuff", FedBuff(10_000, 100)),
        ("GapAware", GapAware(10_000, 100)),
    ):
        for per_pull in (10, 100):
            found = per_reply(strategy, versions // 10, per_pull)
            print(f"{name}, {per_pull} a pull: {found['ms_per_reply']:.3f} ms a reply")
            rows.append({"strategy": name, "concurrency": 10_000, "per_pull": per_pull} | found)
    torch.set_num_threads(1)
    speed = naive_clients_per_s()
    command = "python benchmarks/speed/merging.py"
    write_result("merging", rows, command=command, speed=speed, quick=quick)


if __name__ == "__main__":
    main()
