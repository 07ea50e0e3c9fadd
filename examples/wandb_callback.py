"""Send the metrics of a run to Weights & Biases, against the hours of its devices."""

from collections.abc import Mapping

import wandb

import fedstale
from fedstale.strategies import Callback, Runtime


class Tracker(Callback):
    """Logs each metric when it is measured, and how the run ended."""

    def metrics(self, run: Runtime, version: int, source: str, values: Mapping[str, float]) -> None:
        """Log the metrics of a version by their source: server, evaluate or train."""
        named = {f"{source}/{name}": value for name, value in values.items()}
        wandb.log({**named, "version": version, "hours": run.now() / 3600})

    def ended(self, run: Runtime, status: str, reason: str) -> None:
        """Close the run of Weights & Biases."""
        wandb.summary.update({"status": status, "reason": reason})
        wandb.finish(exit_code=int(status == "failed"))


SETTINGS = {"app": "digits", "traces": "synthetic:60", "until": "30m", "seed": 1}

wandb.init(project="fedstale", config=SETTINGS)
wandb.define_metric("*", step_metric="hours")  # not the number of the call
run = fedstale.simulate(**SETTINGS, callbacks=[Tracker()])
print(f"{run.status}: {run.reason}")
