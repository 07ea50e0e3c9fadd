"""Weights of client updates: the interface, and weights by age, distance and relevance.

Every weighting is exactly 1 at zero staleness, so that without stale updates a strategy is FedAvg
(or FedBuff) to the last bit whatever its weighting. `CachedUpdates` alone changes updates
that are not stale.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from typing import Annotated

from fedstale.strategies.types import (
    AtLeastOne,
    ClientUpdate,
    Model,
    NotNegative,
    Part,
    Positive,
    Share,
    checked,
    inner,
    over_chunks,
    require,
    scale,
    square_distance,
)

AgeCurve = Annotated[Callable[[int], float], "a curve such as polynomial(0.5)"]
Steepness = Annotated[NotNegative, "a finite number >= 0 (0 ignores age)"]


class Weighting(Part, ABC):
    """Decides how much an update counts; may learn from the steps that the server makes.

    `weigh` is all that a subclass must define. The server calls `weigh` once for each update, or
    `weigh_stale` once for each buffer, and then either `observe` (the buffer became a step) or
    `discard` (it did not).
    """

    needs_whole_buffer: bool = False
    """Whether stale updates wait until their buffer closes, and are weighed by `weigh_stale`."""
    from_update_alone: bool = False
    """Whether what `weigh` does to an update follows from it and from models that were sent out,
    and from no other update: what `Privacy` needs."""

    @abstractmethod
    def weigh(self, update: ClientUpdate) -> float:
        """Scale or correct the update's delta in place.

        A weighting that corrects updates instead of discounting them, as `CachedUpdates` does,
        changes the delta as it likes and returns 1: `normalise="weights"` divides by the sum of
        what is returned, so this must be the weight that the delta was scaled by, and 1 if it was
        not scaled.

        Returns:
            The weight, the mean over parameters where they differ; exactly 1 at zero staleness.
        """

    def weigh_stale(self, stale: Sequence[ClientUpdate], current_mean: Model) -> list[float]:
        """Do what `weigh` does to all stale updates of one buffer; if `needs_whole_buffer`.

        Args:
            stale: those with a staleness of at least 1, in the order in which they came.
            current_mean: mean of the updates of the buffer that are not stale; empty if there is
                none.

        Returns:
            Their weights.
        """
        return [self.weigh(update) for update in stale]

    def observe(self, before: Model, after: Model, rate: float) -> None:
        """See one step of the server.

        Args:
            before: the model before it.
            after: the model after it.
            rate: the server's learning rate in this step.
        """

    def discard(self) -> None:
        """Discard the updates weighed since the last step: their buffer made no step."""


class ByAge(Weighting):
    """Weighs an update by its staleness alone.

    Example:
        >>> ByAge(polynomial(0.5))
        ByAge(polynomial(a=0.5))
    """

    from_update_alone = True

    def __init__(self, curve: AgeCurve) -> None:
        """Use a curve from staleness to weight.

        Raises:
            ConfigError: the curve is not 1 at zero staleness.
        """
        try:
            is_curve = curve(0) == 1.0
        except Exception:
            is_curve = False
        accepted = "a curve that is exactly 1 at staleness 0"
        require(is_curve, f"{type(self).__name__}.curve", curve, accepted)
        self.curve = curve

    def weigh(self, update: ClientUpdate) -> float:
        """Multiply the whole update by the curve's value."""
        weight = self.curve(update.staleness)
        scale(update.delta, weight)
        return weight


@dataclass(frozen=True, slots=True, repr=False)
class _Curve:
    name: str
    value: AgeCurve

    def __call__(self, staleness: int) -> float:
        return self.value(staleness)

    def __repr__(self) -> str:
        return self.name


def constant() -> AgeCurve:
    """Return s(tau) = 1: age does not matter."""
    return _Curve("constant()", lambda _: 1.0)


@checked
def polynomial(a: Steepness = 0.5) -> AgeCurve:
    """Return s(tau) = (1 + tau)^-a.

    Args:
        a: exponent, >= 0; 1/2 in FedBuff.

    Reference:
        Xie, Koyejo, Gupta. Asynchronous Federated Optimization. 2019.
        Nguyen et al. Federated Learning with Buffered Asynchronous Aggregation. AISTATS 2022.

    Example:
        >>> polynomial(0.5)(3)
        0.5
    """
    return _Curve(f"polynomial(a={a})", lambda tau: float((1.0 + tau) ** -a))


