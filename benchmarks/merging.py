"""How fast are late updates merged: against the machine's memory, and for each reply.

The first part merges updates of a 25-million-parameter model with a gap for each parameter, and
compares the bytes it must move (update, current and base model, typical steps, running sum)
with what NumPy streams on this machine when it adds one large array to another. The second part
runs a whole `StaleStrategy` with 10,000 jobs in flight over a grid that costs nearly nothing, and
divides the time by the replies.

Run it with: python benchmarks/merging.py [--quick]
"""

import argparse
import time
import tracemalloc
from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from results_file import write_result

from fedstale.simulation.compat import Run, identity
from fedstale.strategies import FedBuff, Gap, GapAware, StaleStrategy, Update
from fedstale.strategies.arrays import add_scaled

FLOAT_BYTES = 4


def stream_bytes_per_s(n: int, repeats: int) -> float:
    """Return the bytes a second of a += b over arrays that no cache holds: two reads, one write."""
    a, b = np.zeros(n, np.float32), np.ones(n, np.float32)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        np.add(a, b, out=a)
        times.append(time.perf_counter() - started)
    return 3 * FLOAT_BYTES * n / min(times)


def merge_gap(n: int, n_updates: int) -> dict[str, float]:
    """Return what merging late updates takes.

    Args:
        n: parameters of the model.
        n_updates: updates to merge.
    """
    rng = np.random.default_rng(0)
    base = {"w": rng.standard_normal(n, np.float32)}
    now = {"w": base["w"] + np.float32(0.01) * rng.standard_normal(n, np.float32)}
    gap = Gap()
    gap.observe(base, now, 1.0)
    total = {"w": np.zeros(n, np.float32)}
    delta = rng.standard_normal(n, np.float32)
    times, peaks = [], []
    for k in range(n_updates):
        update = {"w": delta.copy()}
        if k == 0:
            tracemalloc.start()
        started = time.perf_counter()
        gap.weigh(Update(delta=update, base=base, current=now, staleness=5))
        add_scaled(total, update, 1.0)
        times.append(time.perf_counter() - started)
        if k == 0:
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    # Each is read once; the update and the sum are written, and the update is read again.
    touched = FLOAT_BYTES * n * (5 + 3)
    return {
        "parameters": n,
        "updates": n_updates,
        "s_per_update": float(np.median(times[1:])),
        "bytes_per_s": touched / float(np.median(times[1:])),
        "temporary_bytes": float(max(peaks)),
    }


class EchoGrid(Grid):
    """Answers each message at once with the arrays that it carried, some replies a pull."""

    def __init__(self, n_nodes: int, per_pull: int) -> None:
        """Set the number of nodes, and of replies for each pull."""
        self.nodes, self.per_pull = range(2, n_nodes + 2), per_pull
        self.waiting: list[Message] = []
        self.n_replies, self.seconds, self.n_sent = 0, 0.0, 0
        self.metrics = MetricRecord({"num-examples": 1, "train_loss": 1.0})

    def set_run(self, run: Run) -> None:
        """Ignore the run."""

    @property
    def run(self) -> Run:
        """There is none."""
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:  # noqa: ANN401 - unused
        """Old apps only."""
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        """Everybody is online."""
        return self.nodes

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Keep the messages."""
        started = time.perf_counter()
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"m{self.n_sent}"
            ids.append(message.metadata.message_id)
            self.waiting.append(message)
            self.n_sent += 1
        self.seconds += time.perf_counter() - started
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answer the oldest."""
        started = time.perf_counter()
        now, self.waiting = self.waiting[: self.per_pull], self.waiting[self.per_pull :]
        replies = []
        for message in now:
            content = RecordDict({"arrays": message.content["arrays"], "metrics": self.metrics})
            replies.append(Message(content, reply_to=message))
        self.n_replies += len(replies)
        self.seconds += time.perf_counter() - started
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
    """Return the server's own time for each reply, without the grid's."""
    grid = EchoGrid(n_nodes=20_000, per_pull=per_pull)
    initial = ArrayRecord({"w": Array(np.zeros(1000, np.float32))})
    with identity(1):
        started = time.perf_counter()
        strategy.start(grid, initial, num_rounds=n_versions)
        spent = time.perf_counter() - started - grid.seconds
    return {"ms_per_reply": 1e3 * spent / grid.n_replies, "replies": float(grid.n_replies)}


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the model and replies")
    quick = parser.parse_args().quick
    n, versions = (2_500_000, 200) if quick else (25_000_000, 2000)
    rows: list[dict[str, object]] = []
    stream = stream_bytes_per_s(n, 5)
    print(f"streaming: {stream / 1e9:.2f} GB/s")
    for n_updates in (10,) if quick else (10, 100):
        row = merge_gap(n, n_updates)
        share = row["bytes_per_s"] / stream
        print(
            f"{n_updates:4d} updates of {n:,}: {row['s_per_update'] * 1e3:.1f} ms each, "
            f"{share:.0%} of streaming, {row['temporary_bytes'] / 1e6:.2f} MB of temporaries"
        )
        rows.append(row | {"stream_bytes_per_s": stream, "share_of_streaming": share})
    for name, strategy in (
        ("FedBuff", FedBuff(10_000, 100)),
        ("GapAware", GapAware(10_000, 100)),
    ):
        for per_pull in (10, 100):
            found = per_reply(strategy, versions // 10, per_pull)
            print(f"{name}, {per_pull} a pull: {found['ms_per_reply']:.3f} ms a reply")
            rows.append({"strategy": name, "in_flight": 10_000, "per_pull": per_pull} | found)
    write_result("merging", rows, command="python benchmarks/merging.py")


if __name__ == "__main__":
    main()
