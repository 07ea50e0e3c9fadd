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
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import inf
from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Gt

from fedstale.errors import ConfigError, needs
from fedstale.strategies.stages.base import Stage, StageRun
from fedstale.strategies.types import (
    Array,
    Chance,
    ClientUpdate,
    Model,
    NotNegative,
    Whole,
    norm_of,
    require,
    scale,
)

if TYPE_CHECKING:
    from fedstale.strategies.server import StaleStrategy


class Privacy(Stage):
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
        (`Oort`, `PowerOfChoice`, `ExpectedUtility`, `until`) lets them into the models past
        epsilon. Choose `Random()` where that matters.
        Noise is that of NumPy's generator in floating point; it withstands nobody who can predict
        that generator, or reads the last bits of sums.
        A run that goes on from a checkpoint counts what the checkpoint counted: keep one at every
        version.

    Integer and boolean arrays stay as they were while there is noise: a rounded count has no room
    for it.

    Without noise there is no guarantee and no epsilon; with `clip_norm=inf` and no noise a strategy
    is what it was, to the last bit.

    It needs `normalise="buffer_size"`, a pace that follows no losses, and a weighting that
    looks at no other update (by age or by a gap).

    Args:
        clip_norm: S, largest L2 norm of an update over all its arrays, > 0; inf clips nothing.
        noise_multiplier: z, standard deviation of the noise in the sum of a step, over S, >= 0.
        delta: chance that the bound by epsilon does not hold, in (0, 1); well below 1 / devices.
        noise_seed: of the noise, >= 0: a run can then be repeated, and whoever knows the seed can
            take the noise away. None draws it from the system, as real devices need.

    Example:
        >>> privacy = Privacy(clip_norm=1.0, noise_multiplier=2.0, delta=1e-5)
        >>> privacy
        Privacy(clip_norm=1.0, noise_multiplier=2.0, delta=1e-05)
        >>> privacy.count([7, 8])
        >>> privacy.count([7])
        >>> round(privacy.epsilon(), 2)
        3.19
    """

    saved = ("_times", "_worst", "_n_drawn")
    requires = frozenset({"same settings", "own norms"})

    def __init__(
        self,
        *,
        clip_norm: Annotated[float, Gt(0), "a norm > 0"],
        noise_multiplier: NotNegative,
        delta: Chance,
        noise_seed: Whole | None = None,
    ) -> None:
        self.clip_norm, self.noise_multiplier, self.delta = clip_norm, noise_multiplier, delta
        self._seed, z = noise_seed, noise_multiplier
        if z:
            accepted = "a finite norm, where there is noise"
            require(clip_norm < inf, "Privacy.clip_norm", clip_norm, accepted)
            if find_spec("dp_accounting") is None:
                raise ConfigError(f"strategy.Privacy {needs('dp_accounting')}")
        self._times: dict[int, dict[int, int]] = {}
        """Of each node, by its number of updates in a step, how many such steps there were."""
        self._worst: int | None = None
        """The node whose updates have moved the steps most; None before the first step."""
        self._n_drawn = 0
        self._epsilon: tuple[dict[int, int], float] = {}, 0.0
        """What the worst node contributed when epsilon was last worked out, and epsilon."""

    def check(self, strategy: "StaleStrategy") -> None:
        """Raise ConfigError where one device's updates would move more of a step than its own."""
        accepted = "'buffer_size' with Privacy: numbers of examples are a device's own"
        require(strategy.normalise == "buffer_size", "normalise", strategy.normalise, accepted)
        accepted = "None with Privacy: the sensitivity of a rule is not known"
        require(strategy.robust is None, "robust", strategy.robust, accepted)
        accepted = "None with Privacy, which clips to its own norm"
        cap = strategy.validation.norm_cap
        require(cap is None, "validation.norm_cap", cap, accepted)
        pace = strategy.run_pace
        accepted = "one that follows no losses with Privacy, as Ramp does: they get no noise"
        require(pace is None or not pace.reads_replies, "pace", pace, accepted)
        accepted = "one that looks at a single update, as ByAge and Gap do, with Privacy"
        weighting = strategy.weighting
        require(weighting.from_update_alone, "weighting", weighting, accepted)

    def begin(self, run: StageRun, state: Mapping[str, object] | None) -> None:
        """Prepare for a run; two runs of one strategy draw other noise, unless it is seeded."""
        super().begin(run, state)
        self._rng = np.random.default_rng()

    def accepted(self, update: ClientUpdate) -> None:
        """Clip an update before it is weighed, and again, so that no weight lets it count for more.

        If there is noise, the changes of integer arrays are taken out.
        """
        self.clip(update)
        if self.noise_multiplier:
            scale(update.counts, 0.0)

    def step(self, mean: Model, updates: Sequence[ClientUpdate]) -> Mapping[str, float]:
        """Add noise to the mean of a step, account for its updates, and return epsilon."""
        self.add_noise(mean, len(updates))
        self.count([update.node_id for update in updates])
        if not self.noise_multiplier:
            return {}
        return {"epsilon": self.epsilon(), "epsilon_at_delta": self.delta}

    def clip(self, update: ClientUpdate) -> None:
        """Scale an update down to the norm S if it is longer; before and after it is weighed.

        One that weighing took out of the finite range becomes zeros.
        """
        most, delta = self.clip_norm, update.delta
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

    def add_noise(self, mean: Model, n_updates: int) -> None:
        """Add one draw of noise to the mean of some updates, in place.

        Args:
            mean: of the clipped updates of a step.
            n_updates: number of them, >= 1.
        """
        z, seed = self.noise_multiplier, self._seed
        if not z:
            return
        rng = self._rng
        if seed is not None:
            key = np.random.SeedSequence(seed, spawn_key=(self._n_drawn,))
            rng = np.random.default_rng(key)
        self._n_drawn += 1
        deviation = z * self.clip_norm / n_updates
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
        """Sum the squares with which the divergence of a node's Gaussian mechanisms grows."""
        return sum(times * m * m for m, times in self._times[node].items())

    def epsilon(self) -> float:
        """Return epsilon at delta, for the node that has contributed most; inf without noise."""
        if not self.noise_multiplier:
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
            event = dp_accounting.GaussianDpEvent(self.noise_multiplier / m)
            accountant.compose(event, n)
        return float(accountant.get_epsilon(self.delta))
