"""Intervals that hold on each device: quantiles corrected online by the device's own outcomes.

A forecaster's quantiles are right on average over the fleet that it was trained on. Here each
device keeps one number for each end of each interval, the miscoverage that it takes of the fleet's
calibration scores, and moves it after every outcome: up a little when the end held, down when it
did not. Over time every device gets the coverage that it was promised, whatever its distribution;
that takes long where a device has a job a day.

Reference:
    Gibbs, Candes. Adaptive Conformal Inference Under Distribution Shift. NeurIPS 2021: the set
    {y : S(x, y) <= Q(1 - a_t)} with a_{t+1} = a_t + gamma (a - err_t).

Differences from the paper:
    - The two ends are corrected apart, so that both miss equally often.
    - a_t outside (0, 1) takes an infinite or an empty set there; here the largest or smallest
      calibration score is used, since an infinite forecast is of no use.
    - Scores are differences of logarithms: a slow device errs by more seconds than a fast one.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fedstale.errors import ConfigError
from fedstale.traces import Array
from fedstale.traces.forecast.survival import PHASES, JobForecast

_GRID = np.linspace(0.0, 1.0, 201)
_LEAST_S = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptation:
    """How devices adapt."""

    miss: float = 0.1
    """How often each end may be passed, in (0, 0.5)."""
    step: float = 0.05
    """gamma: how far one outcome moves a device, >= 0; 0 keeps the fleet's correction."""

    def __post_init__(self) -> None:
        if not 0.0 < self.miss < 0.5:
            raise ConfigError(f"adaptation.miss = {self.miss}: expected a share in (0, 0.5)")
        if not (np.isfinite(self.step) and self.step >= 0):
            raise ConfigError(f"adaptation.step = {self.step}: expected a number >= 0")


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

    def corrected(self, devices: npt.ArrayLike, forecast: JobForecast) -> JobForecast:
        """Return the forecast with the outer quantiles of every time corrected.

        Args:
            devices: device of each forecast; shape (n,).
            forecast: of shape n.
        """
        devices = np.asarray(devices, dtype=np.int64)
        level = 1.0 - self.miscoverage[devices]
        shift = np.empty(level.shape)
        for p, end in np.ndindex(level.shape[1:]):
            shift[:, p, end] = np.interp(level[:, p, end], _GRID, self.scores[p, end])
        low, middle, high = np.moveaxis(forecast.times_s, -1, 0)
        low = np.minimum(low * np.exp(-shift[..., 0]), middle)
        high = np.maximum(high * np.exp(shift[..., 1]), middle)
        return replace(forecast, times_s=np.stack([low, middle, high], axis=-1))

    def learn(self, devices: npt.ArrayLike, forecast: JobForecast, outcome: Array) -> None:
        """Move each device by one outcome of its own.

        Args:
            devices: distinct; shape (n,).
            forecast: corrected, as it was given when the job was sent; of shape n.
            outcome: what the times were, in s, NaN where a phase was not finished; shape (n, 3).
        """
        devices = np.asarray(devices, dtype=np.int64)
        miss, gamma = self.adaptation.miss, self.adaptation.step
        known, quantiles = np.isfinite(outcome), forecast.times_s
        missed = np.stack([outcome < quantiles[..., 0], outcome > quantiles[..., 2]], axis=-1)
        before = self.miscoverage[devices]
        moved = np.clip(before + gamma * (miss - missed), -gamma, 1.0 + gamma)
        self.miscoverage[devices] = np.where(known[..., None], moved, before)


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
    y = np.log(np.maximum(outcome, _LEAST_S))
    quantiles = np.log(np.maximum(forecast.times_s, _LEAST_S))
    outside = np.stack([quantiles[..., 0] - y, y - quantiles[..., 2]], axis=-1)
    scores = np.zeros((len(PHASES), 2, _GRID.size))
    for p, end in np.ndindex(scores.shape[:2]):
        known = outside[np.isfinite(outcome[:, p]), p, end]
        if known.size:
            scores[p, end] = np.quantile(known, _GRID)
    return scores