@checked
def hinge(a: Positive = 10.0, b: NotNegative = 4) -> AgeCurve:
    """Return s(tau) = 1 for tau <= b, else 1 / (a (tau - b) + 1).

    Args:
        a: steepness beyond the hinge, > 0.
        b: staleness that costs nothing, >= 0.

    Reference:
        Xie, Koyejo, Gupta. Asynchronous Federated Optimization. 2019.
    """
    return _Curve(
        f"hinge(a={a}, b={b})", lambda tau: 1.0 if tau <= b else 1.0 / (a * (tau - b) + 1.0)
    )


def staleness_aware() -> AgeCurve:
    """Return SA: s(tau) = 1 / tau for tau >= 1, and 1 for tau = 0.

    Reference:
        Zhang, Gupta, Lian, Liu. Staleness-aware Async-SGD for Distributed Deep Learning.
        IJCAI 2016.
    """
    return _Curve("staleness_aware()", lambda tau: 1.0 / max(tau, 1))


def inverse_root() -> AgeCurve:
    """Return s(tau) = 1 / (1 + sqrt(tau)), as in NVIDIA FLARE's asynchronous aggregation."""
    return _Curve("inverse_root()", lambda tau: 1.0 / (1.0 + sqrt(tau)))


class EuclideanStaleness(Weighting):
    """Weighs an update by 1 / (1 + gamma / epsilon), gamma = |theta_now - theta_base| / |delta|.

    The paper steps by eta = lambda / (gamma + epsilon) times one update. This is that rule, split
    into a server rate of lambda / epsilon and a weight that is 1 where the model has not moved.
    Unlike `Gap`, it knows no typical step: a short update is stale however little the model moved.

    Differences from the paper:
        It composes with any buffer size; the paper applies one update at a time.
        The number of local steps stays what the client makes it. In the paper the server adapts
        it, K <- K + floor(kappa (gamma_target - gamma)), to bring gamma to a target.
        An update of zeros has weight 1, or that of an infinite gamma, 0, if the model has moved.

    Checked: gamma, eta and the rule for K, in a third party's implementation.
    Not checked: the paper's text and its constants; lambda = epsilon = 1 are ours.

    Reference:
        Wang, Yang, He, Shi, Chen. AsyncFedED: Asynchronous Federated Learning with Euclidean
        Distance based Adaptive Weight Aggregation. 2022.

    Example:
        >>> import numpy as np
        >>> update = ClientUpdate(
        ...     delta={"w": np.array([0.0, 1.0])},
        ...     base={"w": np.array([0.0, 0.0])},
        ...     current={"w": np.array([3.0, 0.0])},
        ...     staleness=2,
        ... )
        >>> EuclideanStaleness(epsilon=1.0).weigh(update)
        0.25
    """

    from_update_alone = True

    def __init__(self, epsilon: Positive = 1.0) -> None:
        """Set epsilon > 0: an update counts half once the model has moved epsilon of its length."""
        self.epsilon = epsilon

    def weigh(self, update: ClientUpdate) -> float:
        """Scale the whole update; see the class."""
        if update.staleness == 0:
            return 1.0
        moved = sqrt(square_distance(update.current, update.base))
        length = sqrt(sum(over_chunks(lambda d: inner(d, d), update.delta)))
        reach = self.epsilon * length
        weight = reach / (moved + reach) if moved > 0.0 else 1.0
        scale(update.delta, weight)
        return weight


class RelevanceAware(Weighting):
    """Weighs the stale updates of one buffer together; SAA.

    A stale update that repeats the current ones adds nothing; one that deviates from them may come
    from examples that no other client has. How far it deviates is known only when its buffer
    closes, so the stale updates of a buffer wait until then: as many models as the buffer has stale
    updates.

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

    def __init__(self, beta: Share = 0.35, *, scale: AtLeastOne = 1.0) -> None:
        """Choose between age and deviation.

        Args:
            beta: share of the deviation, in [0, 1]; at 0 only age counts.
            scale: what the exponential is divided by, >= 1.
        """
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
