"""What the server does: keep the networks of all pools, and evaluate each of them."""

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from fedstale.strategies import parse
from pools_app import task
from pools_app.stage import Pools, of_pool, with_prefix

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some versions."""
    config = context.run_config
    images, names, seed = task.images(config), task.pools(config), int(config["seed"])
    public, (test, labels) = images.public.numpy(), (x.numpy() for x in images.test)
    initial = ArrayRecord()
    for pool in names:
        arrays = task.network(pool, public.shape[-1], seed=seed).state_dict()
        initial.update(with_prefix(ArrayRecord(arrays), pool))

    def evaluate(version: int, arrays: ArrayRecord) -> MetricRecord:
        each = np.array([task.predict(pool, of_pool(arrays, pool), test) for pool in names])
        right = (each.argmax(axis=2) == labels).mean(axis=1).tolist()
        ensemble = (each.mean(axis=0).argmax(axis=1) == labels).mean()
        found = {f"accuracy_{pool}": one for pool, one in zip(names, right, strict=True)}
        about = {"accuracy": float(np.mean(right)), "ensemble_accuracy": float(ensemble)}
        return MetricRecord({**about, **found})

    strategy = parse(
        str(config["strategy"]),
        stages=[Pools(public, task.predict, every=int(config["exchange-every"]))],
        checkpoints=str(config["checkpoints"]) or None,
        resume=str(config["resume"]) or None,
        seed=seed,
    )
    strategy.start(
        grid=grid,
        initial_arrays=initial,
        num_rounds=int(config["num-server-rounds"]),
        timeout=float(config["round-timeout"]),
        evaluate_fn=evaluate,
    )
