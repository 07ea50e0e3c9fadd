"""Does a merge take as long as theory says: the runtime laws of Dutta et al., by `TraceGrid`.

A job takes a time X, exponential with rate 1 or that plus a constant. Both are made of ordinary
traces. The compute of a device comes in bursts at the instants of a Poisson process, each enough
for one job: whenever a job starts, the time to the next burst is exponential, because a Poisson
process has no memory. (Segments of random length and rate would not do: a job that starts within a
segment has seen a part of it pass.) The constant is a download over a link of constant rate.

The paper cancels the rest of a K-sync merge at once, and its workers start anew. Flower cannot
recall a message, and a device finishes what it does. With spare devices the law holds all the same:
the server forgets the rest, and sends to others that are free. So the synchronous schedules run on
a fleet several times larger than the jobs in flight. One row shows what is lost without any spare.

Reference:
    Dutta, Wang, Joshi. Slow and Stale Gradients Can Win the Race. IEEE JSAIT 2021.

Run it with: python benchmarks/papers/laws.py [--quick]
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from fedstale.simulation import Costs, Executor, TraceGrid
from fedstale.simulation.executors import ClientCall, ClientReply
from fedstale.strategies import StaleStrategy
from fedstale.strategies.schedule import Schedule, k_async, k_batch_async, k_batch_sync, k_sync
from fedstale.strategies.server.runtime import Callback, Runtime
from fedstale.strategies.types import ClientUpdate
from fedstale.traces import Availability, Series, TraceSet

sys.path.append(str(Path(__file__).parents[1]))
from lab.results import write_result

P, K = 8, 4
SPARE = 5 * P
SHIFT_S = 0.5
PERIOD_S = 2000.0
BURST_S = 1e-4
MODEL_BYTES = 10**12
"""So large that what a message holds besides the model does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """A schedule, and the mean time of its merges."""

    schedule: str
    shift_s: float
    """Constant part of a job's time; the rest is exponential with mean 1 s."""
    n_devices: int
    expected_s: float
    """What the law says; NaN where there is none."""
    at_most: bool = False
    """Whether the law is only an upper bound."""


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "K-sync": k_sync,
    "K-batch-sync": k_batch_sync,
    "K-async": k_async,
    "K-batch-async": k_batch_async,
}


def order_statistic(k: int, n: int) -> float:
    """Return the mean of the k-th smallest of n exponential times with mean 1.

    Example:
        >>> round(order_statistic(4, 8), 3)
        0.635
    """
    return sum(1.0 / i for i in range(n - k + 1, n + 1))


# The waiting of K-async is shorter than that of K-sync for times that are "new longer than used",
# and equal for exponential ones. K-batch-sync has a law for exponential times only.
LAWS = (
    Law(schedule="K-sync", shift_s=0.0, n_devices=SPARE, expected_s=order_statistic(K, P)),
    Law(schedule="K-batch-sync", shift_s=0.0, n_devices=SPARE, expected_s=K / P),
    Law(schedule="K-async", shift_s=0.0, n_devices=P, expected_s=order_statistic(K, P)),
    Law(schedule="K-batch-async", shift_s=0.0, n_devices=P, expected_s=K / P),
    Law(
        schedule="K-sync",
        shift_s=SHIFT_S,
        n_devices=SPARE,
        expected_s=SHIFT_S + order_statistic(K, P),
    ),
    Law(
        schedule="K-async",
        shift_s=SHIFT_S,
        n_devices=P,
        expected_s=SHIFT_S + order_statistic(K, P),
        at_most=True,
    ),
    Law(
        schedule="K-batch-async",
        shift_s=SHIFT_S,
        n_devices=P,
        expected_s=K / P * (SHIFT_S + 1.0),
    ),
    Law(schedule="K-sync", shift_s=0.0, n_devices=P, expected_s=nan),
)


