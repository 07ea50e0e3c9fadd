"""Does an update itself tell how badly a device's data are learnt, as its stated loss does?

Recorded phones that no test plays train digits under random selection. For each update the model's
true loss on the mixture of digits that its device holds, at the version that it was sent, is held
against the training loss that the device stated, the norm of its update, and the other `evidence`.
The constants of `update_norms` in the learning proxy are the fit printed here.

Run it with: OMP_NUM_THREADS=1 python benchmarks/update_norms.py RECORDINGS
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import agent_training
import numpy as np
from evidence import EVIDENCE, Evidence, losses_by, public_loss
from recorded_fleets import ASSUMED, fleets
from results_file import write_result
from scipy.ndimage import uniform_filter1d
from scipy.stats import spearmanr
from selection_training import FIRST_NODE, Window, train
from threadpoolctl import threadpool_limits
from training_apps import TrainingApp, opened

from fedstale.agents.env.forecast_table import NoForecasts
from fedstale.strategies.selection import Random
from fedstale.strategies.server.reputation import Losses, Reputation
from fedstale.strategies.types import ClientUpdate
from fedstale.traces.arrays import Array

SKEWS, SEEDS = (0.1, 0.3, 1.0), range(321, 325)
TELLING = ("stated", "norm", *EVIDENCE)
COLUMNS = ("true", "examples", *TELLING)
BY_RANKS, AROUND = "_by_ranks", 21


def updates(app: TrainingApp, window: Window, skew: float, schedule: str) -> Array:
    """Return what is known of each update, by `COLUMNS`; shape (n, columns)."""
    heard: list[tuple[int, int, tuple[float, ...]]] = []
    plain = Reputation.losses
    evidence = Evidence(public_loss(app, window.seed))

    def losses(
        self: Reputation, update: ClientUpdate, *, stated: float, stated_square: float
    ) -> Losses:
        told = evidence.of(update)
        known = update.examples, stated, update.norm, *(told[name] for name in EVIDENCE)
        heard.append((update.node_id - FIRST_NODE, update.base_version, known))
        return plain(self, update, stated=stated, stated_square=stated_square)

    with losses_by(losses), threadpool_limits(1):
        trained = train(
            window, app, skew, Random(), forecasts=NoForecasts(),
            strategy=partial(agent_training.SCHEDULES[schedule], concurrency=4),
        )  # fmt: skip
    labels = app.labels(window.n_devices, skew, window.seed)  # type: ignore[attr-defined]
    shares = np.array([np.bincount(y, minlength=10) / len(y) for y in labels])
    return np.array(
        [
            (shares[device] @ trained.losses[version], *known)
            for device, version, known in heard
            if version < len(trained.losses)
        ]
    )


def fitted(runs: Sequence[Array]) -> dict[str, float]:
    """Return correlations of logarithms, the fit of norms, and how each number ranks devices.

    Losses fall while a run goes on, and so does most else. What ranks devices is how far a number
    lies above those of the updates around it; `BY_RANKS` is Spearman's of that and the true loss.
    """
    logs = np.log(np.maximum(np.concatenate(runs)[:, :4], 1e-12))
    true, examples, stated, norm = logs[np.isfinite(logs).all(axis=1)].T
    design = np.column_stack([true, examples, np.ones(true.size)])
    power, of_examples, constant = np.linalg.lstsq(design, norm, rcond=None)[0]
    spread = (norm - design @ (power, of_examples, constant)).std()
    numbers = {
        "stated_to_true": np.corrcoef(true, stated)[0, 1],
        "norm_to_true": np.corrcoef(true, norm)[0, 1],
        "power": power,
        "examples": of_examples,
        "noise": spread,
    }
    above = np.concatenate([run - uniform_filter1d(run, AROUND, axis=0) for run in runs])
    for column, name in enumerate(COLUMNS):
        if name in TELLING:
            numbers[name + BY_RANKS] = spearmanr(above[:, 0], above[:, column]).statistic
    return {"updates": true.size, **{k: round(float(x), 3) for k, x in numbers.items()}}


def main() -> None:
    """Train, fit, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    options = parser.parse_args()
    traces = fleets(options.recordings, seed=0, kind="phones", assumed=ASSUMED)["learn"]
    drawn = agent_training.windows(traces, "phones", SEEDS)
    app, parts = opened("digits"), {}
    for skew in SKEWS:
        parts[str(skew)] = [
            updates(app, window, skew, schedule)
            for schedule in ("fedavg", "fedbuff")
            for window in drawn
        ]
    parts["all"] = [run for runs in parts.values() for run in runs]
    rows = [{"skew": skew, **fitted(runs)} for skew, runs in parts.items()]
    for row in rows:
        print(row, flush=True)
    command = "OMP_NUM_THREADS=1 python benchmarks/update_norms.py RECORDINGS"
    print(write_result("update_norms", rows, command=command))


if __name__ == "__main__":
    main()
