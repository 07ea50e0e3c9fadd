"""When nothing happens: whether a strategy waits in vain, and how far the clock then moves.

A strategy that waits for nodes asks who is online, sleeps, and asks again. Nothing tells it from
one that loops in place but that nothing else comes between: so a question that is repeated moves
the clock, in steps that grow, and whoever has waited for a week without a job out is stopped.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedstale.strategies.server.runtime import RunEnded
from fedstale.traces.arrays import Mask

# A strategy that has sent nothing for this long is waiting for something that will not come.
_PATIENCE_S = 7 * 86_400.0
_LONGEST_STEP_S = 600.0

# A strategy that asks who is online this often at one instant is looping, not looking.
_LOOKS_OF_A_LOOP = 100


class StallDetection:
    """What a strategy has done since something last happened."""

    def __init__(self) -> None:
        """Begin at 0 s."""
        self._busy_at = self._step_s = self._looked_at = 0.0
        self._seen: Mask | None = None
        self._n_looks = self._most_online = 0

    def active(self, now: float) -> None:
        """Note that something has happened: the strategy is not waiting in vain."""
        self._busy_at, self._step_s, self._seen = now, 0.0, None

    def waited(self) -> None:
        """Note that the strategy waits for an instant: it is not looking for nodes."""
        self._seen = None

    def is_stalled(self, is_online: Mask, now: float) -> bool:
        """Return whether a look at who is online is one too many, with nothing else in between.

        Args:
            is_online: whom it would see, one of shape (devices,).
            now: the instant in s.
        """
        if self._seen is None or not np.array_equal(is_online, self._seen):
            self._n_looks = 0
            return False
        self._n_looks += 1
        return now > self._looked_at or self._n_looks >= _LOOKS_OF_A_LOOP

    def looked(self, is_online: Mask, now: float, n_online: int) -> None:
        """Note what the strategy has seen."""
        self._seen, self._looked_at = is_online, now
        self._most_online = max(self._most_online, n_online)

    def step_s(self) -> float:
        """Return how far to move now in s: further each time, so that few steps lead far."""
        self._step_s = min(max(2 * self._step_s, 1.0), _LONGEST_STEP_S)
        return self._step_s

    def check(self, now: float, n_devices: int) -> None:
        """Look whether a strategy without a job out has waited long enough.

        Raises:
            RunEnded: it has.
        """
        if now - self._busy_at > _PATIENCE_S:
            raise RunEnded(
                f"nothing happened for {_PATIENCE_S / 86_400:.0f} days of virtual time, in which "
                f"at most {self._most_online} of {n_devices} devices were seen online at once: "
                "let the strategy wait for fewer nodes, or use more devices",
                stuck=True,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return everything."""
        return {name.removeprefix("_"): value for name, value in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        for name in vars(self):
            setattr(self, name, state[name.removeprefix("_")])
