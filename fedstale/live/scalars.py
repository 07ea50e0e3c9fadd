"""A run as scalars for TensorBoard, beside whatever else is logged there.

The wall time of a point is device time, so TensorBoard's "relative" axis shows hours on devices.
The step is the model version for metrics, and whole seconds of device time for the rest.
"""

from pathlib import Path
from typing import Any

from fedstale.errors import ConfigError
from fedstale.live.watching import Moment


class Scalars:
    """A `Sink` that writes event files; close it at the end."""

    def __init__(self, folder: Path) -> None:
        """Open event files in a folder.

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
        self._failed = 0

    def moved(self, moment: Moment) -> None:
        """Write where the run is."""
        values: dict[str, float] = {
            "devices/online": moment.online,
            "devices/in flight": moment.n_in_flight,
            "jobs/came to nothing": self._failed,
        }
        if self._staleness:
            values["merges/mean staleness"] = sum(self._staleness) / len(self._staleness)
            self._staleness = []
        for name, value in values.items():
            self._writer.add_scalar(name, value, int(moment.now), walltime=moment.now)

    def measured(self, at: float, version: int, source: str, name: str, value: float) -> None:
        """Write a metric."""
        self._writer.add_scalar(f"{source}/{name}", value, version, walltime=at)

    def merged(self, at: float, staleness: float, weight: float) -> None:
        """Keep a staleness for the mean."""
        self._staleness.append(staleness)

    def failed(self, at: float, who: str, ending: str, reason: str) -> None:
        """Count a failure."""
        self._failed += 1

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
