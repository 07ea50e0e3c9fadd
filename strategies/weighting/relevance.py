"""REFL's staleness-aware aggregation: a stale update counts by its age and by what it adds.

A stale update that repeats the current ones adds nothing; one that deviates from them may come from
examples that no other client has. How far it deviates is known only when its buffer closes, so the
stale updates of a buffer wait until then: as many models as the buffer has stale updates.
"""

from collections.abc import Sequence
from math import exp

from fedstale.strategies.types import ClientUpdate, Model, require, scale, square_distance
from fedstale.strategies.weighting.base import Weighting


class RelevanceAware(Weighting):
    """Weighs the stale updates of one buffer together; SAA.

    With u_F the mean of the n_F current updates and Lambda_i the deviation of a stale update u_i
    from it,

        Lambda_i = |u_F - (u_i + n_F u_F) / (n_F + 1)|^2 / |u_F|^2,
        w_i = (1 - beta) / (tau_i + 1) + beta (1 - exp(-Lambda_i / Lambda_max) / scale),

    where Lambda_max is the largest of the buffer. Current updates have weight 1, and the paper
    divides by the sum of weights: use `normalise="weights"`.

    In a quotient of two Lambdas of one buffer, n_F + 1 and |u_F| cancel, so |u_i - u_F|^2 is
    enough. Stale updates that all equal u_F keep only the first term. In a buffer without current
    updates there is nothing to deviate from, and w_i = 1 / (tau_i + 1).

    Differences from the paper:
        u_F is the mean that the buffer would make of the current updates, by examples if it
        normalises by them. No update is too old.
        The authors' code has scale = 10, which gives every stale update at least 0.9 beta; with
        scale = 1 one that repeats the current updates gets nothing for it. There, Lambda compares
        whole models instead of updates where clients send those.

    Checked: the formula of w_i, beta = 0.35 and scale = 10 in the authors' code.
    Not checked: that the paper's own formula has no scale.

    Reference:
        Abdelmoniem, Sahu, Canini, Fahmy. REFL: Resource-Efficient Federated Learning.
        EuroSys 2023.

    Example:
        >>> import numpy as np
        >>> zero = {"w": np.zeros(1)}
        >>> stale = [
        ...     ClientUpdate(delta={"w": np.array([d])}, base=zero, current=zero, staleness=1)
        ...     for d in (1.0, 3.0)
        ... ]
        >>> weights = RelevanceAware(beta=0.5).weigh_stale(stale, {"w": np.array([1.0])})
        >>> [round(w, 6) for w in weights]
        [0.25, 0.56606]
    """

    needs_whole_buffer = True

    def __init__(self, beta: float = 0.35, *, scale: float = 1.0) -> None:
        """Choose between age and deviation.

        Args:
            beta: share of the deviation, in [0, 1]; at 0 only age counts.
            scale: what the exponential is divided by, >= 1.
        """
        require(0 <= beta <= 1, "weighting.beta", beta, "a number in [0, 1], such as 0.35")
        require(scale >= 1, "weighting.scale", scale, "a number >= 1 (1 is the paper's formula)")
        self.beta, self.scale = beta, scale

    def weigh(self, update: ClientUpdate) -> float:
        """Return 1 for a current update; weigh a stale one as if it were alone in its buffer."""
        return self.weigh_stale([update], {})[0] if update.staleness else 1.0

    def weigh_stale(self, stale: Sequence[ClientUpdate], current_mean: Model) -> list[float]:
        """Scale the stale updates of one buffer; see the class."""
        weights = [1.0 / (update.staleness + 1) for update in stale]
        compared = stale if current_mean else ()
        deviations = [square_distance(update.delta, current_mean) for update in compared]
        most = max(deviations, default=0.0)
        for i, deviation in enumerate(deviations):
            # Where the largest is infinite or 0, the quotient would be NaN.
            ratio = 1.0 if deviation == most > 0.0 else deviation / (most or 1.0)
            boost = 1.0 - exp(-ratio) / self.scale
            weights[i] = (1.0 - self.beta) * weights[i] + self.beta * boost
        for update, weight in zip(stale, weights, strict=True):
            scale(update.delta, weight)
        return weights
