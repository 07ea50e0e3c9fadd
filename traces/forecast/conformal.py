"""Intervals that hold on each device: quantiles corrected online by the device's own outcomes.

A forecaster's quantiles are right on average over the fleet that it was trained on. Here each
device keeps one number for each end of each interval, the miscoverage that it takes of the fleet's
calibration scores, and moves it after every outcome: up a little when the end held, down when it
did not. Over time every device gets the coverage that it was promised, whatever its distribution;
that takes long where a device has a job a day. A number that the whole fleet shares, moved by the
outcomes of all devices, is right within hours, but for the mean of the fleet alone.

Reference:
    Gibbs, Candes. Adaptive Conformal Inference Under Distribution Shift. NeurIPS 2021: the set
    {y : S(x, y) <= Q(1 - a_t)} with a_{t+1} = a_t + gamma (a - err_t).

Differences from the paper:
    - The two ends are corrected apart, so that both miss equally often.
    - a_t outside (0, 1) takes an infinite or an empty set there; here the largest or smallest
      calibration score is used, since an infinite forecast is of no use.
    - Scores are differences of logarithms: a slow device errs by more seconds than a fast one.
    - The number that the fleet shares adds to each device's own. The devices then have to report,
      for each end of each interval, whether it held.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fedstale.errors import ConfigError
from fedstale.traces.arrays import Array
from fedstale.traces.forecast.survival import JobForecast

PHASES = ("training_s", "reporting_s", "total_s")
"""What is corrected, in the order of the second axis of `miscoverage`."""
_GRID = np.linspace(0.0, 1.0, 201)
_LEAST_S = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptation:
    """How devices adapt."""

    miss: float = 0.1
    """How often each end may be passed, in (0, 0.5)."""
    step: float = 0.05
    """gamma: how far one outcome moves a device, >= 0; 0 keeps the fleet's correction."""

    shared_step: float = 0.0
    """How far one outcome moves all devices, >= 0; 0 where devices do not report their outcomes."""

    def __post_init__(self) -> None:
        if not 0.0 < self.miss < 0.5:
            raise ConfigError(f"adaptation.miss = {self.miss}: expected a share in (0, 0.5)")
        for name in ("step", "shared_step"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise ConfigError(f"adaptation.{name} = {value}: expected a number >= 0")


class Calibration:
    """Corrects the intervals of n devices by their own outcomes.

    Args:
        n_devices: number of devices.
        scores: quantiles of the fleet's scores on `linspace(0, 1, 201)`; shape (3, 2, 201), by
            phase and by end; made by `fleet_scores`.
        adaptation: how devices adapt.
    """

    def __init__(self, n_devices: int, scores: Array, adaptation: Adaptation | None = None) -> None:
        self.adaptation = adaptation or Adaptation()
        self.scores = scores
        self.miscoverage: Array = np.full((n_devices, len(PHASES), 2), self.adaptation.miss)
        self.shared: Array = np.zeros((len(PHASES), 2))

    def corrected(self, devices: npt.ArrayLike, forecast: JobForecast) -> JobForecast:
        """Return the forecast with the outer quantiles of every time corrected.

        Args:
            devices: device of each forecast; shape (n,).
            forecast: of shape n.
        """
        devices = np.asarray(devices, dtype=np.int64)
        times = {}
        for p, phase in enumerate(PHASES):
            quantiles = getattr(forecast, phase)
            low, high = (
                np.interp(
                    1.0 - self.miscoverage[devices, p, end] - self.shared[p, end],
                    _GRID,
                    self.scores[p, end],
                )
                for end in (0, 1)
            )
            middle = quantiles[:, 1]
            times[phase] = np.stack(
                [
                    np.minimum(quantiles[:, 0] * np.exp(-low), middle),
                    middle,
                    np.maximum(quantiles[:, 2] * np.exp(high), middle),
                ],
                axis=1,
            )
        return replace(forecast, **times)

    def learn(self, devices: npt.ArrayLike, forecast: JobForecast, outcome: Array) -> None:
        """Move each device by one outcome of its own, and the fleet by all of them.

        Args:
            devices: distinct; shape (n,).
            forecast: corrected, as it was given when the job was sent; of shape n.
            outcome: what the times were, in s, NaN where a phase was not finished; shape (n, 3).
        """
        devices = np.asarray(devices, dtype=np.int64)
        miss, gamma = self.adaptation.miss, self.adaptation.step
        for p, phase in enumerate(PHASES):
            quantiles, y = getattr(forecast, phase), outcome[:, p]
            known = np.isfinite(y)
            below, above = y < quantiles[:, 0], y > quantiles[:, 2]
            for end, missed in ((0, below), (1, above)):
                before = self.miscoverage[devices, p, end]
                moved = np.clip(before + gamma * (miss - missed), -gamma, 1.0 + gamma)
                self.miscoverage[devices, p, end] = np.where(known, moved, before)
                if known.any():
                    # Many outcomes at once had the same numbers: half of the way is enough.
                    weight = min(self.adaptation.shared_step * int(known.sum()), 0.5)
                    moved_all = self.shared[p, end] + weight * float((miss - missed)[known].mean())
                    self.shared[p, end] = np.clip(moved_all, -1.5 * miss, 0.4)


def fleet_scores(forecast: JobForecast, outcome: Array) -> Array:
    """Return the quantiles of the scores of a fleet that was not trained on.

    A score is by how much, in logarithms, the truth lay outside an end; less than 0 is inside.

    Args:
        forecast: of n jobs.
        outcome: what the times were, in s, NaN where unknown; shape (n, 3).

    Returns:
        Shape (3, 2, 201), for `Calibration`. Zeros, which correct nothing, where no outcome is
        known.
    """
    scores = np.zeros((len(PHASES), 2, _GRID.size))
    for p, phase in enumerate(PHASES):
        known = np.isfinite(outcome[:, p])
        if not known.any():
            continue
        y = np.log(np.maximum(outcome[known, p], _LEAST_S))
        quantiles = np.log(np.maximum(getattr(forecast, phase)[known], _LEAST_S))
        for end, score in ((0, quantiles[:, 0] - y), (1, y - quantiles[:, 2])):
            scores[p, end] = np.quantile(score, _GRID)
    return scores
