"""Differential privacy of the models that a server makes of stale updates.

Each update is clipped, each server step adds one draw of Gaussian noise, and an accountant counts
what went into the steps. Flower's wrappers do the first two around a synchronous strategy; they
bring Flower's loop of rounds, so they cannot wrap a server that steps as updates come.

Reference:
    Abadi et al. Deep Learning with Differential Privacy. CCS 2016 (clipping and noise).
    McMahan, Ramage, Talwar, Zhang. Learning Differentially Private Recurrent Language Models. ICLR
    2018 (a whole device as the unit).
    Mironov. Renyi Differential Privacy. CSF 2017 (the accountant, from `dp-accounting`).
"""

from collections import Counter
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import inf, isfinite

import numpy as np

from fedstale.errors import ConfigError
from fedstale.strategies.types import (
    Array,
    ClientUpdate,
    Model,
    Stateful,
    norm_of,
    require,
    require_count,
    scale,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Privacy:
    """Makes the models of an asynchronous strategy differentially private for devices.

    An update is clipped to the norm S over all its arrays, weighed by its staleness, and clipped
    again, so that no weight lets it count for more than S. The sum of a buffer gets Gaussian noise
    of standard deviation z S, once, and is divided by the number of updates.

    What the guarantee (epsilon, delta) is of:
        Neighbours are two runs that differ in the updates of one device, all that it ever sends:
        where they enter a step of one, clipped and weighed, zeros enter that of the other
        ("zero-out", `REPLACE_SPECIAL` in `dp-accounting`). Who takes part and when is the same in
        both.
        What is protected are the models, all versions of them, and what follows from them.
        A device with m updates in a step moves its sum by at most m S, so the step is a Gaussian
        mechanism with the multiplier z / m for it, and all steps that it is in compose, by Renyi
        divergences. Epsilon is that of the device that was in the most.
        Nothing is amplified by sampling: devices are picked for being online and report when they
        are done, which is no draw that an accountant could count on. Every merged update counts in
        full; one that was rejected or cancelled counts for nothing.

    What it is not of:
        The server sees each update, and must be trusted with it.
        Metrics, numbers of examples, forecasts and durations that devices report are not clipped
        and get no noise; who took part is not hidden. So a selector or a limit that reads losses
        (`Oort`, `PowerOfChoice`, `ExpectedUtility`, `StopWhen`) lets them into the models past
        epsilon. Choose `Random()` where that matters.
        Noise is that of NumPy's generator in floating point; it withstands nobody who can predict
        that generator, or reads the last bits of sums.
        A run that goes on from a checkpoint counts what the checkpoint counted: keep one at every
        version.

    Integer and boolean arrays stay as they were while there is noise: a rounded count has no room
    for it.

    Without noise there is no guarantee and no epsilon; with `clip_norm=inf` and no noise a strategy
    is what it was, to the last bit.

    Example:
        >>> Privacy(clip_norm=0.5, noise_multiplier=1.0, delta=1e-5)
        Privacy(clip_norm=0.5, noise_multiplier=1.0, delta=1e-05)
    """

    clip_norm: float
    """S, largest L2 norm of an update over all its arrays, > 0; inf clips nothing."""
    noise_multiplier: float
    """z, standard deviation of the noise in the sum of a step, over S, >= 0."""
    delta: float
    """Chance that the bound by epsilon does not hold, in (0, 1); well below 1 / devices."""
    noise_seed: int | None = field(default=None, repr=False)
    """Of the noise, >= 0: a run can then be repeated, and whoever knows the seed can take the noise
    away. None draws it from the system, as real devices need."""

    def __post_init__(self) -> None:
        z = self.noise_multiplier
        require(self.clip_norm > 0, "privacy.clip_norm", self.clip_norm, "a norm > 0")
        require(isfinite(z) and z >= 0, "privacy.noise_multiplier", z, "a finite number >= 0")
        require(0 < self.delta < 1, "privacy.delta", self.delta, "a chance in (0, 1)")
        if self.noise_seed is not None:
            require_count("privacy.noise_seed", self.noise_seed, "an integer >= 0", least=0)
        if z:
            accepted = "a finite norm, where there is noise"
            require(self.clip_norm < inf, "privacy.clip_norm", self.clip_norm, accepted)
            if find_spec("dp_accounting") is None:
                raise ConfigError(
                    "strategy.privacy needs an accountant: pip install 'fedstale[privacy]'"
                )


class GaussianMechanism(Stateful):
    """Clips the updates of one run, adds noise to its steps, and accounts for what was merged.

    Example:
        >>> mechanism = GaussianMechanism(Privacy(clip_norm=1, noise_multiplier=2, delta=1e-5))
        >>> mechanism.count([7, 8])
        >>> mechanism.count([7])
        >>> round(mechanism.epsilon(), 2)
        3.19
    """

    saved = ("_times", "_worst", "_n_drawn")

    def __init__(self, privacy: Privacy) -> None:
        """Start before the first step."""
        self.privacy = privacy
        self._times: dict[int, dict[int, int]] = {}
        """Of each node, by its number of updates in a step, how many such steps there were."""
        self._worst: int | None = None
        """The node whose updates have moved the steps most; None before the first step."""
        self._n_drawn = 0
        self._rng = np.random.default_rng()
        self._epsilon: tuple[dict[int, int], float] = {}, 0.0
        """What the worst node contributed when epsilon was last worked out, and epsilon."""

    def clip(self, update: ClientUpdate) -> None:
        """Scale an update down to the norm S if it is longer; before and after it is weighed.

        One that weighing took out of the finite range becomes zeros.
        """
        most, delta = self.privacy.clip_norm, update.delta
        if most == inf:
            return
        # Scaling rounds, and rounding may leave a bit more than S.
        slack = max((2.0 * float(np.finfo(x.dtype).eps) for x in delta.values()), default=0.0)
        for factor in (1.0, 1.0 - slack, 0.5):
            if (norm := norm_of(delta)) <= most:
                return
            scale(delta, factor * (most / norm))
        if norm_of(delta) > most:
            for array in delta.values():
                array[...] = 0

    def freeze_counts(self, update: ClientUpdate) -> None:
        """Take the changes of integer arrays out of an update, if there is noise."""
        if self.privacy.noise_multiplier:
            scale(update.counts, 0.0)

    def add_noise(self, mean: Model, n_updates: int) -> None:
        """Add one draw of noise to the mean of some updates, in place.

        Args:
            mean: of the clipped updates of a step.
            n_updates: number of them, >= 1.
        """
        z, seed = self.privacy.noise_multiplier, self.privacy.noise_seed
        if not z:
            return
        rng = self._rng
        if seed is not None:
            key = np.random.SeedSequence(seed, spawn_key=(self._n_drawn,))
            rng = np.random.default_rng(key)
        self._n_drawn += 1
        deviation = z * self.privacy.clip_norm / n_updates
        for array in mean.values():
            draw: Array = np.asarray(rng.normal(0.0, deviation, array.shape))
            np.add(array, draw.astype(array.dtype), out=array)

    def count(self, nodes: list[int]) -> None:
        """Count the updates of a step, in time that does not grow with the fleet.

        Args:
            nodes: that sent them, one for each update.
        """
        for node, m in Counter(nodes).items():
            times = self._times.setdefault(node, {})
            times[m] = times.get(m, 0) + 1
            if self._worst is None or self._moved(node) > self._moved(self._worst):
                self._worst = node

    def _moved(self, node: int) -> int:
        """Return what the divergence of a node's Gaussian mechanisms grows with."""
        return sum(times * m * m for m, times in self._times[node].items())

    def epsilon(self) -> float:
        """Return epsilon at delta, for the node that has contributed most; inf without noise."""
        if not self.privacy.noise_multiplier:
            return inf
        if self._worst is None:
            return 0.0
        worst = self._times[self._worst]
        if worst != self._epsilon[0]:
            self._epsilon = dict(worst), self._of(worst)
        return self._epsilon[1]

    def _of(self, times: dict[int, int]) -> float:
        import dp_accounting
        from dp_accounting.rdp import RdpAccountant

        zero_out = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
        accountant = RdpAccountant(neighboring_relation=zero_out)
        for m, n in sorted(times.items()):
            event = dp_accounting.GaussianDpEvent(self.privacy.noise_multiplier / m)
            accountant.compose(event, n)
        return float(accountant.get_epsilon(self.privacy.delta))

    def spent(self) -> dict[str, float]:
        """Return epsilon and its delta as metrics; none without noise."""
        if not self.privacy.noise_multiplier:
            return {}
        return {"epsilon": self.epsilon(), "epsilon_at_delta": self.privacy.delta}
