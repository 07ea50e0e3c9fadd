"""Does the norm of an update tell how badly a device's data are learnt, as its stated loss does?

Recorded phones that no test plays train digits under random selection. For each update the model's
true loss on the mixture of digits that its device holds, at the version that it was sent, is held
against the training loss that the device stated and against the norm of its update. The constants
of `update_norms` in the learning proxy are the fit printed here.

Run it with: OMP_NUM_THREADS=1 python benchmarks/update_norms.py RECORDINGS
"""

import argparse
from functools import partial
from pathlib import Path

import agent_training
import numpy as np
from recorded_fleets import ASSUMED, fleets
from results_file import write_result
from selection_training import FIRST_NODE, Window, train
from threadpoolctl import threadpool_limits
from training_apps import TrainingApp, opened

from fedstale.agents.env.forecast_table import NoForecasts
from fedstale.strategies.selection import Random
from fedstale.strategies.server.reputation import Losses, Reputation
from fedstale.strategies.weighting.base import ClientUpdate
from fedstale.traces.arrays import Array

SKEWS, SEEDS = (0.1, 0.3, 1.0), range(321, 325)


def updates(app: TrainingApp, window: Window, skew: float, schedule: str) -> Array:
    """Return logarithms of true loss, examples, stated loss and norm of each update; (n, 4)."""
    heard: list[tuple[int, int, float, float, float]] = []
    plain = Reputation.losses

    def losses(
        self: Reputation, update: ClientUpdate, *, stated: float, stated_square: float
    ) -> Losses:
        device = update.node_id - FIRST_NODE
        heard.append((device, update.base_version, update.examples, stated, update.norm))
        return plain(self, update, stated=stated, stated_square=stated_square)

    Reputation.losses = losses  # type: ignore[method-assign]
    try:
        with threadpool_limits(1):
            trained = train(
                window, app, skew, Random(), forecasts=NoForecasts(),
                strategy=partial(agent_training.SCHEDULES[schedule], concurrency=4),
            )  # fmt: skip
    finally:
        Reputation.losses = plain  # type: ignore[method-assign]
    labels = app.labels(window.n_devices, skew, window.seed)  # type: ignore[attr-defined]
    shares = np.array([np.bincount(y, minlength=10) / len(y) for y in labels])
    rows = [
        (shares[device] @ trained.losses[version], examples, stated, norm)
        for device, version, examples, stated, norm in heard
        if version < len(trained.losses)
    ]
    logs = np.log(np.maximum(np.array(rows), 1e-12))
    return logs[np.isfinite(logs).all(axis=1)]


def fitted(found: Array) -> dict[str, float]:
    """Return correlations with the true loss, and the fit of norms."""
    true, examples, stated, norm = found.T
    design = np.column_stack([true, examples, np.ones(len(found))])
    power, of_examples, constant = np.linalg.lstsq(design, norm, rcond=None)[0]
    spread = (norm - design @ (power, of_examples, constant)).std()
    numbers = {
        "stated_to_true": np.corrcoef(true, stated)[0, 1],
        "norm_to_true": np.corrcoef(true, norm)[0, 1],
        "power": power,
        "examples": of_examples,
        "noise": spread,
    }
    return {"updates": len(found), **{k: round(float(x), 3) for k, x in numbers.items()}}


def main() -> None:
    """Train, fit, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    options = parser.parse_args()
    traces = fleets(options.recordings, seed=0, kind="phones", assumed=ASSUMED)["learn"]
    drawn = agent_training.windows(traces, "phones", SEEDS)
    app, parts = opened("digits"), {}
    for skew in SKEWS:
        runs = [
            updates(app, window, skew, schedule)
            for schedule in ("fedavg", "fedbuff")
            for window in drawn
        ]
        parts[str(skew)] = np.concatenate(runs)
    parts["all"] = np.concatenate(list(parts.values()))
    rows = [{"skew": skew, **fitted(found)} for skew, found in parts.items()]
    for row in rows:
        print(row, flush=True)
    command = "OMP_NUM_THREADS=1 python benchmarks/update_norms.py RECORDINGS"
    print(write_result("update_norms", rows, command=command))


if __name__ == "__main__":
    main()
