"""Write the metrics of a run for TensorBoard, against the hours of its devices."""

from collections.abc import Mapping, Sequence

from flwr.app import ArrayRecord, Message
from torch.utils.tensorboard import SummaryWriter

import fedstale
from fedstale.live import Watcher
from fedstale.strategies import Runtime
from fedstale.strategies.types import ClientUpdate


class Scalars(Watcher):
    """Writes event files; a point's wall time is virtual time: look at the axis "relative"."""

    def __init__(self, folder: str) -> None:
        """Open event files in a folder."""
        super().__init__()
        self._writer = SummaryWriter(folder)
        self._staleness: list[int] = []
        self._failed: set[str] = set()

    def metrics(self, run: Runtime, version: int, source: str, values: Mapping[str, float]) -> None:
        """Write metrics, by the version of the model."""
        for name, value in values.items():
            self._writer.add_scalar(f"{source}/{name}", value, version, walltime=run.now())

    def new_version(
        self, run: Runtime, version: int, arrays: ArrayRecord, updates: Sequence[ClientUpdate]
    ) -> None:
        """Keep the staleness of updates for the mean."""
        self._staleness += [update.staleness for update in updates]

    def reply(self, run: Runtime, message_id: str, reply: Message, status: str) -> None:
        """Count a failure."""
        if reply.has_error():
            self._failed.add(message_id)

    def look(self, run: Runtime) -> None:
        """Write where the run is, a few times a second of wall time."""
        values = {
            "devices/online": run.n_online(),
            "devices/in flight": run.n_in_flight(),
            "jobs/failed": len(self._failed),
        }
        if self._staleness:
            values["aggregation/mean staleness"] = sum(self._staleness) / len(self._staleness)
            self._staleness = []
        for name, value in values.items():
            self._writer.add_scalar(name, value, int(run.now()), walltime=run.now())

    def ended(self, run: Runtime, status: str, reason: str) -> None:
        """Look once more, and close the files."""
        super().ended(run, status, reason)
        self._writer.close()


run = fedstale.simulate(
    "digits",
    traces="synthetic:60",
    until="30m",
    seed=1,
    run_config={"strategy": "FedBuff(10, 5)"},
    callbacks=[Scalars("boards/digits")],
)
print(f"{run.status}: {run.reason}; look at it with: tensorboard --logdir boards")
