"""Error against time: AdaSync against every fixed merge size, on workers with exponential times.

Sixteen workers compute the gradient of one digit each, at the version that they last received, on a
network of 64-32-10 units; a gradient takes an exponential time with mean 1 s. A small merge size
steps often and ends at a loss that its noise sets; a large one steps seldom and ends lower. AdaSync
starts at 1 and grows, and should be on or below the best fixed size at nearly every time.

So that there is a noise to end at, every twentieth label of the training set is drawn at random: a
network that can fit every example has no noise left at the end, and then K = 1 is best throughout.
The loss is that of the whole training set, averaged over the last twenty seconds and over seeds.
The server's rate is the same for every merge size, as in the paper. `AdaSync` and its smoothing are
those of `fedstale.strategies`; only the loop is written out here, without devices or messages.

Reference:
    Dutta, Wang, Joshi. Slow and Stale Gradients Can Win the Race. IEEE JSAIT 2021, section 5.

Run it with: python benchmarks/papers/adasync.py [--quick]
"""

import argparse
import heapq
import sys
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import numpy as np
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

from fedstale.strategies.pace import AdaSync, Progress
from fedstale.strategies.types import Array, Model

sys.path.append(str(Path(__file__).parents[1]))
from lab.network import gradient, initial
from lab.results import write_result

P, RATE, WRONG = 16, 0.06, 0.05
FIXED, SEEDS = (1, 2, 4, 8, 16), (2, 3, 4, 5, 6)
HORIZON_S, GRID_S, WINDOW = 900.0, 2.0, 10
CLOSE = 1.05
"""A loss within this factor of the best fixed one counts as on it."""

Form = Literal["K-batch-async", "K-async"]
FORMS: dict[Form, AdaSync] = {
    "K-batch-async": AdaSync(P),
    "K-async": AdaSync(P, form="worker"),
}


def curve(form: Form, size: int | AdaSync, seed: int, horizon_s: float) -> Array:
    """Return the training loss over time, of shape (instants,).

    Args:
        form: whether a worker that is done gets work at once, or after the next merge.
        size: updates of a merge, or what decides them.
        seed: of the labels, the initial weights, the examples and the times.
        horizon_s: length in s.
    """
    rng = np.random.default_rng(seed)
    x, y = _data(rng)
    # As PyTorch draws them.
    model = initial(lambda n, shape: rng.uniform(-(n**-0.5), n**-0.5, shape).astype(np.float32))
    pace, n_due = deepcopy(size), 1 if isinstance(size, AdaSync) else size
    due = [(float(rng.exponential()), worker) for worker in range(P)]
    heapq.heapify(due)
    received = [model] * P
    merge: list[Model] = []
    losses: list[float] = []
    waiting: list[int] = []
    seen: list[float] = []
    while len(seen) < round(horizon_s / GRID_S):
        now, worker = heapq.heappop(due)
        while GRID_S * (len(seen) + 1) <= now:
            seen.append(gradient(model, x, y)[0])
        some = rng.integers(len(y), size=1)
        loss, change = gradient(received[worker], x[some], y[some])
        merge.append(change)
        losses.append(loss)
        waiting.append(worker)
        if len(merge) == n_due:
            step = np.float32(RATE / len(merge))
            model = {n: a - step * sum(g[n] for g in merge) for n, a in model.items()}
            if isinstance(pace, AdaSync):
                at = Progress(concurrency=P, buffer_size=1, loss=float(np.mean(losses)))
                n_due = pace.numbers(at)[1] or 1
            merge, losses = [], []
        if form == "K-batch-async" or not merge:
            for free in waiting:
                received[free] = model
                heapq.heappush(due, (now + float(rng.exponential()), free))
            waiting = []
    found = np.array(seen[: round(horizon_s / GRID_S)])
    padded = np.concatenate([np.repeat(found[:1], WINDOW - 1), found])
    return np.convolve(padded, np.ones(WINDOW) / WINDOW, mode="valid")


def _data(rng: np.random.Generator) -> tuple[Array, Array]:
    digits = load_digits()
    some = rng.permutation(len(digits.target))[len(digits.target) // 5 :]
    labels = digits.target[some]
    wrong = rng.random(len(labels)) < WRONG
    labels[wrong] = rng.integers(10, size=int(wrong.sum()))
    return (digits.data[some] / 16.0).astype(np.float32), labels


def curves(form: Form, seed: int, horizon_s: float) -> dict[str, Array]:
    """Return the curves of AdaSync and of every fixed size."""
    sizes: dict[str, int | AdaSync] = {f"K = {k}": k for k in FIXED}
    with threadpool_limits(1):
        return {
            name: curve(form, size, seed, horizon_s)
            for name, size in {**sizes, "AdaSync": FORMS[form]}.items()
        }


def rows(form: str, found: list[dict[str, Array]]) -> list[dict[str, object]]:
    """Return one row for each merge size: loss at some times, and all against the best fixed."""
    mean = {name: np.mean([each[name] for each in found], axis=0) for name in found[0]}
    best = np.min([mean[f"K = {k}"] for k in FIXED], axis=0)
    instants = GRID_S * np.arange(1, len(best) + 1)
    shown = [t for t in (20, 60, 120, 300, 600, 900) if t <= instants[-1]]
    result: list[dict[str, object]] = []
    for name, losses in mean.items():
        ratio = losses / best
        result.append(
            {
                "schedule": form,
                "buffer_size": name,
                "loss_at": {f"{t} s": round(float(losses[int(t / GRID_S) - 1]), 4) for t in shown},
                "share_of_time_on_or_below_the_best": float((ratio <= CLOSE).mean()),
                "worst_ratio": float(ratio.max()),
                "worst_at_s": float(instants[ratio.argmax()]),
                "mean_loss": float(losses.mean()),
            }
        )
    return result


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, a tenth of the time")
    quick = parser.parse_args().quick
    seeds, horizon_s = (SEEDS[:1], HORIZON_S / 10) if quick else (SEEDS, HORIZON_S)
    lines = []
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        jobs = {form: [pool.submit(curves, form, s, horizon_s) for s in seeds] for form in FORMS}
        for form, each in jobs.items():
            lines += rows(form, [job.result() for job in each])
    for line in lines:
        print(
            f"{line['schedule']:14s} {line['buffer_size']:8s} {line['loss_at']}  on or below best "
            f"{line['share_of_time_on_or_below_the_best']:.3f}  worst {line['worst_ratio']:.3f} "
            f"at {line['worst_at_s']:.0f} s  mean {line['mean_loss']:.3f}"
        )
    write_result("adasync", lines, command="python benchmarks/papers/adasync.py", quick=quick)


if __name__ == "__main__":
    main()
