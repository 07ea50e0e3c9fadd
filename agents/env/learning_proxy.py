"""How a model would learn from a server step, in a few numbers instead of a training run.

Data come in groups (labels, topics, languages), and every device holds a mixture of them. The model
has a loss on each group, which falls with the share that the group had in a server step, and rises
towards a ceiling where the group had none, since other groups move the model. So a device is useful
while its groups are learnt badly; picking the same reliable devices for ever is not, unless they
hold everything.

    log L_g <- log L_g + s^nu (rho exp(-lambda r_g) log(C / L_g) - eta r_g (L_g / L_0)^delta)

with r_g the group's share of the aggregated data over its share of the fleet's, and s the mean size
of the aggregated devices over that of the fleet: a device with more data takes more steps. A device
reports a loss of its own, c (sum_g q_g L_g)^omega exp(mu H) times noise, with H the entropy of its
mixture in nats: it has trained when it measures, and a mixture is harder to fit than one group. The
constants are fitted to training runs, which `learning_proxy.toml` names.

This is a model made for this package; no paper is followed.
"""

import tomllib
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedstale.errors import ConfigError
from fedstale.traces import Array

CONSTANTS = Path(__file__).with_name("learning_proxy.toml")
"""The file of constants that comes with the package; its provenance names the runs."""
_LEAST = 1e-4
_LARGEST_RATIO = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningProxy:
    """The constants of the learning proxy.

    Example:
        >>> proxy = LearningProxy(eta=0.2, delta=0.0, nu=0.0, rho=0.1, fade=2.0, ceiling=np.e)
        >>> after = proxy.after_step(np.ones((1, 2)), np.array([[2.0, 0.0]]), np.ones(1))
        >>> np.log(after).round(3)
        array([[-0.398,  0.1  ]])
    """

    eta: float
    """How fast a group is learnt that has its share of a server step, > 0."""
    delta: float
    """How much slower a group is learnt as its loss falls, >= 0."""
    nu: float
    """How much more larger devices move the model, >= 0."""
    rho: float
    """How fast a group without any share is forgotten, >= 0."""
    fade: float
    """lambda: how fast forgetting ends as the share of the group grows, >= 0."""
    ceiling: float
    """C: the loss of a group that is forgotten, > 0."""
    first_loss: float = 2.303
    """L_0: loss of an untrained model on every group, in (0, C]."""
    loss_scale: float = 1.0
    """c: reported loss of a device with one group at a loss of 1, > 0."""
    loss_power: float = 1.0
    """omega: how the reported loss follows the loss, > 0."""
    loss_mixed: float = 0.0
    """mu: how much more a device with a mixture reports."""
    loss_noise: float = 0.2
    """Standard deviation of the logarithm of the reported loss, >= 0."""

    def __post_init__(self) -> None:
        good = all(np.isfinite(getattr(self, f.name)) for f in fields(self))
        good &= min(self.eta, self.loss_scale, self.loss_power) > 0
        good &= min(self.delta, self.nu, self.rho, self.fade, self.loss_noise) >= 0
        good &= 0 < self.first_loss <= self.ceiling
        if not good:
            raise ConfigError(
                f"proxy = {self}: expected eta, loss_scale and loss_power > 0, first_loss in "
                "(0, ceiling], and the others >= 0"
            )

    def after_step(self, losses: Array, ratios: Array, sizes: Array) -> Array:
        """Return the losses after a server step.

        Args:
            losses: of each group; shape (b, groups).
            ratios: share of each group in the step, stale updates at their weight, over its share
                of the fleet; shape (b, groups).
            sizes: mean number of examples of the aggregated devices, weighted as their updates
                are, over the mean of the fleet; shape (b,).
        """
        ratios = np.clip(ratios, 0.0, _LARGEST_RATIO)
        losses = np.maximum(losses, _LEAST)
        forgotten = self.rho * np.exp(-self.fade * ratios) * np.log(self.ceiling / losses)
        learnt = self.eta * ratios * (losses / self.first_loss) ** self.delta
        moved = np.asarray(sizes)[:, None] ** self.nu * (forgotten - learnt)
        return np.clip(losses * np.exp(np.clip(moved, -50.0, 50.0)), _LEAST, self.ceiling)

    def fleet_progress(self, losses: Array) -> Array:
        """Compute the fall of log loss in a step with the fleet's own mixture; shape (b,).

        What such a step forgets is left out, so that the result is positive.
        """
        mean = losses.mean(axis=1, keepdims=True)
        return np.asarray(self.eta * (mean / self.first_loss) ** self.delta)[:, 0]

    def reported(self, losses: Array, entropy: npt.ArrayLike, noise: npt.ArrayLike) -> Array:
        """Return the training losses that devices report.

        Args:
            losses: of the model on each device's own mixture; shape (n,).
            entropy: of the mixtures in nats; shape (n,).
            noise: standard normal; shape (n,).
        """
        exact = self.loss_scale * np.maximum(losses, _LEAST) ** self.loss_power
        logs = self.loss_mixed * np.asarray(entropy) + self.loss_noise * np.asarray(noise)
        return np.asarray(exact * np.exp(logs))


def entropy_of(mixtures: Array) -> Array:
    """Return the entropy of mixtures in nats; along the last axis.

    Example:
        >>> entropy_of(np.array([[1.0, 0.0], [0.5, 0.5]])).round(4)
        array([0.    , 0.6931])
    """
    logs = np.log(np.where(mixtures > 0, mixtures, 1.0))
    return np.asarray(np.maximum(-(mixtures * logs).sum(axis=-1), 0.0))


@lru_cache(maxsize=1)
def fitted() -> LearningProxy:
    """Return the proxy with the constants that come with the package."""
    return LearningProxy(**tomllib.loads(CONSTANTS.read_text(encoding="utf-8"))["constants"])


def assign(
    rng: np.random.Generator, shape: tuple[int, int], n_groups: int, skew: Array, spread: Array
) -> tuple[Array, Array]:
    """Return the data that devices hold.

    Args:
        rng: of the draw.
        shape: (b, n), episodes and devices.
        n_groups: number of groups.
        skew: concentration of the Dirichlet distribution over groups, small is uneven; (b,).
        spread: standard deviation of the logarithm of the number of examples; (b,).

    Returns:
        Mixtures (b, n, groups), each summing to 1, and numbers of examples >= 1 (b, n).
    """
    drawn = rng.standard_gamma(np.broadcast_to(skew[:, None, None], (*shape, n_groups)))
    drawn = np.maximum(drawn, 1e-12)
    mixtures = drawn / drawn.sum(axis=2, keepdims=True)
    examples = np.exp(np.log(100.0) + spread[:, None] * rng.standard_normal(shape))
    return mixtures, np.maximum(np.rint(examples), 1.0)