def memoryless_devices(n: int, shift_s: float, seed: int) -> TraceSet:
    """Return devices on which each job takes shift_s plus an exponential time with mean 1 s."""
    rng = np.random.default_rng(seed)
    downlink = 8.0 * MODEL_BYTES / shift_s if shift_s else 1e300
    return TraceSet(
        device_ids=TraceSet.ideal(n).device_ids,
        availability=Availability.always(n),
        compute=Series.irregular([_bursts(rng) for _ in range(n)], np.full(n, PERIOD_S)),
        downlink=Series.constant(np.full(n, downlink)),
        uplink=Series.constant(np.full(n, 1e300)),
    )


def _bursts(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and rates of one period of bursts."""
    n = rng.poisson(PERIOD_S)
    at = np.sort(rng.uniform(1e-3, PERIOD_S - 1e-3, n))
    at = at[np.diff(at, prepend=-1.0) > 2 * BURST_S]
    # A bit more than a job needs: rounding must not leave it a hair short until the next burst.
    # What is left goes to the next job if that starts at once: it must stay far below a whole one.
    rates = np.tile([1.0001 / BURST_S, 0.0], len(at))
    starts = np.column_stack([at, at + BURST_S]).ravel()
    return np.concatenate([[0.0], starts]), np.concatenate([[0.0], rates])


class Echo(Executor):
    """Answers with the model that it was sent."""

    def run(self, calls: Sequence[ClientCall]) -> list[ClientReply]:
        """Return one example's worth of nothing."""
        metrics = MetricRecord({"num-examples": 1})
        return [
            ClientReply(
                Message(
                    RecordDict({"arrays": call.message.content["arrays"], "metrics": metrics}),
                    reply_to=call.message,
                ),
                call.context,
            )
            for call in calls
        ]


def simulated(law: Law, n_merges: int, seed: int) -> tuple[float, float]:
    """Return the mean time from merge to merge in s, and its standard error.

    The first tenth of the merges is left out, since all devices start together.
    """
    costs = Costs(work_per_example=1.0, epochs=1, examples=1, model_bytes=MODEL_BYTES)
    traces = memoryless_devices(law.n_devices, law.shift_s, seed)
    grid = TraceGrid(traces, Echo(), costs=costs, seed=seed)
    instants: list[float] = []

    class Instants(Callback):
        """Notes when there is a new model."""

        def new_version(
            self, run: Runtime, version: int, arrays: ArrayRecord, updates: Sequence[ClientUpdate]
        ) -> None:
            instants.append(run.now())

    grid.runtime.add(Instants())
    strategy = StaleStrategy(schedule=SCHEDULES[law.schedule](P, K), seed=seed)
    initial = ArrayRecord({"w": FlowerArray(np.zeros(1, np.float32))})
    with grid.running():
        strategy.start(grid, initial, num_rounds=n_merges, timeout=1e9)
    steps = np.diff(instants[n_merges // 10 :])
    # Neighbouring steps are not independent where jobs go on across a merge; blocks nearly are.
    blocks = np.array([block.mean() for block in np.array_split(steps, 20)])
    return float(steps.mean()), float(blocks.std(ddof=1) / np.sqrt(len(blocks)))


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the merges")
    quick = parser.parse_args().quick
    rows = []
    for law in LAWS:
        mean, error = simulated(law, 600 if quick else 4000, seed=1)
        print(
            f"{law.schedule:14s} shift {law.shift_s:.1f} devices {law.n_devices:2d}: "
            f"{mean:.3f} s +- {1.96 * error:.3f}, "
            f"law {'<= ' if law.at_most else ''}{law.expected_s:.3f}",
            flush=True,
        )
        rows.append(
            {
                "schedule": law.schedule,
                "shift_s": law.shift_s,
                "devices": law.n_devices,
                "simulated_s": mean,
                "half_interval_95": 1.96 * error,
                "law_s": None if np.isnan(law.expected_s) else law.expected_s,
                "law_is_bound": law.at_most,
            }
        )
    write_result("runtime", rows, command="python benchmarks/papers/laws.py", quick=quick)


if __name__ == "__main__":
    main()
