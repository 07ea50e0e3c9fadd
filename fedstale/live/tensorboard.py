"""A run as scalars for TensorBoard, beside whatever else is logged there.

The wall time of a point is device time, so TensorBoard's "relative" axis shows hours on devices.
The step is the model version for metrics, and whole seconds of device time for the rest.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Message

from fedstale.errors import ConfigError
from fedstale.strategies.server.runtime import Callback, Pace, Runtime


class TensorBoard(Callback):
    """Writes event files; close it at the end."""

    def __init__(self, folder: Path, *, every_s: float = 0.25) -> None:
        """Open event files in a folder, and look at the clock every `every_s` s of wall time.

        Raises:
            ConfigError: TensorBoard is not installed, or the folder cannot be written to.
        """
        try:
            # An extra, and slow to import.
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
        except ImportError:
            raise ConfigError(
                f"tensorboard = {str(folder)!r} needs the package tensorboard: "
                "pip install 'fedstale[tensorboard]'"
            ) from None
        try:
            self._writer: Any = SummaryWriter(str(folder))
        except OSError as problem:
            raise ConfigError(
                f"tensorboard = {str(folder)!r} cannot be written to: {problem.strerror}"
            ) from None
        self._staleness: list[float] = []
        self._failed: set[str] = set()
        self._pace = Pace(every_s)

    def time_moved(self, run: Runtime) -> None:
        """Write where the run is, a few times a second."""
        if self._pace.is_due():
            self._look(run)

    def ended(self, run: Runtime, status: str, reason: str) -> None:
        """Write where the run ended."""
        self._look(run)

    def metrics(self, run: Runtime, version: int, source: str, values: Mapping[str, float]) -> None:
        """Write metrics."""
        for name, value in values.items():
            self._writer.add_scalar(f"{source}/{name}", value, version, walltime=run.now())

    def aggregated(
        self,
        run: Runtime,
        message_id: str,
        *,
        base_version: int,
        version: int,
        staleness: int,
        weight: float,
    ) -> None:
        """Keep a staleness for the mean."""
        self._staleness.append(staleness)

    def reply(self, run: Runtime, message_id: str, reply: Message, status: str) -> None:
        """Count a failure."""
        if reply.has_error():
            self._failed.add(message_id)

    def rejected(self, run: Runtime, message_id: str, *, reason: str) -> None:
        """Count a reply that was not used."""
        self._failed.add(message_id)

    def _look(self, run: Runtime) -> None:
        now = run.now()
        values: dict[str, float] = {
            "devices/online": run.n_online(),
            "devices/in flight": run.n_in_flight(),
            "jobs/came to nothing": len(self._failed),
        }
        if self._staleness:
            values["aggregation/mean staleness"] = sum(self._staleness) / len(self._staleness)
            self._staleness = []
        for name, value in values.items():
            self._writer.add_scalar(name, value, int(now), walltime=now)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
