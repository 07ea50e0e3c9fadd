"""Send the metrics of a run to MLflow."""

from collections.abc import Mapping

import mlflow

import fedstale
from fedstale.strategies import Callback, Runtime


class Tracker(Callback):
    """Logs each metric when it is measured, and how the run ended."""

    def metrics(self, run: Runtime, version: int, source: str, values: Mapping[str, float]) -> None:
        """Log the metrics of a version by their source: server, evaluate or train."""
        named = {f"{source}/{name}": value for name, value in values.items()}
        mlflow.log_metrics({**named, "hours": run.now() / 3600}, step=version)

    def ended(self, run: Runtime, status: str, reason: str) -> None:
        """Close the run of MLflow."""
        mlflow.set_tags({"status": status, "reason": reason})
        mlflow.end_run("FAILED" if status == "failed" else "FINISHED")


SETTINGS = {"app": "digits", "traces": "synthetic:60", "until": "30m", "seed": 1}

mlflow.set_experiment("fedstale")
mlflow.start_run()
mlflow.log_params(SETTINGS)
run = fedstale.simulate(**SETTINGS, callbacks=[Tracker()])
print(f"{run.status}: {run.reason}")
